"""The paper's own numbers (paper_points.csv: each with its table, figure or text) as curves, and its claims of compute
saved beside what the report's rule makes of the same points.
"""

import csv
import io
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby

from fastsuncet.compute import analytic_macs, equivalent_epochs, petaflops, run_samples
from fastsuncet.errors import ConfigError
from fastsuncet.report.curves import Curve, Evaluation, Point
from fastsuncet.report.panels import Panel, arrange
from fastsuncet.report.saved import Saving, savings
from fastsuncet.report.saved_figure import Printed
from fastsuncet.report.table import markdown

IMAGES, BATCH = 1_281_167, 4_096  # ImageNet, and SimCLR's update
TEN, ONE = "imagenet-10pct", "imagenet-1pct"
UNSUPERVISED = ("SimCLR", "SimCLRv2", "SwAV", "NPID++", "PIRL")  # pre-training without labels
SUNCET = "SimCLR + SuNCEt"


@dataclass(frozen=True)
class Published:
    """One row of the data: a number the paper or its authors' README gives."""

    row: int  # of docs/recipe.md, section 6
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
        macs = analytic_macs("resnet50", "imagenet", 224, 2048, 128)
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
    text = (files("fastsuncet.report") / "paper_points.csv").read_text(encoding="utf-8")
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
        shown = Evaluation(kind, f"{labels} % labels" if labels else "")
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
        lines.append(f"- {source}: row {rows} of docs/recipe.md, section 6{read}")
    return lines


# ------------------------------------------------------------------------------- what the paper says was saved
def printed() -> list[Printed]:
    """The paper's percentages of compute to match SimCLR (rows 10 and 11)."""
    return [
        Printed(f"{p.method} (paper)", str(Evaluation("finetune", f"{p.labels} % labels")), p.metric, p.value)
        for p in load()
        if p.row in (10, 11)
    ]


def compare() -> tuple[list[str], dict[tuple[str, str, str], Saving]]:
    """(Markdown lines, our savings by (figure, metric, cost)): the paper's percentages beside our rule's, and why."""
    found, rows, why = {}, [], []
    for figure, row in ((TEN, 10), (ONE, 11)):
        (panel,) = arrange(curves(figure))
        for metric in ("top1", "top5"):
            found |= {(figure, metric, s.cost): s for s in savings(panel, metric)}
            said = next(p.value for p in load() if p.row == row and p.metric == metric)
            flops, updates = (found[figure, metric, cost] for cost in ("petaflops", "updates"))
            bound = "at most " if flops.at_first else ""
            shares = [flops.share(), flops.share(linear=False), updates.share(), updates.share(linear=False)]
            rows.append(
                [f"{figure}, {metric}", f"{said:g}", *(f"{bound}{100 * share:.1f}" for share in shares)]
            )
            why += _why_ten(panel, metric, said, flops) if figure == TEN else []
    why += _why_one()
    head = [
        "% of SimCLR's compute to match its best",
        "the paper",
        "FLOPs, linear",
        "FLOPs, first checkpoint",
    ]
    table = markdown([*head, "updates, linear", "updates, first checkpoint"], rows)
    return [*table, "", "Why they differ:", "", *why], found


def _why_ten(panel: Panel, metric: str, said: float, saving: Saving) -> list[str]:
    """What would have to be true for the paper's percentage to follow from a straight line between its points."""
    ours = next(g for g in panel.groups if g.supervised).with_metric(metric)
    cost = said / 100 * saving.total
    below, above = (ours[i] for i in (-2, -1))
    c0, c1 = below.costs["petaflops"], above.costs["petaflops"]
    a0, a1 = 100 * below.metrics[metric], 100 * above.metrics[metric]
    there = a0 + (a1 - a0) * (cost - c0) / (c1 - c0)
    epochs = below.costs["epochs"] + (above.costs["epochs"] - below.costs["epochs"]) * (cost - c0) / (c1 - c0)
    between = RECIPES[SUNCET, "10"].costs(400)["petaflops"]
    needed = a0 + (100 * saving.target - a0) * (between - c0) / (cost - c0)
    return [
        f"- 10 % labels, {metric}: SuNCEt's published points next to SimCLR's best ({100 * saving.target:.1f}) are "
        f"{a0:.1f} at {below.costs['epochs']:g} epochs and {a1:.1f} at {above.costs['epochs']:g}. The straight line "
        f"between them crosses it at {100 * saving.share():.1f} % of SimCLR's FLOPs. The paper's {said:g} % is the "
        f"compute of about {epochs:.0f} epochs, where the line is at {there:.1f}; a 400-epoch run between the two "
        f"(appendix G has one) would have to reach {needed:.1f}, more than the 500-epoch run did. The paper does not "
        "say how it interpolates."
    ]


def _why_one() -> list[str]:
    recipe = RECIPES[SUNCET, "1"]
    equal = {epochs: equivalent_epochs(recipe.samples(epochs), IMAGES, BATCH) for epochs in (400, 500)}
    return [
        f"- 1 % labels: one SuNCEt point is published, at 500 epochs, the compute of {equal[500]:.1f} epochs of "
        f"SimCLR. It is better than SimCLR's 500, so our rule only says at most {equal[500] / 5:.1f} %. A run of 400 "
        f"epochs costs {equal[400]:.1f} epochs of SimCLR, {equal[400] / 5:.1f} % of 500: the paper's 83 % would be "
        "that run as the first checkpoint at or above, whose accuracy is not published. The 81 % for top-5 is less "
        "than that run cost, so something was interpolated or a shorter run was better."
    ]
