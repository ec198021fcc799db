"""The pictures: accuracy against every cost, and what each method needed to match the baseline. PNG and SVG.

Lines differ in three ways, for print, gray and color-blind readers: Okabe and Ito's colors, markers, dashes. The same
numbers give the same bytes: the files hold no dates and no random names.
"""

import io
import re
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from fastsuncet.checkpoint import atomic_files
from fastsuncet.commands.report.compute_saved import MEAN_CURVE, MEAN_OF_SEEDS, Saving, crossing
from fastsuncet.commands.report.curves import COSTS, KNN
from fastsuncet.commands.report.groups import Group, Panel
from fastsuncet.commands.report.paper import PrintedSaving

# Okabe and Ito (2008) without yellow, which is too pale on paper. The first two differ most in gray.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX*"
DASHES: tuple = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
METRICS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", KNN: "accuracy"}
DPI = 200
CROSSED: dict[str, Any] = {"marker": "|", "markersize": 11, "markeredgewidth": 1.6, "linestyle": "none"}
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
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # it comes with matplotlib: the same letters on every machine
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
    "svg.fonttype": "none",  # text stays text: it can be searched, selected and read aloud
    "svg.hashsalt": "fastsuncet",
}
# Costs of the picture of compute saved -> (color, marker, name, offset in its row).
SAVED = {"petaflops": (COLORS[0], "o", "FLOPs", -0.14), "updates": (COLORS[1], "s", "updates", 0.14)}
SEED: dict[str, Any] = {"markersize": 3, "alpha": 0.45}


def unit(cost: str, largest: float) -> tuple[float, str]:
    """Return (divisor, label with unit) for a `cost` axis that ends at `largest`."""
    what, units = AXES[cost]
    _, divisor, name = next(entry for entry in units if largest >= entry[0])
    return divisor, f"{what}, {name}" if name else what


# ------------------------------------------------------------------------------------------- accuracy against costs
def draw_panel(panel: Panel, metric: str, folder: Path) -> list[Path]:
    """Draw the accuracy of all groups against every cost there is, as one picture; return its files."""
    groups = [group for group in panel.groups if group.mean_curve(metric)]
    costs = [cost for cost in COSTS if any(cost in p.costs for g in groups for p in g.mean_curve(metric))]
    if not costs:
        return []
    columns = len(costs) if len(costs) <= 3 else 2 if len(costs) == 4 else 3
    rows = -(-len(costs) // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(3.5 * columns + 0.4, 2.75 * rows + 0.9), layout="constrained")
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axes, cost in zip(grid, costs):
            _draw_groups(axes, panel, groups, metric, cost)
        for axes in grid[: len(costs) : columns]:
            axes.set_ylabel(f"{METRICS.get(metric, metric)}, %")
        for axes in grid[len(costs) :]:
            axes.remove()
        handles = {
            label: h for axes in grid[: len(costs)] for h, label in zip(*axes.get_legend_handles_labels())
        }
        if any(len(group.curves) > 1 for group in groups):
            handles["lowest to highest of the seeds"] = Patch(color="0.5", alpha=0.25, linewidth=0)
        _legend(figure, handles)
        name = METRICS.get(metric, metric)
        figure.suptitle(f"{name[:1].upper()}{name[1:]} by {panel.measurement}", fontsize=11)
        return _write(figure, folder, "-".join([*panel.measurement, metric]))


def _draw_groups(axes: Axes, panel: Panel, groups: list[Group], metric: str, cost: str) -> None:
    """Draw all groups against one cost, the baseline's best as a line, and where each group first crosses it."""
    everything = [p.costs[cost] for g in groups for p in g.mean_curve(metric) if cost in p.costs]
    divisor, label = unit(cost, max(everything))
    base, target = panel.baseline, None
    if base in groups:
        target = 100 * max(p.metrics[metric] for p in base.mean_curve(metric))
        axes.axhline(target, color="0.45", linewidth=0.9, zorder=1, label=f"best of {base.name}")
    for i, group in enumerate(groups):
        kept = [
            (p.costs[cost] / divisor, *(100 * v for v in spread))
            for p, spread in zip(group.mean_curve(metric), group.spread(metric))
            if cost in p.costs
        ]
        if not kept:
            continue
        x, mean, low, high = zip(*kept)
        color, seeds = COLORS[i % len(COLORS)], len(group.curves)
        axes.plot(
            x,
            mean,
            color=color,
            marker=MARKERS[i % len(MARKERS)],
            linestyle=DASHES[i % len(DASHES)],
            markerfacecolor="white" if group.published else color,
            zorder=3,
            label=f"{group.name}, mean of {seeds} seeds" if seeds > 1 else group.name,
        )
        if seeds > 1:
            axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)
        # The paper's runs and the user's are not compared; a first checkpoint that is good enough is no crossing.
        if (
            base is None
            or target is None
            or group is base
            or group.published != base.published
            or mean[0] >= target
        ):
            continue
        at = crossing(x, mean, target, linear=True)
        if at is not None:
            axes.plot([at], [target], color="black", zorder=4, label="first as good, interpolated", **CROSSED)
    axes.set_xlabel(label)
    axes.set_xlim(0, 1.04 * max(everything) / divisor)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.margins(y=0.08)


