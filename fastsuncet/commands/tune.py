"""`fastsuncet tune`: prove and time what could make a run faster on this machine; print, draw and keep the choice."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fastsuncet.checkpoint import atomic_files
from fastsuncet.commands.preview import require_picture
from fastsuncet.config import Config
from fastsuncet.console import say_line
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed import launch
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import Preempted
from fastsuncet.tuning import record
from fastsuncet.tuning.chooser import BASE, CONTENDER, PLAIN, Verdict
from fastsuncet.tuning.rungs import candidates
from fastsuncet.tuning.settle import device_type, tune
from fastsuncet.versions import drawing_problem


def run(config: Config, arguments: list[str], minutes: float, output: Path, *, everything: bool) -> int:
    """Tune the run of `config` and return the exit code; `arguments` start the same command on further ranks.

    Writes `output`, a picture, and the same numbers as JSON beside it. Raises ConfigError for a name that is not a
    picture's.
    """
    if not drawing_problem():
        require_picture(output)
    if launch.should_start_ranks(config.meta.device):
        return launch.start_ranks(arguments, output.with_suffix(".status.json"))
    device = device_type(config)
    with launch.join("cpu") as place, SignalFlag() as signals:
        images = open_images(config, place, validation=False)
        arithmetic = config.resolve(place.world_size, *images.counts())
        rungs = candidates(config, device, everything=everything)
        # What a run looks for, whichever rungs were tried for the table.
        key = record.key(config, arithmetic, device, candidates(config, device))

        def say(verdict: Verdict) -> None:
            if place.first:
                say_line(text_of(verdict))

        if place.first:
            say_line(f"contenders: {len(rungs)}, on {key['hardware']}, at most {minutes:g} minutes")
        found = tune(config, place, rungs, key, 60 * minutes, signals, say)
        if any_rank(signals.requested is not None):
            raise Preempted(f"{signals.requested or 'another rank'}: stopped; nothing was kept")
    if place.first:
        output.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.replace(output.with_suffix(".json"), atomic_files.as_json(found))
        if problem := drawing_problem():
            say_line(problem)
        else:
            draw(found, output)
        lines = ["", *table(found["rungs"]), "", f"speed: {found['line']}"]
        if words := " ".join(record.overrides(found)):
            lines.append(f"A new run of this config uses it with meta.speed=fixed, or with: {words}")
        for line in (*lines, f"wrote {output}"):
            say_line(line)
    return 0


def text_of(verdict: Verdict) -> str:
    """Return the line that is printed when a rung has been tried."""
    word = "chosen" if verdict.won else "not usable" if verdict.problem else "not chosen"
    what = verdict.problem or f"{verdict.gain(BASE):.2f}x the best so far"
    return f"{verdict.rung.name:<34} {word:<11} {what}"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table as lines of Markdown. Speeds are ratios, taken turn by turn."""
    lines = [
        "| contender | timed | ms a step | plain, ms | speed, x plain | x the best before | |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        if row["problem"] is not None:
            lines.append(f"| {row['name']} | {row['clock']} | | | | | {row['problem']} |")
            continue
        seconds = row["seconds"]
        times = [record.milliseconds(seconds[side]) for side in (CONTENDER, PLAIN)]
        figures = [*times, *(_spread(seconds[over], seconds[CONTENDER]) for over in (PLAIN, BASE))]
        lines.append(f"| {row['name']} | {row['clock']} | {' | '.join(figures)} | {'chosen' * row['won']} |")
    return lines


def _spread(above: Sequence[float], below: Sequence[float]) -> str:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def draw(found: record.Record, path: Path) -> None:
    """Draw the views a second of each rung beside plain's of the same turns, and name what is wrong with the others."""
    from matplotlib.figure import Figure

    rows = found["rungs"]
    figure = Figure(figsize=(9, 1.5 + 0.5 * len(rows)), layout="constrained")
    axis = figure.subplots()
    for place, row in enumerate(rows):
        if row["problem"] is not None:
            axis.text(0, place, f"  {row['problem'][:90]}", va="center", fontsize=8, color="#b00020")
            continue
        ours = "#0072b2" if row["won"] else "#56b4e9"
        thin = {"ecolor": "#333333", "lw": 0.8}
        for side, shift, color in ((PLAIN, 0.18, "#bbbbbb"), (CONTENDER, -0.18, ours)):
            speeds = [row["views"] / seconds for seconds in row["seconds"][side]]
            middle = median(speeds)
            error = [[middle - min(speeds)], [max(speeds) - middle]]
            axis.barh(place + shift, middle, 0.34, color=color, xerr=error, error_kw=thin)
        label = f"{row['gain']:.2f}x plain{', chosen' * row['won']}"
        paper = {"facecolor": "white", "alpha": 0.8, "lw": 0, "pad": 1}
        axis.annotate(
            label, (0, place - 0.18), (6, 0), textcoords="offset points", va="center", fontsize=8, bbox=paper
        )
    axis.set_yticks(range(len(rows)), [f"{row['name']}\n({row['clock']})" for row in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("views a second, median and range of the turns; gray: plain in the same turns")
    axis.set_title(found["line"], fontsize=9, loc="left")
    figure.savefig(path, dpi=110)
