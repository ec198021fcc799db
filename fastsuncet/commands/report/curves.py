"""A report's data: the accuracies of runs, and what each had cost."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

COSTS = ("epochs", "updates", "petaflops", "hours", "joules")
ONLINE = "online knn"  # the kind of the "knn" lines in metrics.jsonl; its one metric is KNN
KNN = "knn"
KINDS = {
    "finetune": "fine-tuning",
    "linear": "a linear classifier",
    "knn": "nearest neighbors",
    "npi": "SuNCEt's own classifier",
    "accuracy": "the network's own classifier",
    "transfer": "transfer",
    ONLINE: "KNN while training",
}
LENGTHS = ("optimization.epochs", "optimization.steps")


class Measurement(NamedTuple):
    """What was measured. Only numbers of the same measurement can be compared."""

    kind: str  # "finetune", "linear", ...
    labels: str  # "10 % labels"
    variant: str = ""  # "k=20", where a run was evaluated with several settings

    def __str__(self) -> str:
        """Return it in words: "fine-tuning, 10 % labels"."""
        return ", ".join(part for part in (KINDS.get(self.kind, self.kind), *self[1:]) if part)


@dataclass(frozen=True)
class Point:
    """One evaluated encoder."""

    step: int | None  # updates done; None for an encoder from a file, which is on no curve
    costs: dict[str, float]  # those of COSTS that are known
    metrics: dict[str, float]  # shares, 0 to 1


@dataclass(frozen=True)
class Curve:
    """One run in one measurement, its points by step."""

    run: str
    method: str
    seed: int | None
    measurement: Measurement
    points: tuple[Point, ...]
    supervised: bool = False  # whether pre-training used labels
    # Of the config, without seeds: equal in runs that differ only in their seed.
    settings: tuple[tuple[str, Any], ...] = ()
    published: bool = False  # the paper's own


def labels_text(labels: dict[str, Any]) -> str:
    """Return the labels that an evaluation learned from: "10 % labels", or their number, or "all labels"."""
    if labels.get("kind") == "all" or labels.get("fraction") == 1:
        return "all labels"
    if labels.get("fraction") is not None:
        return f"{100 * labels['fraction']:g} % labels"
    return f"{labels['count']:,} labels" if labels.get("count") is not None else ""


def join_lengths(curves: list[Curve]) -> list[Curve]:
    """Merge runs that differ only in length into one curve of their final checkpoints, as the paper draws ImageNet.

    There each length is a run of its own, because the learning rate ends with it. Runs are merged within a seed; other
    runs stay as they are.
    """
    families: dict[tuple, list[Curve]] = {}
    for curve in curves:
        rest = tuple((key, value) for key, value in curve.settings if key not in LENGTHS)
        families.setdefault((curve.method, curve.seed, curve.measurement, rest), []).append(curve)
    joined = []
    for (*_, rest), family in families.items():
        if len({curve.settings for curve in family}) == 1:  # all of one length
            joined += family
            continue
        ends = sorted((curve.points[-1] for curve in family), key=lambda point: point.step or 0)
        longest = max(family, key=lambda curve: curve.points[-1].step or 0)  # the curve has its name
        joined.append(replace(longest, points=tuple(ends), settings=rest))
    return joined
