"""The paper's own numbers (paper_points.csv: each with its table, figure or text) as curves."""

import csv
import io
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby

from fastsuncet.commands.report.curves import Curve, Evaluation, Point, labels_text
from fastsuncet.errors import ConfigError
from fastsuncet.models.flops import network_cost, petaflops, run_samples

IMAGES, BATCH = 1_281_167, 4_096  # ImageNet, and SimCLR's update
TEN, ONE = "imagenet-10pct", "imagenet-1pct"
UNSUPERVISED = ("SimCLR", "SimCLRv2", "SwAV", "NPID++", "PIRL")  # pre-training without labels
SUNCET = "SimCLR + SuNCEt"


@dataclass(frozen=True)
class Published:
    """One row of the data: a number the paper or its authors' README gives."""

    row: int  # the experiment it belongs to: one table, figure or statement
    figure: str
    method: str
    labels: str  # in %, or ""
    epochs: int | None
    kind: str
    metric: str
    value: float | None  # in %; None: a curve or a statement without a number, see `note`
    approx: bool  # read from a picture
    drawn: bool  # False: another source of the same point wins, or it is no accuracy
    source: str
    note: str


@dataclass(frozen=True)
class Recipe:
    """What the epochs of a method cost on ImageNet: images an update, and for how many epochs with labels."""

    unlabeled: int
    labeled: int = 0
    supervised_epochs: int = 0

    def samples(self, epochs: float) -> int:
        """Views through the network in that many epochs."""
        a_pass = IMAGES // self.unlabeled
        return run_samples(
            round(epochs * a_pass), self.supervised_epochs * a_pass, self.unlabeled, self.labeled
        )

    def costs(self, epochs: float) -> dict[str, float]:
        """The costs that follow from the epochs; hours and joules were not published."""
        macs = network_cost("resnet50", "imagenet", 224).macs
        updates = round(epochs * (IMAGES // self.unlabeled))
        return {"epochs": epochs, "updates": updates, "petaflops": petaflops(macs, self.samples(epochs))}


# (method, labels in %) -> section 4.1: 64 x 64 images an update, or 64 x 44 and 64 x 40 labeled ones
RECIPES = {
    ("SimCLR", "10"): Recipe(BATCH),
    ("SimCLR", "1"): Recipe(BATCH),
    (SUNCET, "10"): Recipe(2_816, 2_560, 250),
    (SUNCET, "1"): Recipe(2_816, 2_560, 30),
}


def load() -> list[Published]:
    """All rows."""
    text = (files("fastsuncet.commands.report") / "paper_points.csv").read_text(encoding="utf-8")
    return [
        Published(
            row=int(r["row"]),
            epochs=int(r["epochs"]) if r["epochs"] else None,
            value=float(r["value"]) if r["value"] else None,
            approx=r["approx"] == "1",
            drawn=r["drawn"] == "1",
            **{key: r[key] for key in ("figure", "method", "labels", "kind", "metric", "source", "note")},
        )
        for r in csv.DictReader(io.StringIO(text))
    ]


def figures() -> list[str]:
    """The names that --paper takes: what has points to draw."""
    return list(dict.fromkeys(p.figure for p in load() if p.drawn))


def curves(figure: str) -> list[Curve]:
    """The paper's curves of one figure. Raises ConfigError for a name that is none of `figures`."""
    if figure not in figures():
        raise ConfigError(f"--paper {figure}: there is no such figure; there is {', '.join(figures())}")
    points = [p for p in load() if p.figure == figure and p.drawn]
    order = list(dict.fromkeys((p.kind, p.labels, p.method) for p in points))
    found = []
    for (kind, labels, method), members in groupby(
        sorted(points, key=lambda p: order.index((p.kind, p.labels, p.method))),
        lambda p: (p.kind, p.labels, p.method),
    ):
        by_epochs: dict[int | None, dict[str, float]] = {}
        for p in members:
            by_epochs.setdefault(p.epochs, {})[p.metric] = p.value / 100
        share = {"fraction": float(labels) / 100} if labels else {}
        shown = Evaluation(kind, labels_text(share))
        if figure == "transfer":
            shown = Evaluation(kind, "")  # what it pre-trained with, not what it was evaluated with
        found.append(
            Curve(
                run=f"paper, {figure}",
                method=method,
                seed=None,
                evaluation=shown,
                points=tuple(
                    _point(method, labels, e, m)
                    for e, m in sorted(by_epochs.items(), key=lambda i: i[0] or 0)
                ),
                supervised=method not in UNSUPERVISED,
                published=True,
            )
        )
    return found


def _point(method: str, labels: str, epochs: int | None, metrics: dict[str, float]) -> Point:
    if epochs is None:
        return Point(None, {}, metrics)
    recipe = RECIPES.get((method, labels))
    costs = recipe.costs(epochs) if recipe else {"epochs": epochs}
    return Point(int(costs.get("updates", epochs)), costs, metrics)


def sources(figure: str) -> list[str]:
    """Where the drawn points of a figure are from, a line each."""
    drawn = [p for p in load() if p.figure == figure and p.drawn]
    lines = []
    for source, members in groupby(sorted(drawn, key=lambda p: p.source), lambda p: p.source):
        listed = list(members)
        rows = ", ".join(map(str, sorted({p.row for p in listed})))
        read = "; read from the picture, good to 0.1 at best" if any(p.approx for p in listed) else ""
        lines.append(f"- {source}: row {rows} of paper_points.csv{read}")
    return lines
