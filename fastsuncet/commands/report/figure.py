"""The pictures: accuracy against every cost, and what each method needed to match the baseline. PNG and SVG.

Told apart three ways, so that print, grey and colour-blind eyes can: Okabe and Ito's colours, markers, dashes. The same
numbers give the same bytes: no dates, no random names inside.
"""

import io
import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from fastsuncet.checkpoint import atomic_files
from fastsuncet.commands.report.compute_saved import crossing
from fastsuncet.commands.report.curves import COSTS, KNN
from fastsuncet.commands.report.groups import Group, Panel

# Okabe and Ito (2008) without yellow, which paper swallows. The first two are as far apart in grey as the set allows.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX*"
DASHES: tuple = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
METRICS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", KNN: "accuracy"}
DPI = 200
CROSSING = "first as good, interpolated"
CROSSED = {"marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": "none"}
# Cost -> (what it is, [(from this largest value on, divided by, unit)]), from large to small.
AXES = {
    "epochs": ("epochs of pre-training", [(0, 1, "")]),
    "updates": ("model updates", [(2e5, 1e3, "thousands"), (0, 1, "")]),
    "petaflops": (
        "compute",
        [(2e4, 1e3, "exaFLOPs"), (1, 1, "petaFLOPs"), (1e-3, 1e-3, "teraFLOPs"), (0, 1e-6, "gigaFLOPs")],
    ),
    "hours": ("time", [(0.5, 1, "hours"), (1 / 60, 1 / 60, "minutes"), (0, 1 / 3600, "seconds")]),
    "joules": ("energy of the GPUs", [(3.6e6, 3.6e6, "kWh"), (1e3, 1e3, "kilojoules"), (0, 1, "joules")]),
}
STYLE = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib's own: the same letters on every machine
    "font.size": 9,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters: to search, to select, to read aloud
    "svg.hashsalt": "fastsuncet",
}


def unit(cost: str, largest: float) -> tuple[float, str]:
    """(divisor, label with unit) that suit a `cost` axis that ends at `largest`."""
    what, units = AXES[cost]
    _, divisor, name = next(entry for entry in units if largest >= entry[0])
    return divisor, f"{what}, {name}" if name else what


def draw_panel(panel: Panel, metric: str, folder: Path) -> list[Path]:
    """Accuracy of all groups against every cost there is: one picture, its files returned."""
    groups = [group for group in panel.groups if group.with_metric(metric)]
    costs = [cost for cost in COSTS if any(cost in p.costs for g in groups for p in g.with_metric(metric))]
    if not costs:
        return []
    columns = len(costs) if len(costs) <= 3 else 2 if len(costs) == 4 else 3
    rows = -(-len(costs) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.5 * columns + 0.4, 2.75 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axes, cost in zip(grid, costs):
            _draw(axes, panel, groups, metric, cost)
        for axes in grid[: len(costs) : columns]:
            axes.set_ylabel(f"{METRICS.get(metric, metric)}, %")
        for axes in grid[len(costs) :]:
            axes.remove()
        handles = {
            label: h for axes in grid[: len(costs)] for h, label in zip(*axes.get_legend_handles_labels())
        }
        if any(len(group.curves) > 1 for group in groups):
            handles["lowest to highest of the seeds"] = Patch(color="0.5", alpha=0.25, linewidth=0)
        legend(figure, handles)
        name = METRICS.get(metric, metric)
        figure.suptitle(f"{name[:1].upper()}{name[1:]} by {panel.evaluation}", fontsize=11)
        return write(figure, folder, "-".join([*panel.evaluation, metric]))


def _draw(axes: Axes, panel: Panel, groups: list[Group], metric: str, cost: str) -> None:
    """All groups against one cost; the baseline's best as a line, and where each group first crosses it."""
    everything = [p.costs[cost] for g in groups for p in g.with_metric(metric) if cost in p.costs]
    divisor, label = unit(cost, max(everything))
    target = None
    if panel.baseline in groups:
        target = max(p.metrics[metric] for p in panel.baseline.with_metric(metric))
        axes.axhline(
            100 * target, color="0.45", linewidth=0.9, zorder=1, label=f"best of {panel.baseline.name}"
        )
    for i, group in enumerate(groups):
        kept = [
            (p.costs[cost] / divisor, *(100 * v for v in spread))
            for p, spread in zip(group.with_metric(metric), group.spread(metric))
            if cost in p.costs
        ]
        if not kept:
            continue
        x, mean, low, high = zip(*kept)
        color, seeds = COLORS[i % len(COLORS)], len(group.curves)
        name = f"{group.name}, mean of {seeds} seeds" if seeds > 1 else group.name
        axes.plot(
            x,
            mean,
            color=color,
            marker=MARKERS[i % len(MARKERS)],
            linestyle=DASHES[i % len(DASHES)],
            markerfacecolor="white" if group.published else color,
            zorder=3,
            label=name,
        )
        if seeds > 1:
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)
        # The paper's runs and the reader's are not each other's baseline; a first checkpoint is no crossing.
        if target is None or group.published != panel.baseline.published or mean[0] >= 100 * target:
            continue
        at = crossing(x, mean, 100 * target, linear=True)
        if at is not None and group is not panel.baseline:
            axes.plot([at], [100 * target], color="black", zorder=4, label=CROSSING, **CROSSED)
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.04 * max(everything) / divisor)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.margins(y=0.08)


def legend(figure: Figure, handles: dict[str, Artist]) -> None:
    """Below everything, in as many columns as the picture is wide enough for."""
    if not handles:  # nothing was ever reached: words in the picture say so
        return
    wide = figure.get_figwidth() * 13 / (max(map(len, handles)) + 7)  # 13 of its letters to an inch
    columns = max(1, min(len(handles), int(wide)))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def write(figure: Figure, folder: Path, name: str) -> list[Path]:
    """`figure` as <name>.png and <name>.svg in `folder`, each whole or not there."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    paths = []
    # matplotlib writes its version into a PNG and the date into an SVG: a picture should change with its numbers only.
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=DPI, metadata=metadata)
        figure.set_layout_engine("none")  # where everything is does not change from one format to the next
        path = folder / f"{stem}.{suffix}"
        atomic_files.replace(path, buffer.getvalue())
        paths.append(path)
    return paths
