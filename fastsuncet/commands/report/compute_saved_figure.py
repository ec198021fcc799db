"""The picture of compute saved: what each method needed to match the baseline's best, in % of the baseline."""

from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fastsuncet.commands.report.compute_saved import MEAN_CURVE, MEAN_OF_SEEDS, Saving
from fastsuncet.commands.report.curves import KNN
from fastsuncet.commands.report.figure import COLORS, METRICS, STYLE, legend, write

SEED = {"markersize": 3, "alpha": 0.45}
# cost -> (colour, marker, name): the two versions that the report always gives
VERSIONS = {"petaflops": (COLORS[0], "o", "FLOPs"), "updates": (COLORS[1], "s", "updates")}


@dataclass(frozen=True)
class Printed:
    """A percentage as the paper prints it, to stand beside ours."""

    method: str
    evaluation: str
    metric: str
    percent: float


def draw_saved(savings: list[Saving], printed: list[Printed], folder: Path) -> list[Path]:
    """A row for each method in each evaluation: filled by linear interpolation, hollow at the first checkpoint."""
    shown = [s for s in savings if s.cost in VERSIONS and s.seed != MEAN_OF_SEEDS]
    rows = list(dict.fromkeys((s.method, str(s.evaluation), s.metric) for s in shown))
    if not rows:
        return []
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 0.55 * len(rows) + 1.6), layout="constrained")
        axes = figure.subplots()
        for y, row in enumerate(rows):
            mine = [s for s in shown if (s.method, str(s.evaluation), s.metric) == row]
            alone = len({s.seed for s in mine}) == 1
            whole = [s for s in mine if alone or s.seed == MEAN_CURVE]
            for s in mine if len(mine) > len(whole) else []:
                if s.seed != MEAN_CURVE and s.share() is not None:
                    color, marker, _ = VERSIONS[s.cost]
                    axes.plot(100 * s.share(), y + _offset(s), marker, color=color, **SEED)
            _tell_never(axes, [s for s in mine if s not in whole], y)
            for s in whole:
                _draw(axes, s, y)
            for p in printed:
                if (p.method, p.evaluation, p.metric) == row:
                    axes.plot(p.percent, y, "X", color="black", markersize=7, label="printed in the paper")
        axes.axvline(100, color="0.45", linewidth=0.9, zorder=1, label="all of the baseline")
        axes.set_yticks(range(len(rows)), [_row_name(*row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0, 1.06 * axes.get_xlim()[1])
        axes.grid(axis="y", visible=False)
        rivals = {s.baseline for s in shown}
        axes.set_xlabel(
            f"to match the best of {rivals.pop() if len(rivals) == 1 else 'the baseline'}, % of its cost"
        )
        handles = dict(zip(*reversed(axes.get_legend_handles_labels())))
        if any(s.seed == MEAN_CURVE for s in shown):
            handles["a seed alone, linear"] = Line2D(
                [], [], color="0.2", marker="o", linestyle="none", **SEED
            )
        legend(figure, handles)
        return write(figure, folder, "saved")


def _row_name(method: str, evaluation: str, metric: str) -> str:
    measured = "" if metric == KNN else f"{METRICS.get(metric, metric).removesuffix(' accuracy')} by "
    return f"{method}\n{measured}{evaluation}"


def _tell_never(axes: Axes, singles: list[Saving], y: float) -> None:
    """How many of the seeds have no point: those that are drawn would else look like all of them."""
    for cost in VERSIONS:
        seeds = [s for s in singles if s.cost == cost]
        never = [s for s in seeds if s.share() is None]
        if never:
            where = {"xycoords": ("axes fraction", "data"), "annotation_clip": False, "va": "center"}
            text = f"{len(never)} of {len(seeds)} seeds never"
            level = y + _offset(never[0])
            axes.annotate(text, (1.01, level), color=VERSIONS[cost][0], fontsize=7.5, **where)


def _offset(s: Saving) -> float:
    return 0.14 if s.cost == "updates" else -0.14


def _draw(axes, s: Saving, y: float) -> None:
    """Both rules for one cost, joined: as long as the line is, so much hangs on the rule."""
    color, marker, name = VERSIONS[s.cost]
    level = y + _offset(s)
    if s.share() is None:
        text = {"va": "center", "color": color, "fontsize": 8}
        axes.annotate(f"{name}: never reached", (0.015, level), xycoords=("axes fraction", "data"), **text)
        return
    linear, checkpoint = 100 * s.share(), 100 * s.share(linear=False)
    axes.plot([linear, checkpoint], [level, level], color=color, linewidth=1.2, zorder=2)
    hollow = {"color": color, "markerfacecolor": "white", "linestyle": "none", "zorder": 3}
    axes.plot(checkpoint, level, marker, label=f"{name}, first checkpoint", **hollow)
    axes.plot(linear, level, marker, color=color, label=f"{name}, linear", zorder=4)
    if s.at_first:
        note = {"ha": "right", "va": "center", "color": color, "fontsize": 7.5}
        axes.annotate("at most", (linear, level), (-6, 0), textcoords="offset points", **note)
