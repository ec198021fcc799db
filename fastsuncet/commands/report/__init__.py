"""`fastsuncet report`: runs side by side, accuracy against every cost, and what a method saved of the baseline's.

report.md   all of it, for a person          saved.csv    compute saved: every seed, cost and rule
table.csv   every method's last checkpoint   points.csv   every evaluated checkpoint of every run
*.png *.svg a picture for each measurement and metric, and saved
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.commands.report import paper
from fastsuncet.commands.report.compute_saved import RULES, Saving, cell, percent, savings
from fastsuncet.commands.report.curves import (
    COSTS,
    KNN,
    NAMES,
    Curve,
    Panel,
    Seeds,
    arrange,
    join_lengths,
    scale,
)
from fastsuncet.commands.report.reading import read_config, read_runs
from fastsuncet.errors import ConfigError
from fastsuncet.metrics.rankme import RANKS
from fastsuncet.versions import drawing_problem
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.output import csv_table, say_line

COSTS_NOTE = (
    "A petaFLOP is 1e15 floating-point operations. A view costs 6 x MAC of encoder and head: 2 FLOP a "
    "multiply-add, 1 forward and 2 backward passes; 8 x MAC with `criterion.micro_batch`, for a second "
    "forward pass.",
    "Costs are those of pre-training up to the evaluated checkpoint, without work that a kill undid. petaFLOPs and "
    "joules are summed over all processes; hours are wall-clock time.",
)
SAVED_NOTE = (
    "Each cell is the mean (lowest to highest) of the seeds that reached it, each against the baseline's run of that "
    "seed; without a percentage unless most seeds did. Accuracy is taken to be linear in the cost between two "
    "checkpoints; a first checkpoint counts without that. What came before a run's first checkpoint is not known: one "
    "that was good enough already is an upper bound, and a lower one where the baseline was at its best there. "
    "saved.csv has every seed."
)
HEADS = {"petaflops": "petaFLOPs", "top1": "top-1, %", "top5": "top-5, %", "knn": "KNN, %"}
NUMBER = re.compile(r"-|[-+]?[\d,.e+-]+( %)?( \(.*\))?")
Table = tuple[Sequence[str], list[list[Any]]]


def report(
    runs: Sequence[Path],
    output: Path,
    *,
    baseline: Path | None = None,
    metrics: Sequence[str] = (),
    figures: Sequence[str] = (),
    lengths: bool = False,
) -> Path:
    """Write everything into `output` and return its report.md; the same inputs give the same bytes.

    `baseline` is a run to compare with, `metrics` what to draw (top1, else KNN), `figures` those of the paper to draw
    too; `lengths` merges runs that differ only in length into one curve of their final checkpoints.
    """
    if baseline:
        read_config(baseline)
    named: dict[Path, Path] = {}
    for run in [*runs, *([baseline] if baseline else [])]:
        named.setdefault(run.resolve(), run)
    runs = list(named.values())
    curves, notes = read_runs(runs)
    if runs and not curves:
        raise DataError(
            f"{', '.join(map(str, runs))}: nothing was evaluated yet. `fastsuncet evaluate`, `finetune` and `transfer` "
            "do that, or evaluation.knn_every_epochs while a run trains"
        )
    if lengths:
        curves = join_lengths(curves)
    published = [curve for name in figures for curve in paper.curves(name)]
    shown = [*curves, *_next_to_runs(curves, published, notes)]
    panels = arrange(shown, str(baseline) if baseline else None)
    there = dict.fromkeys(name for curve in shown for point in curve.points for name in point.metrics)
    if unknown := [metric for metric in metrics if metric not in there]:
        known = ", ".join(sorted(there))
        raise ConfigError(f"nothing here was measured by --metric {unknown[0]}; there is {known}")
    first = next(metric for metric in ("top1", KNN, *there) if metric in there)
    chosen = list(dict.fromkeys(metrics)) or [first]
    measured: dict[str, set[str]] = {}
    for curve in curves:
        measured.setdefault(curve.run, set()).update(*(point.metrics for point in curve.points))
    notes += [
        f"{run}: not shown, it was not measured by {', '.join(chosen)}; --metric takes its {', '.join(sorted(names))}"
        for run, names in measured.items()
        if names.isdisjoint(chosen)
    ]
    notes += [
        f"{group.name}, {panel.measurement}: {note}"
        for panel in panels
        for group in panel.groups
        if (note := group.uneven(chosen[0]))
    ]
    if not runs and not metrics and "top5" in there:
        chosen.append("top5")
    saved = [s for m in chosen if m not in RANKS for panel in panels for s in savings(panel, m)]
    claimed = any(name in (paper.TEN, paper.ONE) for name in figures)

    lines, found = ["# Report", ""], {metric: methods_tables(panels, metric) for metric in chosen}
    second_top = [metric for metric in chosen if metric in ("top1", "top5")][1:]
    for metric in chosen:
        if metric not in second_top:  # the table of the first has both
            lines += [*markdown(*found[metric][0]), ""]
    lines += [f"{note}." for note in dict.fromkeys(notes)] + ([""] if notes else [])
    lines += [*COSTS_NOTE, "", *_saved_section(panels, chosen, saved, baseline is not None)]
    if claimed:
        lines += ["## The paper's percentages", "", *paper.claims(), ""]
    for name in figures:
        lines += [f"## Sources of the paper's points: {name}", "", *paper.sources(name), ""]
    files = {"table.csv": found[chosen[0]][1], "saved.csv": saved_plain(saved)}
    files["points.csv"] = points_plain([*curves, *published])
    with disk_errors(output, "--output"):
        atomic_files.make_folder(output)
        pictures = [] if (problem := drawing_problem()) else _draw(panels, chosen, saved, claimed, output)
        for name, (head, rows) in files.items():
            atomic_files.replace(output / name, csv_table([head, *rows]))
        path = output / "report.md"
        images = [f"![{picture.stem}]({picture.name})\n" for picture in pictures if picture.suffix == ".png"]
        text = "\n".join([*lines, "## Pictures", "", *images, problem]).rstrip() + "\n"
        # Names of folders are bytes, and can be HTML.
        atomic_files.replace(path, text.replace("<", "\\<").encode(errors="replace"))
    say_line("\n".join(lines).rstrip())
    if problem:
        say_line(f"\n{problem}")
    say_line(f"\nwrote {path}; in the same folder {', '.join([*(p.name for p in pictures), *files])}")
    return path


def _draw(
    panels: list[Panel], metrics: Sequence[str], saved: list[Saving], claimed: bool, output: Path
) -> list[Path]:
    from fastsuncet.commands.report.figures import draw_panel, draw_saved

    drawn = [path for metric in metrics for panel in panels for path in draw_panel(panel, metric, output)]
    return drawn + draw_saved(saved, paper.printed_savings() if claimed else {}, output)


def _next_to_runs(curves: list[Curve], published: list[Curve], notes: list[str]) -> list[Curve]:
    """Return the paper's curves, in the runs' measurements of the same kind and labels if there are any."""
    placed = []
    for curve in published:
        wanted = curve.measurement[:2]
        alike = list(dict.fromkeys(c.measurement for c in curves if c.measurement[:2] == wanted))
        placed += [replace(curve, measurement=measurement) for measurement in alike] or [curve]
        if curves and not alike:
            notes.append(
                f"{curve.run}: these runs have no results of {curve.measurement}, so it is drawn alone"
            )
    return placed


# ----------------------------------------------------------------------------------------------------- tables
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
            means = (scale(m) * last.mean(m) if m in last.metrics else None for m in shown)
            numbers.append([*start, *costs, *means])
    return (head, words), (head, numbers)


def _saved_section(
    panels: list[Panel], metrics: Sequence[str], savings: list[Saving], named_baseline: bool
) -> list[str]:
    """Return the Markdown of compute saved by both rules, or the reason why there is none."""
    alike: dict[tuple, dict[str, list[Saving]]] = {}
    for s in savings:
        key = (s.method, s.baseline, str(s.measurement), s.metric, HEADS.get(s.cost, s.cost))
        alike.setdefault(key, {}).setdefault(s.rule, []).append(s)
    head = ["method", "baseline", "evaluation", "metric", "cost"]
    head += [f"to the baseline's {rule}" for rule in RULES.values()]
    rows = [[*key, *(cell(found[rule]) for rule in RULES)] for key, found in alike.items()]
    parts = [*markdown(head, rows), "", SAVED_NOTE, ""] if rows else []
    unnamed = "no one baseline. Name it with --baseline RUN"
    why = "the baseline has no such results" if named_baseline else unnamed
    for panel in panels:
        base = panel.baseline
        if base is None:
            parts += [f"{panel.measurement}: {why}.", ""] if len(panel.groups) > 1 else []
            continue
        own = {curve.seed for curve in base.curves}
        here = [s for s in savings if s.measurement == panel.measurement]
        if lacking := sorted({str(s.seed) for s in here if s.seed not in own}):
            lacks = f"the baseline has no run of seed {', '.join(lacking)}"
            parts += [f"{panel.measurement}: {lacks}: compared with the mean of its seeds.", ""]
        uneven = [m for m in metrics if m not in RANKS and base.uneven(m)]
        others = ((g.name, c) for g in panel.groups if base.rivals(g) for c in g.curves if c.seed not in own)
        if out := [f"{name}, seed {c.seed}" for name, c in others if any(map(c.at_steps, uneven))]:
            lacks = "no run of that seed, and its seeds were not evaluated at the same checkpoints"
            parts += [f"{panel.measurement}: left out: {'; '.join(out)}: the baseline has {lacks}.", ""]
    nothing = "Nothing to compare: this takes a baseline and a method of the same images, evaluated alike."
    return ["## Compute to match the baseline", "", *(parts or [nothing, ""])]


def saved_plain(savings: list[Saving]) -> Table:
    """Return every saving: costs in their own units, shares in %, accuracies from 0 to 1."""
    head = "method baseline evaluation labels variant metric seed cost rule target baseline_cost linear"
    head += " first_checkpoint linear_percent first_checkpoint_percent at_first_checkpoint"
    head += " baseline_at_first_checkpoint equivalent_epochs"
    rows = []
    for s in savings:
        shares = [100 * share for share in s.shares] if s.shares else [None, None]
        epochs = None
        if s.shares and s.baseline_epochs and s.cost == "petaflops":
            epochs = s.shares[0] * s.baseline_epochs
        compared = [s.method, s.baseline, *s.measurement, s.metric, s.seed, s.cost, s.rule]
        costs = [s.target, s.reference, *(s.needed or (None, None)), *shares]
        rows.append([*compared, *costs, int(s.at_first), int(s.reference_at_first), epochs])
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
