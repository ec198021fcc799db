"""`fastsuncet report`: runs side by side, accuracy against every cost, and what a method saved of the baseline's.

report.md   all of it, for a person          saved.csv    compute saved: every seed, cost and rule
table.csv   every method's last checkpoint   points.csv   every evaluated checkpoint of every run
*.png *.svg a picture for each measurement and metric, and saved
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.commands.report import paper, tables
from fastsuncet.commands.report.compute_saved import Saving, savings
from fastsuncet.commands.report.curves import KNN, Curve, Panel, arrange, choose_metrics, join_lengths
from fastsuncet.commands.report.reading import read_config, read_runs
from fastsuncet.metrics.rankme import RANKS
from fastsuncet.versions import drawing_problem
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.output import csv_table, say_line

COSTS_NOTE = (
    "A petaFLOP is 1e15 floating-point operations. A view costs 6 x MAC of encoder and head: 2 FLOP a "
    "multiply-add, 1 forward and 2 backward passes.",
    "Costs are those of pre-training up to the evaluated checkpoint, over all processes.",
)
SAVED_NOTE = (
    "Each cell is the mean (lowest to highest) of the seeds that reached it, each against the baseline's run of that "
    "seed; without a percentage unless most seeds did. Accuracy is taken to be linear in the cost between two "
    "checkpoints; a first checkpoint counts without that. What came before a run's first checkpoint is not known: one "
    "that was good enough already is an upper bound. saved.csv has every seed."
)


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
    too; `lengths` merges runs that differ only in length into one curve of their final checkpoints. Raises DataError
    where there is nothing to report, ConfigError for a metric or figure that does not exist, CheckpointError if the
    disk refuses.
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
    panels = arrange([*curves, *_next_to_runs(curves, published, notes)], str(baseline) if baseline else None)
    chosen = choose_metrics(panels, metrics, ("top1", KNN) if runs else ("top1",))
    measured: dict[str, set[str]] = {}
    for curve in curves:
        measured.setdefault(curve.run, set()).update(*(point.metrics for point in curve.points))
    notes += [
        f"{run}: not shown, it was not measured by {', '.join(chosen)}; --metric takes its {', '.join(sorted(names))}"
        for run, names in measured.items()
        if names.isdisjoint(chosen)
    ]
    groups = [(panel, group) for panel in panels for group in panel.groups]
    notes += [f"{g.name}, {p.measurement}: {note}" for p, g in groups if (note := g.uneven(chosen[0]))]
    if not runs and not metrics and "top5" not in chosen:
        chosen.append("top5")
    saved = [s for m in chosen if m not in RANKS for panel in panels for s in savings(panel, m)]
    claimed = any(name in (paper.TEN, paper.ONE) for name in figures)

    lines, found = ["# Report", ""], [tables.methods_tables(panels, metric) for metric in chosen]
    tops = [metric for metric in chosen if metric in ("top1", "top5")]
    for metric, (words, _) in zip(chosen, found):
        if metric not in tops[1:]:  # the table of the first has both
            lines += [*tables.markdown(*words), ""]
    lines += [f"{note}." for note in dict.fromkeys(notes)] + ([""] if notes else [])
    lines += [*COSTS_NOTE, "", *_saved_section(panels, saved, baseline is not None)]
    if claimed:
        lines += ["## The paper's percentages", "", *paper.claims(), ""]
    for name in figures:
        lines += [f"## Sources of the paper's points: {name}", "", *paper.sources(name), ""]
    files = {"table.csv": found[0][1], "saved.csv": tables.saved_plain(saved)}
    files["points.csv"] = tables.points_plain([*curves, *published])
    with disk_errors(output, "--output"):
        atomic_files.make_folder(output)
        pictures = [] if (problem := drawing_problem()) else _draw(panels, chosen, saved, claimed, output)
        for name, (head, rows) in files.items():
            atomic_files.replace(output / name, csv_table([head, *rows]))
        path = output / "report.md"
        shown = [f"![{picture.stem}]({picture.name})\n" for picture in pictures if picture.suffix == ".png"]
        text = "\n".join([*lines, "## Pictures", "", *shown, problem]).rstrip() + "\n"
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
            note = f"{curve.run}: these runs have no results of {curve.measurement}, so it is drawn alone"
            notes += [] if note in notes else [note]
    return placed


def _saved_section(panels: list[Panel], found: list[Saving], named_baseline: bool) -> list[str]:
    """Return the Markdown of compute saved, or the reason why there is none."""
    lines = ["## Compute to match the baseline", ""]
    if found:
        lines += [*tables.markdown(*tables.saved_table(found)), "", SAVED_NOTE, ""]
    unnamed = "no one baseline. Name it with --baseline RUN"
    why = "the baseline has no such results" if named_baseline else unnamed
    for panel in panels:
        if panel.baseline is None and len(panel.groups) > 1:
            lines += [f"{panel.measurement}: {why}.", ""]
    if len(lines) == 2:
        lines += [
            "Nothing to compare: this takes a baseline and a method of the same images, evaluated alike.",
            "",
        ]
    return lines
