"""The report's tables: (head, rows) for people, and for a spreadsheet."""

import re
from collections.abc import Sequence
from typing import Any

from fastsuncet.commands.report.compute_saved import RULES, Saving, cell, percent
from fastsuncet.commands.report.curves import COSTS, NAMES, Curve, Panel, Seeds, scale
from fastsuncet.metrics.rankme import RANKS

HEADS = {"petaflops": "petaFLOPs", "top1": "top-1, %", "top5": "top-5, %", "knn": "KNN, %"}
NUMBER = re.compile(r"-|[-+]?[\d,.e+]+( %)?( \(.*\))?")
Table = tuple[list[str], list[list[Any]]]


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
    rows, plain = [], []
    for panel in panels:
        where = [panel.measurement.labels or "-", str(panel.measurement._replace(labels=""))]
        for group in panel.groups:
            loose = [
                Seeds(p.step, p.costs, {m: [value] for m, value in p.metrics.items()})
                for curve in group.curves
                for p in curve.points
                if metric in p.metrics
            ]
            for last in (group.common(metric) or loose)[-1:]:
                start, spreads = [group.name, *where], [last.metrics.get(m) for m in shown]
                costs, seeds = [last.costs.get(c) for c in COSTS], len(group.curves)
                words = [
                    percent([scale(metric) / 100 * v for v in values], unit="") if values else "-"
                    for values in spreads
                ]
                rows.append([*start, str(seeds), *map(_number, COSTS, costs), *words])
                plain.append(
                    [*start, seeds, *costs, *(last.mean(m) if m in last.metrics else None for m in shown)]
                )
    return (head, rows), (head, plain)


def saved_table(savings: list[Saving]) -> Table:
    """Return both rules in words, a row for each method, measurement, metric and cost."""
    alike: dict[tuple, dict[str, list[Saving]]] = {}
    for s in savings:
        key = (s.method, s.baseline, str(s.measurement), s.metric, HEADS.get(s.cost, s.cost))
        alike.setdefault(key, {}).setdefault(s.rule, []).append(s)
    head = [
        "method",
        "baseline",
        "evaluation",
        "metric",
        "cost",
        *(f"to the baseline's {r}" for r in RULES.values()),
    ]
    return head, [[*key, *(cell(found[rule]) for rule in RULES)] for key, found in alike.items()]


def saved_plain(savings: list[Saving]) -> Table:
    """Return every saving: costs in their own units, shares in %, accuracies from 0 to 1."""
    head = [
        "method",
        "baseline",
        "evaluation",
        "labels",
        "variant",
        "metric",
        "seed",
        "cost",
        "rule",
        "target",
    ]
    head += ["baseline_cost", "linear", "first_checkpoint", "linear_percent", "first_checkpoint_percent"]
    head += ["at_first_checkpoint", "equivalent_epochs"]
    rows = []
    for s in savings:
        shares = [100 * share for share in s.shares] if s.shares else [None, None]
        epochs = s.equivalent_epochs if s.cost == "petaflops" else None
        start = [s.method, s.baseline, *s.measurement, s.metric, s.seed, s.cost, s.rule]
        rows.append([*start, s.target, s.reference, s.linear, s.checkpoint, *shares, int(s.at_first), epochs])
    return head, rows


def points_plain(curves: list[Curve]) -> Table:
    """Return every evaluated point of every run, to draw them in other ways."""
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
