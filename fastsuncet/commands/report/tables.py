"""The report's tables: (head, rows) for people, and for a spreadsheet."""

import re
from collections.abc import Sequence
from typing import Any

from fastsuncet.commands.report.compute_saved import RULES, Saving, cell, percent
from fastsuncet.commands.report.curves import COSTS, NAMES, Curve, Panel, Seeds, scale
from fastsuncet.metrics.rankme import RANKS

HEADS = {"petaflops": "petaFLOPs", "top1": "top-1, %", "top5": "top-5, %", "knn": "KNN, %"}
NUMBER = re.compile(r"-|[-+]?[\d,.e+-]+( %)?( \(.*\))?")
Table = tuple[Sequence[str], list[list[Any]]]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; columns after the first that hold only numbers are aligned to the right."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    right = [i > 0 and all(NUMBER.fullmatch(row[i]) for row in rows) for i in range(len(head))]
    rule = ["---:" if side else "---" for side in right]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *cells)]


def _number(cost: str, value: float | None) -> str:
    """Return whole updates, four digits of any other cost, "-" for an unknown one."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if cost == "updates" or value >= 1e4 else f"{value:.4g}"


def methods_tables(panels: list[Panel], metric: str) -> tuple[Table, Table]:
    """Return every method's last checkpoint that all seeds have, or its encoder from a file: in words, in numbers."""
    shown = ["top1", "top5"] if metric in ("top1", "top5") else [metric]
    head = ["method", "labels", "evaluation", "seeds", *(HEADS.get(c, c) for c in COSTS)]
    head += [NAMES[m] if m in RANKS else HEADS.get(m, f"{m}, %") for m in shown]
    words, numbers = [], []
    for what, group in ((panel.measurement, group) for panel in panels for group in panel.groups):
        loose = [
            Seeds(p.step, p.costs, {m: [value] for m, value in p.metrics.items()})
            for curve in group.curves
            for p in curve.points
            if metric in p.metrics
        ]
        for last in (group.common(metric) or loose)[-1:]:
            start = [group.name, what.labels or "-", str(what._replace(labels="")), len(last.metrics[metric])]
            costs = [last.costs.get(c) for c in COSTS]
            spreads = [[scale(metric) / 100 * value for value in last.metrics.get(m, ())] for m in shown]
            accuracies = [percent(values, unit="") if values else "-" for values in spreads]
            words.append([*map(str, start), *map(_number, COSTS, costs), *accuracies])
            numbers.append([*start, *costs, *(last.mean(m) if m in last.metrics else None for m in shown)])
    return (head, words), (head, numbers)


def saved_table(savings: list[Saving]) -> Table:
    """Return both rules in words, a row for each method, measurement, metric and cost."""
    alike: dict[tuple, dict[str, list[Saving]]] = {}
    for s in savings:
        key = (s.method, s.baseline, str(s.measurement), s.metric, HEADS.get(s.cost, s.cost))
        alike.setdefault(key, {}).setdefault(s.rule, []).append(s)
    head = ["method", "baseline", "evaluation", "metric", "cost"]
    head += [f"to the baseline's {rule}" for rule in RULES.values()]
    return head, [[*key, *(cell(found[rule]) for rule in RULES)] for key, found in alike.items()]


def saved_plain(savings: list[Saving]) -> Table:
    """Return every saving: costs in their own units, shares in %, accuracies from 0 to 1."""
    head = "method baseline evaluation labels variant metric seed cost rule target baseline_cost linear"
    head += " first_checkpoint linear_percent first_checkpoint_percent at_first_checkpoint equivalent_epochs"
    rows = []
    for s in savings:
        shares = [100 * share for share in s.shares] if s.shares else [None, None]
        epochs = s.equivalent_epochs if s.cost == "petaflops" else None
        start = [s.method, s.baseline, *s.measurement, s.metric, s.seed, s.cost, s.rule]
        rows.append([*start, s.target, s.reference, s.linear, s.checkpoint, *shares, int(s.at_first), epochs])
    return head.split(), rows


def points_plain(curves: list[Curve]) -> Table:
    """Return every evaluated point of every run, to draw them in other ways."""
    names = sorted({name for curve in curves for point in curve.points for name in point.metrics})
    head = ["run", "method", "seed", "evaluation", "labels", "variant", "step", *COSTS, *names]
    rows = [
        [curve.run, curve.method, curve.seed, *curve.measurement, point.step]
        + [(point.costs | point.metrics).get(name) for name in (*COSTS, *names)]
        for curve in curves
        for point in curve.points
    ]
    return head, rows
