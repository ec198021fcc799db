"""`fastsuncet report`: runs side by side, accuracy against every cost, and what a method saved of the baseline's.

report.md   all of it, for a person          saved.csv    compute to match the baseline, both rules
table.csv   every method's last checkpoint   points.csv   every evaluated checkpoint of every run
*.png *.svg pictures: one an evaluation and metric, and saved
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastsuncet.checkpoint import atomic_files
from fastsuncet.commands.report import claims, paper
from fastsuncet.commands.report.comparability import differences
from fastsuncet.commands.report.compute_saved import RULE, Saving, savings
from fastsuncet.commands.report.compute_saved_figure import draw_saved
from fastsuncet.commands.report.curves import KNN, Curve
from fastsuncet.commands.report.figure import draw_panel
from fastsuncet.commands.report.groups import Panel, arrange, choose_metrics
from fastsuncet.commands.report.join_lengths import join_lengths
from fastsuncet.commands.report.reading import read_runs
from fastsuncet.commands.report.tables import (
    SAVED_CSV,
    SAVED_HEAD,
    as_csv,
    markdown,
    methods_table,
    points_plain,
    saved_plain,
    saved_rows,
)
from fastsuncet.console import Say, say_line
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics.results import read_results
from pipelines.data_errors import DataError

FLOPS = (
    "A petaFLOP is 1e15 floating-point operations. A training sample costs 6 x MAC of encoder and head: 2 FLOP a "
    "multiply-add, 1 forward and 2 backward passes."
)


def report(
    runs: Sequence[Path],
    output: Path,
    *,
    baseline: Path | None = None,
    metrics: Sequence[str] = (),
    figures: Sequence[str] = (),
    lengths: bool = False,
    say: Say = say_line,
) -> Path:
    """Writes everything into `output` and returns its report.md; the same inputs give the same bytes.

    `baseline` is a run to compare with, `metrics` what to draw (top1, else KNN), `figures` of the paper to draw beside;
    with `lengths`, runs that only their length sets apart are one curve of their last checkpoints.
    Raises DataError where there is nothing to report, ConfigError for a metric or figure that there is not.
    """
    runs = list(dict.fromkeys([*runs, *([baseline] if baseline else [])]))
    curves = read_runs(runs)
    heard = {Path(curve.run).resolve() for curve in curves}
    silent = [run for run in runs if run.resolve() not in heard]
    notes = [f"{run}: nothing was evaluated yet" for run in silent]
    if runs and not curves:
        raise DataError(
            f"{', '.join(map(str, runs))}: nothing was evaluated yet. `fastsuncet evaluate`, `finetune` and `transfer` "
            "do that, or evaluation.knn_every_epochs while a run trains"
        )
    if lengths:
        curves = join_lengths(curves)
    published = [curve for name in figures for curve in paper.curves(name)]
    notes += differences(record for run in runs for record in read_results(run))
    panels = arrange([*curves, *beside(curves, published, notes)], str(baseline) if baseline else None)
    default = ("top1", KNN) if runs else ("top1",)
    chosen = choose_metrics(panels, list(metrics), default)
    notes += [
        f"{group.name}, {panel.evaluation}: {uneven}"
        for panel in panels
        for group in panel.groups
        if (uneven := group.uneven(chosen[0]))
    ]
    if not runs and not metrics:
        chosen += [m for m in ("top5",) if m not in chosen]
    try:
        atomic_files.make_folder(output)
        path = _write(
            panels, chosen, [*curves, *published], list(figures), notes, output, say, baseline is not None
        )
    except OSError as error:
        raise CheckpointError(
            f"the report cannot be written to {output}: {error}. {atomic_files.advice(error)}"
        ) from error
    return path


def beside(curves: list[Curve], published: list[Curve], notes: list[str]) -> list[Curve]:
    """The paper's curves laid into the runs' evaluations of the same kind and labels, else by themselves."""
    laid = []
    for curve in published:
        wanted = curve.evaluation[:2]
        alike = list(dict.fromkeys(c.evaluation for c in curves if c.evaluation[:2] == wanted))
        laid += [replace(curve, evaluation=evaluation) for evaluation in alike] or [curve]
        if curves and not alike:
            note = f"{curve.run}: these runs have no results of {curve.evaluation}, so it is drawn by itself"
            notes += [] if note in notes else [note]
    return laid


def _write(
    panels: list[Panel],
    metrics: list[str],
    curves: list[Curve],
    figures: list[str],
    notes: list[str],
    output: Path,
    say: Say,
    named: bool,
) -> Path:
    pictures = [path for metric in metrics for panel in panels for path in draw_panel(panel, metric, output)]
    by_metric = {metric: [s for panel in panels for s in savings(panel, metric)] for metric in metrics}
    every = [s for found in by_metric.values() for s in found]
    claimed = any(name in (paper.TEN, paper.ONE) for name in figures)
    pictures += draw_saved(every, claims.printed() if claimed else [], output)
    lines = ["# Report", ""]
    for metric in metrics:
        head, rows, plain = methods_table(panels, metric, by_metric[metric])
        lines += [*markdown(head, rows), ""] if metric == metrics[0] or metric not in ("top1", "top5") else []
        if metric == metrics[0]:
            atomic_files.replace(output / "table.csv", as_csv(head, plain))
    lines += [f"{note}." for note in notes] + ([""] if notes else [])
    lines += [
        FLOPS,
        "Costs are those of pre-training up to the evaluated checkpoint, over all processes.",
        "",
    ]
    lines += _saved_section(panels, every, named)
    if claimed:
        lines += ["## The paper's percentages", "", *claims.compare()[0], ""]
    for name in figures:
        lines += [f"## Sources of the paper's points: {name}", "", *paper.sources(name), ""]
    lines += ["## Pictures", ""]
    lines += [f"![{path.stem}]({path.name})\n" for path in pictures if path.suffix == ".png"]
    atomic_files.replace(output / "saved.csv", as_csv(SAVED_CSV, saved_plain(every)))
    atomic_files.replace(output / "points.csv", as_csv(*points_plain(curves)))
    path = output / "report.md"
    text = "\n".join(lines).rstrip() + "\n"
    atomic_files.replace(path, text.encode())
    say(text.split("## Pictures")[0].rstrip())
    say(
        f"\nwrote {path}, {', '.join(p.name for p in pictures)}, table.csv, saved.csv and points.csv beside it"
    )
    return path


def _saved_section(panels: list[Panel], found: list[Saving], named: bool) -> list[str]:
    """The Markdown of compute saved, or why there is none."""
    lines = ["## Compute to match the baseline's best", ""]
    if found:
        lines += [*markdown(SAVED_HEAD, saved_rows(found)), ""]
        lines += [
            "Shares are of all that the baseline was given, up to its last evaluated checkpoint. Epochs of the "
            "baseline: the linear crossing at the baseline's FLOPs an epoch. The last column is where the baseline "
            "itself was first that good. Methods of several seeds: their mean curve, then each seed against the "
            "baseline's of that seed; saved.csv has all of it. "
            f"{RULE} What came before a first checkpoint is not known: one that was good enough already is an upper "
            "bound.",
            "",
        ]
    for panel in panels:
        if panel.baseline is None and len(panel.groups) > 1:
            why = (
                "the baseline has no such results"
                if named
                else "no one baseline. Name it with --baseline RUN"
            )
            lines += [f"{panel.evaluation}: {why}.", ""]
    if len(lines) == 2:
        lines += ["Nothing to compare: a baseline and a method, evaluated alike, are needed.", ""]
    return lines
