"""The report's tables, as Markdown for a person and CSV for a spreadsheet."""

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from fastsuncet.commands.report.compute_saved import MEAN_CURVE, MEAN_OF_SEEDS, Saving
from fastsuncet.commands.report.curves import COSTS, Curve
from fastsuncet.commands.report.groups import Group, Panel

HEADS = {
    "epochs": "epochs",
    "updates": "updates",
    "petaflops": "petaFLOPs",
    "hours": "hours",
    "joules": "joules",
    "top1": "top-1, %",
    "top5": "top-5, %",
    "knn": "KNN, %",
}
NUMBER = re.compile(r"-|[-+]?[\d,.e+]+( %)?( \(.*\))?")
SAVED_HEAD = ["method", "evaluation", "metric", "to reach, %", "cost", "linear", "first checkpoint"]
SAVED_HEAD += ["each seed, linear", "epochs of the baseline", "the baseline itself"]
SAVED_CSV = ["method", "baseline", "evaluation", "labels", "variant", "metric", "seed", "cost", "target"]
SAVED_CSV += ["baseline_total", "linear", "first_checkpoint", "baseline_own", "linear_percent"]
SAVED_CSV += [
    "first_checkpoint_percent",
    "at_first_checkpoint",
    "seeds_reached",
    "seeds",
    "equivalent_epochs",
]
Rows = list[list[str]]


def markdown(head: Sequence[str], rows: Rows) -> list[str]:
    """Return a Markdown table; columns after the first that hold only numbers are aligned to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    right = [i > 0 and all(NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(head))]
    rule = ["---:" if side else "---" for side in right]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *cells)]


def as_csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    """Return a CSV table; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue().encode()


def _number(cost: str, value: float | None) -> str:
    """Return whole updates, four digits of any other cost, "-" for an unknown one."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if cost == "updates" or value >= 1e4 else f"{value:.4g}"


def _percent(spread: Sequence[float]) -> str:
    """Return mean (lowest to highest) of shares, in %: "66.7" for one seed."""
    mean, low, high = (100 * value for value in spread)
    return f"{mean:.1f}" if low == high else f"{mean:.1f} ({low:.1f} to {high:.1f})"


def methods_table(
    panels: list[Panel], metric: str, savings: list[Saving]
) -> tuple[list[str], Rows, list[list]]:
    """Return (head, rows for Markdown, rows for CSV): every method's last checkpoint, averaged over its seeds."""
    shown = ["top1", "top5"] if metric in ("top1", "top5") else [metric]
    head = ["method", "labels", "evaluation", "seeds", *(HEADS[c] for c in COSTS)]
    head += [*(HEADS.get(m, f"{m}, %") for m in shown), "saved"]
    rows, plain = [], []
    for panel in panels:
        for group in panel.groups:
            if (last := _last(group, metric)) is None:
                continue
            costs, spreads = last
            start = [group.name, panel.measurement.labels or "-", str(panel.measurement._replace(labels=""))]
            seeds, text = len(group.curves), _saved_text(panel, group, savings)
            cells = [_percent(spreads[m]) if m in spreads else "-" for m in shown]
            rows.append([*start, str(seeds), *(_number(c, costs.get(c)) for c in COSTS), *cells, text])
            means = [spreads[m][0] if m in spreads else None for m in shown]
            plain.append([*start, seeds, *(costs.get(c) for c in COSTS), *means, text])
    return head, rows, plain


def _last(group: Group, metric: str) -> tuple[dict[str, float], dict[str, Sequence[float]]] | None:
    """Return costs and spreads of the metrics at the last common checkpoint, or those of an encoder from a file."""
    points = group.mean_curve(metric)
    if points:
        return points[-1].costs, {name: group.spread(name)[-1] for name in points[-1].metrics}
    loose = [point for curve in group.curves for point in curve.points if metric in point.metrics]
    if not loose:
        return None
    return loose[-1].costs, {name: (value, value, value) for name, value in loose[-1].metrics.items()}


