"""The paper's own numbers as curves: paper_points.csv, each with its table, figure or text.

paper_claims.md compares the percentages that the paper prints with what the report's rule makes of its points; a test
recomputes its table.
"""

import csv
import io
from functools import cache
from importlib.resources import files

from pydantic.dataclasses import dataclass

from fastsuncet.commands.report.curves import Curve, Measurement, Point, labels_text
from fastsuncet.config import load_config
from fastsuncet.errors import ConfigError
from fastsuncet.models.flops import petaflops, run_macs

IMAGES = 1_281_167  # ImageNet
TEN, ONE = "imagenet-10pct", "imagenet-1pct"
UNSUPERVISED = ("SimCLR", "SimCLRv2", "SwAV", "NPID++", "PIRL")  # pre-training without labels
# (method, labels in %) -> the config of that pre-training
CONFIGS = {
    ("SimCLR", "10"): "in1k_simclr",
    ("SimCLR", "1"): "in1k_simclr",
    ("SimCLR + SuNCEt", "10"): "in1k_10pct",
    ("SimCLR + SuNCEt", "1"): "in1k_1pct",
    ("PAWS", "10"): "in1k_10pct_paws",
    ("PAWS", "1"): "in1k_1pct_paws",
}


@dataclass(frozen=True)
class PublishedPoint:
    """One row of the data: a number that the paper or its authors' README gives."""

    row: int  # the experiment it belongs to: one table, figure or statement
    figure: str
    method: str
    kind: str
    metric: str
    approx: bool  # read from a picture
    drawn: bool  # False: another source of the same point is used, or it is no accuracy
    source: str
    labels: str = ""  # in %
    epochs: int | None = None
    value: float | None = None  # in %; None: a curve or a statement without a number, see `note`
    note: str = ""


@cache
def load() -> list[PublishedPoint]:
    """Return all rows of paper_points.csv."""
    rows = csv.DictReader(io.StringIO(_data("paper_points.csv")))
    return [PublishedPoint(**{key: text for key, text in row.items() if text}) for row in rows]  # type: ignore[arg-type]


def claims() -> list[str]:
    """Return the lines of paper_claims.md."""
    return _data("paper_claims.md").splitlines()


def _data(name: str) -> str:
    return (files("fastsuncet.commands.report") / name).read_text(encoding="utf-8")


def printed_savings() -> dict[tuple[str, str, str], float]:
    """Return the paper's % of compute to match SimCLR (rows 10 and 11) by (method, measurement, metric)."""
    return {
        (f"{p.method} (paper)", str(Measurement("finetune", f"{p.labels} % labels")), p.metric): p.value
        for p in load()
        if p.row in (10, 11) and p.value is not None
    }


def figures() -> list[str]:
    """Return the names that --paper takes: figures with points to draw."""
    return list(dict.fromkeys(p.figure for p in load() if p.drawn))


def curves(figure: str) -> list[Curve]:
    """Return the paper's curves of one figure. Raises ConfigError for a name that is not in `figures`."""
    if figure not in figures():
        raise ConfigError(f"--paper {figure}: there is no such figure; there is {', '.join(figures())}")
    members: dict[tuple[str, str, str], dict[int | None, dict[str, float]]] = {}
    for p in load():
        if p.figure == figure and p.drawn:
            assert p.value is not None, "a drawn point has a value"
            points = members.setdefault((p.kind, p.labels, p.method), {})
            points.setdefault(p.epochs, {})[p.metric] = p.value / 100
    found = []
    for (kind, labels, method), points in members.items():
        # The labels of the transfer rows are those of pre-training.
        share = {"fraction": float(labels) / 100} if figure != "transfer" else {}
        order = sorted(points, key=lambda epochs: epochs or 0)
        found.append(
            Curve(
                run=f"paper, {figure}",
                method=method,
                seed=None,
                measurement=Measurement(kind, labels_text(share)),
                points=tuple(_point(method, labels, epochs, points[epochs]) for epochs in order),
                supervised=method not in UNSUPERVISED,
                published=True,
            )
        )
    return found


def _point(method: str, labels: str, epochs: int | None, metrics: dict[str, float]) -> Point:
    """Return a point with the costs that follow from its epochs; hours and joules were not published."""
    if epochs is None:
        return Point(None, {}, metrics)
    name = CONFIGS.get((method, labels))
    if name is None:
        return Point(epochs, {"epochs": epochs}, metrics)
    config = load_config(name, [f"optimization.epochs={epochs}"])
    sizes = config.resolve(8, IMAGES)
    costs = {"epochs": epochs, "updates": sizes.steps, "petaflops": petaflops(run_macs(config, sizes))}
    return Point(sizes.steps, costs, metrics)


def sources(figure: str) -> list[str]:
    """Return where the drawn points of a figure are from, a line for each source."""
    members: dict[str, list[PublishedPoint]] = {}
    for p in sorted(load(), key=lambda p: p.source):
        if p.figure == figure and p.drawn:
            members.setdefault(p.source, []).append(p)
    lines = []
    for source, points in members.items():
        rows = ", ".join(map(str, sorted({p.row for p in points})))
        read = "; read from the picture, good to 0.1 at best" if any(p.approx for p in points) else ""
        lines.append(f"- {source}: row {rows} of paper_points.csv{read}")
    return lines