# --------------------------------------------------------------------------------------------------- compute saved
def draw_saved(savings: list[Saving], printed: list[PrintedSaving], folder: Path) -> list[Path]:
    """Draw what each method needed to match the baseline's best, in % of the baseline; return the files.

    A row for each method in each measurement: filled by linear interpolation, hollow at the first checkpoint.
    """
    shown = [s for s in savings if s.cost in SAVED and s.seed != MEAN_OF_SEEDS]
    rows = list(dict.fromkeys((s.method, str(s.measurement), s.metric) for s in shown))
    if not rows:
        return []
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 0.55 * len(rows) + 1.6), layout="constrained")
        axes = figure.subplots()
        for y, row in enumerate(rows):
            mine = [s for s in shown if (s.method, str(s.measurement), s.metric) == row]
            alone = len({s.seed for s in mine}) == 1
            singles = [s for s in mine if not alone and s.seed != MEAN_CURVE]
            _draw_seeds(axes, singles, y)
            for s in mine:
                if s not in singles:
                    _draw_rules(axes, s, y)
            for p in printed:
                if (p.method, p.measurement, p.metric) == row:
                    axes.plot(p.percent, y, "X", color="black", markersize=7, label="printed in the paper")
        axes.axvline(100, color="0.45", linewidth=0.9, zorder=1, label="all of the baseline")
        axes.set_yticks(range(len(rows)), [_row_name(*row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
        axes.grid(axis="y", visible=False)
        rivals = {s.baseline for s in shown}
        rival = rivals.pop() if len(rivals) == 1 else "the baseline"
        axes.set_xlabel(f"to match the best of {rival}, % of its cost")
        handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
        if any(s.seed == MEAN_CURVE for s in shown):
            handles["a seed alone, linear"] = Line2D(
                [], [], color="0.2", marker="o", linestyle="none", **SEED
            )
        _legend(figure, handles)
        return _write(figure, folder, "saved")


def _row_name(method: str, measurement: str, metric: str) -> str:
    measured = "" if metric == KNN else f"{METRICS.get(metric, metric).removesuffix(' accuracy')} by "
    return f"{method}\n{measured}{measurement}"


def _draw_seeds(axes: Axes, singles: list[Saving], y: float) -> None:
    """Draw each seed alone, and how many have no point because they never got there."""
    for s in singles:
        if s.shares is not None:
            color, marker, _, offset = SAVED[s.cost]
            axes.plot(100 * s.shares[0], y + offset, marker, color=color, **SEED)
    for cost, (color, _, _, offset) in SAVED.items():
        seeds = [s for s in singles if s.cost == cost]
        never = sum(s.shares is None for s in seeds)
        if never:
            where: dict[str, Any] = {
                "xycoords": ("axes fraction", "data"),
                "annotation_clip": False,
                "va": "center",
            }
            text = f"{never} of {len(seeds)} seeds never"
            axes.annotate(text, (1.01, y + offset), color=color, fontsize=7.5, **where)


def _draw_rules(axes: Axes, s: Saving, y: float) -> None:
    """Draw both rules for one cost, joined by a line that shows how much depends on the rule."""
    color, marker, name, offset = SAVED[s.cost]
    level = y + offset
    if s.shares is None:
        text: dict[str, Any] = {"va": "center", "color": color, "fontsize": 8}
        axes.annotate(f"{name}: never reached", (0.015, level), xycoords=("axes fraction", "data"), **text)
        return
    linear, checkpoint = (100 * share for share in s.shares)
    axes.plot([linear, checkpoint], [level, level], color=color, linewidth=1.2, zorder=2)
    hollow: dict[str, Any] = {"color": color, "markerfacecolor": "white", "linestyle": "none", "zorder": 3}
    axes.plot(checkpoint, level, marker, label=f"{name}, first checkpoint", **hollow)
    axes.plot(linear, level, marker, color=color, label=f"{name}, linear", zorder=4)
    if s.at_first:
        note: dict[str, Any] = {"ha": "right", "va": "center", "color": color, "fontsize": 7.5}
        axes.annotate("at most", (linear, level), (-6, 0), textcoords="offset points", **note)


# ----------------------------------------------------------------------------------------------------------- files
def _legend(figure: Figure, handles: dict[str, Artist]) -> None:
    """Put the legend below everything, in as many columns as fit."""
    if handles:
        wide = figure.get_figwidth() * 13 / (max(map(len, handles)) + 7)  # about 13 letters to an inch
        columns = max(1, min(len(handles), int(wide)))
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _write(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `figure` as <name>.png and <name>.svg into `folder`, each whole or not at all."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    paths = []
    # matplotlib writes its version into a PNG and the date into an SVG: a picture must change with its numbers only.
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=DPI, metadata=metadata)
        figure.set_layout_engine("none")  # the layout is the same in both formats
        path = folder / f"{stem}.{suffix}"
        atomic_files.replace(path, buffer.getvalue())
        paths.append(path)
    return paths
