"""What a report is made of: accuracies of a run beside what each had cost."""

from dataclasses import dataclass
from typing import Any, NamedTuple

COSTS = ("epochs", "updates", "petaflops", "hours", "joules")
ONLINE = "online knn"  # the kind of the "knn" lines in metrics.jsonl; its one metric is KNN
KNN = "knn"
KINDS = {
    "finetune": "fine-tuning",
    "linear": "a linear classifier",
    "knn": "nearest neighbours",
    "npi": "SuNCEt's own classifier",
    "accuracy": "the network's own classifier",
    "transfer": "transfer",
    ONLINE: "KNN while training",
}


class Evaluation(NamedTuple):
    """What was measured. Numbers of one evaluation can be compared, of two they cannot."""

    kind: str  # "finetune", "linear", ...
    labels: str  # "10 % labels"
    variant: str = ""  # "k=20", where one run was evaluated in several ways

    def __str__(self) -> str:
        """As a person says it: "fine-tuning, 10 % labels"."""
        return ", ".join(part for part in (KINDS.get(self.kind, self.kind), *self[1:]) if part)


@dataclass(frozen=True)
class Point:
    """One evaluated encoder."""

    step: int | None  # updates done; None for an encoder from a file, which is on no curve
    costs: dict[str, float]  # those of COSTS that are known
    metrics: dict[str, float]  # shares, 0 to 1


@dataclass(frozen=True)
class Curve:
    """One run in one evaluation, its points by step."""

    run: str
    method: str
    seed: int | None
    evaluation: Evaluation
    points: tuple[Point, ...]
    supervised: bool = False  # did pre-training use labels
    # of the config, without seeds: equal in runs that seeds alone set apart
    settings: tuple[tuple[str, Any], ...] = ()
    published: bool = False  # the paper's own


def labels_text(labels: dict[str, Any]) -> str:
    """The labels an evaluation learned from: "10 % labels", or their number, or "all labels"."""
    if labels.get("kind") == "all" or labels.get("fraction") == 1:
        return "all labels"
    if labels.get("fraction") is not None:
        return f"{100 * labels['fraction']:g} % labels"
    return f"{labels['count']:,} labels" if labels.get("count") is not None else ""
