"""The pictures: accuracy against every cost, and what each method needed to match the baseline. PNG and SVG.

Lines differ in three ways, for print, gray and color-blind readers: Okabe and Ito's colors, markers, dashes. The same
numbers give the same bytes: the files hold no dates and no random names.
"""

import hashlib
import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter, StrMethodFormatter

from fastsuncet.commands.report.compute_saved import Saving, bound, crossing, reached
from fastsuncet.commands.report.curves import COSTS, KNN, NAMES, Group, Panel, scale
from fastsuncet.metrics.rankme import RANKS
from pipelines import atomic_files

# Okabe and Ito (2008) without yellow, which is too pale on paper. The first two differ most in gray.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = "osD^vPX*"
DASHES: tuple = ("-", (0, (5, 1.5)), (0, (1.5, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
DPI = 200
CROSSED: dict[str, Any] = {"color": "black", "marker": "|", "ms": 11, "mew": 1.6, "ls": "none", "zorder": 4}
PREFIXES = ("", "kilo", "mega", "giga", "tera", "peta", "exa", "zetta")  # of SI
# Cost -> (label of the axis, with a place for a prefix, and what the cost is multiplied by).
AXES = {
    "epochs": ("epochs of pre-training", 1),
    "updates": ("model updates", 1),
    "petaflops": ("compute, {}FLOPs", 1e15),
    "hours": ("time, hours", 1),
    "joules": ("energy of the GPUs, {}joules", 1),
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
    "text.parse_math": False,  # the name of a run can have a $
    "svg.fonttype": "none",  # text stays text: it can be searched, selected and read aloud
    "svg.hashsalt": "fastsuncet",
}
# (cost, rule) in the picture of compute saved -> (place in its row, color, marker, label).
SAVED = {
    ("petaflops", "final"): (-0.2, COLORS[0], "o", "FLOPs to its final accuracy"),
    ("petaflops", "best"): (-0.08, COLORS[0], "D", "FLOPs to its best"),
    ("updates", "final"): (0.08, COLORS[1], "o", "updates to its final accuracy"),
    ("updates", "best"): (0.2, COLORS[1], "D", "updates to its best"),
}


# ------------------------------------------------------------------------------------------- accuracy against costs
def draw_panel(panel: Panel, metric: str, folder: Path, name: str = "") -> list[Path]:
    """Draw the accuracy of all groups against every cost there is, as one picture; return its files, PNG and SVG.

    `name` of the files: by default that of measurement and metric.
    """
    groups = [group for group in panel.groups if group.common(metric)]
    known = {cost for group in groups for point in group.common(metric) for cost in point.costs}
    costs = [cost for cost in COSTS if cost in known]
    if not costs:
        return []
    columns = len(costs) if len(costs) <= 3 else 2 if len(costs) == 4 else 3
    rows = -(-len(costs) // columns)
    with rc_context(STYLE):
        size = (3.5 * columns + 0.4, 2.75 * rows + 0.9) if len(costs) > 1 else (6, 4.65)
        figure = Figure(figsize=size, dpi=DPI)
        grid = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
        for axes, cost in zip(grid, costs):
            draw_groups(axes, panel.baseline, groups, metric, cost)
        title = NAMES.get(metric, metric)
        for axes in grid[: len(costs) : columns]:
            axes.set_ylabel(title if metric in RANKS else f"{title}, %")
        for axes in grid[len(costs) :]:
            axes.remove()
        words = f"{title[:1].upper()}{title[1:]} by {panel.measurement}"
        figure.suptitle(fill(words, int(10 * size[0])), fontsize=11)
        slug = re.sub(r"[^\w.]+", "-", "-".join([*panel.measurement, metric]).lower()).strip("-")
        if len(slug) > 80:  # of many settings: longer than a file's name can be
            slug = f"{slug[:60]}-{hashlib.sha256(slug.encode()).hexdigest()[:8]}"
        return write(figure, folder / (name or slug))


def draw_groups(axes: Axes, base: Group | None, groups: list[Group], metric: str, cost: str) -> None:
    """Draw all groups against one cost, the best of `base` as a line, and where each group first crosses it."""
    points = {g.name: [p for p in g.common(metric) if cost in p.costs] for g in groups}
    label, factor = AXES[cost]
    largest = factor * max(p.costs[cost] for found in points.values() for p in found)
    # In the label, because "20E" at a tick reads like a power of ten.
    power = int(np.log10(max(largest, 1)) // 3) if "{}" in label else 0
    factor, largest = factor / 1000**power, largest / 1000**power
    best = None
    if base in groups and metric not in RANKS:
        best = 100 * max(p.mean(metric) for p in base.common(metric))
        axes.axhline(best, color="0.45", linewidth=0.9, zorder=1, label=f"best of {base.name}")
    for i, group in enumerate(groups):
        if not points[group.name]:
            continue
        x = [factor * p.costs[cost] for p in points[group.name]]
        values = scale(metric) * np.array([p.metrics[metric] for p in points[group.name]])  # (points, seeds)
        mean, (color, seeds) = values.mean(1), (COLORS[i % len(COLORS)], values.shape[1])
        axes.plot(
            x,
            mean,
            color=color,
            marker=MARKERS[i % len(MARKERS)],
            linestyle=DASHES[i % len(DASHES)],
            markerfacecolor="white" if group.curves[0].published else color,
            zorder=3,
            label=f"{group.name}, mean of {seeds} seeds" if seeds > 1 else group.name,
        )
        if seeds > 1:
            thick = 0 if len(x) > 1 else 4  # the band of a single checkpoint is a line
            axes.fill_between(x, values.min(1), values.max(1), color=color, alpha=0.18, lw=thick, zorder=2)
        # A first checkpoint that is good enough is no crossing.
        if base is None or best is None or not base.rivals(group):
            continue
        if mean[0] < best and (at := crossing(x, mean.tolist(), best)):
            axes.plot([at[0]], [best], label="first as good, interpolated", **CROSSED)
    if any(len(group.curves) > 1 for group in groups):
        axes.fill_between([], [], color="0.5", alpha=0.25, lw=0, label="lowest to highest of the seeds")
    axes.set_xlabel(label.format(PREFIXES[power]))
    axes.set_xlim(0, 1.04 * largest)
    thousands = EngFormatter(sep="") if cost == "updates" else StrMethodFormatter("{x:,g}")
    axes.xaxis.set_major_formatter(thousands)
    axes.margins(y=0.08)


# --------------------------------------------------------------------------------------------- the curves of one run
def draw_lines(title: str, curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG of label -> points by update, to stand in an HTML page as wide as a phone or wider.

    A screen reader reads its title and where the curves end.
    Nothing but the curves has a color, so that a page can invert it.
    """
    # Pictures of one page share its names: without a salt of its own, one's clip path would cut another.
    style: dict[Any, Any] = {**STYLE, "grid.color": "black", "grid.alpha": 0.1, "svg.hashsalt": title}
    with rc_context(style):
        figure = Figure(figsize=(4.2, 2.3), dpi=DPI)
        axes = figure.subplots()
        for i, (label, points) in enumerate(curves.items()):
            few = {"marker": MARKERS[i], "markersize": 4} if len(points) <= 30 else {}
            axes.plot(*zip(*points), color=COLORS[i], linestyle=DASHES[i], label=label, **few)
        axes.set_title(title, loc="left", fontsize=10, pad=18 if len(curves) > 1 else None)
        # Only at whole updates: the ticks of a single point would all have its number.
        axes.locator_params(axis="x", integer=True, min_n_ticks=1)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        if len(curves) > 1:  # above the panel, where no curve is
            above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 0.98), "borderaxespad": 0}
            axes.legend(ncols=len(curves), columnspacing=1, handlelength=1.8, fontsize=8, **above)
        ConstrainedLayoutEngine().execute(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    ends = ", ".join(f"{label} {points[-1][1]:.4g}" for label, points in curves.items())
    image = f'<svg role="img" aria-label="{html.escape(f"{title}; at the end: {ends}")}"'
    # Without the XML declaration, and the names of groups, which are the same in all pictures.
    _, _, text = re.sub('<g id="[^"]*"', "<g", buffer.getvalue()).partition("<svg")
    return image + text


# --------------------------------------------------------------------------------------------------- compute saved
def draw_saved(savings: list[Saving], printed: dict[tuple, float], folder: Path) -> list[Path]:
    """Draw what each method needed to match the baseline by both rules, in % of the baseline; return the files.

    A row for each method, measurement and metric: the mean over the seeds by linear interpolation, each seed as a small
    point, and the percentages that the paper prints.
    """
    rows: dict[tuple[str, str, str], list[Saving]] = {}
    for s in savings:
        if (s.cost, s.rule) in SAVED:
            rows.setdefault((s.method, str(s.measurement), s.metric), []).append(s)
    if not rows:
        return []
    names = []
    for method, measurement, metric in rows:
        by = "" if metric == KNN else f"{NAMES.get(metric, metric).removesuffix(' accuracy')} by "
        names.append("\n".join(fill(line, 50) for line in (method, f"{by}{measurement}")))
    with rc_context(STYLE):
        height = 0.275 * sum(name.count("\n") + 1 for name in names) + 1.6
        figure = Figure(figsize=(7, height), dpi=DPI)
        axes = figure.subplots()
        for y, (row, found) in enumerate(rows.items()):
            for of in SAVED:
                if seeds := [s for s in found if (s.cost, s.rule) == of]:
                    _draw_seeds(axes, seeds, y)
            if row in printed:
                axes.plot(printed[row], y, "X", color="black", markersize=7, label="printed in the paper")
        axes.axvline(100, color="0.45", linewidth=0.9, zorder=1, label="as much as the baseline")
        axes.set_yticks(range(len(rows)), names)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
        axes.grid(axis="y", visible=False)
        rivals = {s.baseline for s in savings}
        rival = rivals.pop() if len(rivals) == 1 else "the baseline"
        axes.set_xlabel(fill(f"to match {rival}, % of its cost", 50))
        return write(figure, folder / "saved")


def _draw_seeds(axes: Axes, seeds: list[Saving], row: int) -> None:
    """Draw one rule and cost: the mean if most seeds got there, each seed that did, and how many did not."""
    place, color, marker, label = SAVED[seeds[0].cost, seeds[0].rule]
    y, (there, _) = row + place, reached(seeds)
    each = [100 * s.shares[0] for s in seeds if s.shares]
    style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "none"}
    note: dict[str, Any] = {"color": color, "fontsize": 6, "va": "center"}
    if there:
        mean, face = 100 * fmean(there), color if marker == "o" else "white"
        axes.plot(mean, y, label=label, markerfacecolor=face, zorder=4, **style)
        if word := bound(seeds).strip():
            axes.annotate(word, (mean, y), (-6, 0), ha="right", textcoords="offset points", **note)
    if len(seeds) > 1:
        axes.plot(each, [y] * len(each), label="a seed alone", markersize=3, alpha=0.45, **style)
    if len(each) < len(seeds):
        missing = f"{len(seeds) - len(each)} of {len(seeds)} seeds never"
        axes.annotate(missing, (1.01, y), xycoords=("axes fraction", "data"), annotation_clip=False, **note)


# ----------------------------------------------------------------------------------------------------------- files
def write(figure: Figure, stem: Path, formats: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Put the legend of all plots below `figure` and write it as <stem>.<format>, each file whole or not at all."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels())))
    letters = int(figure.get_figwidth() * 13)  # about 13 to an inch
    labels = [fill(label, letters - 7) for label in handles]
    lines = [line for label in labels for line in label.split("\n")]
    columns = max(1, min(len(handles), letters // (max(map(len, lines)) + 7)))
    rows = -(-len(lines) // columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * max(0, rows - 6))  # of a long legend
    figure.legend(handles.values(), labels, loc="outside lower center", ncols=columns)
    # With an engine of its own, the figure would be drawn twice for each file.
    ConstrainedLayoutEngine().execute(figure)
    paths = [stem.with_name(f"{stem.name}.{each}") for each in formats]
    for path, each in zip(paths, formats):
        # matplotlib writes its version into a PNG and the date into an SVG: a picture changes with its numbers only.
        metadata = {"Software": None} if each == "png" else {"Date": None, "Creator": None}
        buffer = io.BytesIO()
        figure.savefig(buffer, format=each, metadata=metadata)
        atomic_files.replace(path, buffer.getvalue())
    return paths