def _saved_text(panel: Panel, group: Group, savings: list[Saving]) -> str:
    """Return "50 % of FLOPs, 43 % of updates" of the mean curve."""
    if group is panel.baseline:
        return "(baseline)"
    mine = [s for s in savings if (s.measurement, s.method) == (panel.measurement, group.name)]
    mine = [s for s in mine if s.seed == MEAN_CURVE or (len(group.curves) == 1 and s.seed != MEAN_OF_SEEDS)]
    parts = []
    for cost, name in (("petaflops", "FLOPs"), ("updates", "updates")):
        parts += [_part(s, name) for s in mine if s.cost == cost]
    if parts and all(part.startswith("never") for part in parts):
        return "never reached"
    return ", ".join(parts) or "-"


def _part(s: Saving, name: str) -> str:
    """Return "50 % of FLOPs", or how many more it took than the whole baseline."""
    if s.shares is None:
        return f"never reached ({name})"
    percent = round(100 * (1 - s.shares[0]))
    if percent < 0:
        return f"{'at most ' if s.at_first else ''}{-percent} % more {name}"
    return f"{'at least ' if s.at_first else ''}{percent} % of {name}"


def saved_rows(savings: list[Saving]) -> Rows:
    """Return what was needed to reach the baseline's best, in % of the whole baseline, by both rules and by each seed.

    A row for each method, measurement, metric and cost.
    """
    alike: dict[tuple, list[Saving]] = {}
    for s in savings:
        if s.seed != MEAN_OF_SEEDS:
            alike.setdefault((s.method, s.measurement, s.metric, s.cost), []).append(s)
    rows = []
    for s, *rest in alike.values():  # the mean curve comes first, where there is one
        start = [s.method, str(s.measurement), s.metric]
        if rest and s.seed != MEAN_CURVE:
            each = ", ".join(_share_texts(one)[0] for one in (s, *rest))
            rows.append([*start, "-", HEADS[s.cost], "-", "-", each, "-", "-"])
            continue
        epochs = "-" if s.cost != "petaflops" or s.equivalent_epochs is None else f"{s.equivalent_epochs:.1f}"
        each = ", ".join(_share_texts(one)[0] for one in rest) or "-"
        shares = [*_share_texts(s), each, epochs, f"{100 * s.own / s.total:.1f} %"]
        rows.append([*start, f"{100 * s.target:.1f}", HEADS[s.cost], *shares])
    return rows


def _share_texts(s: Saving) -> list[str]:
    """Return the shares by both rules, linear first."""
    bound = "at most " if s.at_first else ""
    return (
        ["never reached"] * 2 if s.shares is None else [f"{bound}{100 * share:.1f} %" for share in s.shares]
    )


def saved_plain(savings: list[Saving]) -> list[list[Any]]:
    """Return the rows of SAVED_CSV: costs in their own units, shares in %, accuracies from 0 to 1."""
    rows = []
    for s in savings:
        shares = [100 * share for share in s.shares] if s.shares else [None, None]
        costs = [s.cost, s.target, s.total, s.linear, s.checkpoint, s.own]
        epochs = s.equivalent_epochs if s.cost == "petaflops" else None
        start = [s.method, s.baseline, *s.measurement, s.metric, s.seed]
        rows.append([*start, *costs, *shares, int(s.at_first), *s.reached, epochs])
    return rows


def points_plain(curves: list[Curve]) -> tuple[list[str], list[list[Any]]]:
    """Return (head, rows): every evaluated point of every run, to draw them in other ways."""
    names = sorted({name for curve in curves for point in curve.points for name in point.metrics})
    head = ["run", "method", "seed", "evaluation", "labels", "variant", "step", *COSTS, *names]
    rows = [
        [curve.run, curve.method, curve.seed, *curve.measurement, point.step]
        + [point.costs.get(c) for c in COSTS]
        + [point.metrics.get(name) for name in names]
        for curve in curves
        for point in curve.points
    ]
    return head, rows
