"""`fastsuncet report --page`: how a run stands, as one HTML file that any browser opens.

The file holds everything it shows: no script, no font and no picture of another file or host. It is written anew in one
step, so that a browser that refreshes never sees half of it.
"""

import base64
import html
import math
import re
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.commands import export
from fastsuncet.commands.pages import html_page
from fastsuncet.commands.report.curves import NAMES
from fastsuncet.commands.report.reading import (
    compare_settings,
    differing,
    home_of,
    measurement_of,
    numbers,
    read_config,
    setting_of,
    variant,
)
from fastsuncet.config import Config, flat
from fastsuncet.config.schema import DEFAULTS
from fastsuncet.errors import CheckpointError
from fastsuncet.metrics import writer
from fastsuncet.metrics.rankme import RANKS, collapse_warning
from fastsuncet.metrics.results import read_results, tuning_of
from fastsuncet.paths import steps_in
from fastsuncet.training import methods
from fastsuncet.versions import drawing_problem
from pipelines import atomic_files
from pipelines.output import duration, say_line

NAME, VIEWS = "page.html", "views.png"  # in the run's folder
PICTURE_BYTES = 16 << 20
POINTS = 1000  # of a curve, at most
EVERY = 10  # seconds: between two looks of `watch`, and until a browser reads the page again
Json = dict[str, Any]


def write_page(run: Path, *, refresh: bool = False) -> Path:
    """Write RUN/page.html in one step and return it; with `refresh` a browser reads it again every EVERY seconds.

    All text in it is escaped.
    """
    config, status = read_config(run), atomic_files.read_object(run / "status.json")
    lines = writer.read(run / writer.JSONL) if (run / writer.JSONL).is_file() else []
    train, knn = ([numbers(line) for line in lines if line["kind"] == kind] for kind in ("train", "knn"))
    knn = [line for line in knn if "knn_accuracy" in line]
    problem = ""
    try:
        meta = manager.newest_meta(run / manager.FOLDER) or {}
    except CheckpointError as error:
        meta, problem = {}, str(error)
    name = run.resolve().name
    again = f'<meta http-equiv="refresh" content="{EVERY}">\n' if refresh else ""
    parts = [f"<h1>{html.escape(name)}</h1>"]
    message = f": {status['message']}" if status.get("message") else ""
    stands = f"{status.get('state')}{message}" if status else "not started"
    state = f"{methods.name(config)} · {stands} · written {datetime.now():%Y-%m-%d %H:%M:%S}"
    parts.append(f'<p class="state">{html.escape(state)}</p>')
    warnings = [collapse_warning(knn[-1]) if knn else None, problem]
    parts += [f'<p class="warning">{html.escape(text)}</p>' for text in warnings if text]
    parts.append(_facts(_now(train, knn, meta)))
    parts += ["<h2>Curves by update</h2>", _curves(config, train, knn)]
    parts += ["<h2>Results</h2>", _results(run, config)]
    parts += ["<h2>Weights</h2>", *_weights(run, config)]
    parts += ["<h2>Views</h2>", _views(run)]
    values = flat(config.canonical())
    changed = [(key, value) for key, value in values.items() if value != DEFAULTS.get(key)]
    parts += ["<h2>Settings that are not the defaults</h2>", _facts(changed)]
    every = html.escape((run / "config.yaml").read_text(encoding="utf-8"))
    parts.append(f"<details><summary>All settings (config.yaml)</summary><pre>{every}</pre></details>")
    rows = [*meta.get("versions", {}).items(), ("processes", meta.get("world_size"))]
    for line in [line for line in lines if line["kind"] == "chosen"][-1:]:  # for the hardware
        rows.append(("precision", line.get("precision")))
        rows.append(("fast paths", ", ".join(line.get("paths") or []) or "none"))
    parts += ["<h2>Environment</h2>", _facts(rows)]
    with disk_errors(run / NAME):
        # The folder's name is bytes: one that is not UTF-8 is shown with question marks.
        text = html_page("run", name, "\n".join(parts), head=again)
        atomic_files.replace(run / NAME, text.encode(errors="replace"))
    return run / NAME


def watch(runs: Sequence[Path], wait: Callable[[float], None] = time.sleep) -> None:
    """Write the pages of `runs` anew whenever a run goes on, until all of them are done."""
    seen: dict[Path, int] = {}
    while True:
        going = [run for run in runs if atomic_files.read_object(run / "status.json").get("state") != "done"]
        for run in runs:
            # The metrics, the status, the folder of the results: what changes when a run goes on or is evaluated.
            newest = 0
            for path in {*run.glob("[!.]*")} - {run / NAME}:
                with suppress(FileNotFoundError):  # removed since it was listed
                    newest = max(newest, path.lstat().st_mtime_ns)
            if newest != seen.get(run):
                seen[run] = newest
                say_line(f"wrote {write_page(run, refresh=run in going)}")
        if not going:
            return
        wait(EVERY)


def _text(value: Any) -> str:
    """Return a value as people write it: 4 digits of a number below 1,000, - for None and NaN."""
    if value is None or value != value:
        return "-"
    if type(value) not in (int, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"


def _facts(rows: Iterable[tuple[str, Any]]) -> str:
    """Return names with their values, in two columns where there is room."""
    # A key can be broken behind a dot or an underscore; a number cannot.
    rows = ((re.sub(r"(?<=[a-z][._])", "<wbr>", html.escape(key)), html.escape(_text(v))) for key, v in rows)
    cells = (f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in rows)
    return f"<dl>{''.join(cells)}</dl>"


def _now(train: list[Json], knn: list[Json], meta: Json) -> list[tuple[str, Any]]:
    """Return where the run stands: its newest numbers, and its rates."""
    last = train[-1] if train else {}
    step, total = last.get("step", 0), meta.get("sizes", {}).get("steps")
    rows: list[tuple[str, Any]] = [
        ("update", f"{step:,} of {total:,}" if total else f"{step:,}"),
        ("epoch", last.get("epoch")),
        ("loss", last.get("loss")),
    ]
    if knn:
        best = max(knn, key=lambda line: line["knn_accuracy"])
        for name, line in (("k-NN accuracy", knn[-1]), ("its best", best)):
            rows.append((name, f"{line['knn_accuracy']:.2%} at update {line['step']:,}"))
        rows.append(("RankMe", knn[-1].get("rankme")))
    seconds, joules, wait = (last.get(key, math.nan) for key in ("seconds", "joules", "data_wait"))
    rows += [
        ("views a second", last.get("views_per_second")),
        ("waiting for data, % of the time", 100 * wait),
        ("peak memory, GB a process", last.get("peak_memory_gb")),
        ("time of training", _duration(seconds)),
        ("petaFLOPs", last.get("petaflops")),
        ("energy of the GPUs, kWh", joules / 3.6e6),
    ]
    if total and step and step < total:
        rows.append(("time left", _duration(seconds / step * (total - step))))
    return rows


def _duration(seconds: float) -> str | None:
    return duration(seconds) if math.isfinite(seconds) else None


def _curves(config: Config, train: list[Json], knn: list[Json]) -> str:
    """Return the curves of the metrics lines as an SVG picture each, or why there is none."""
    if not train and not knn:
        return "<p>No metrics yet.</p>"
    if problem := drawing_problem():
        return f"<p>{html.escape(problem)}</p>"
    from fastsuncet.commands.report.figures import draw_lines

    terms = [term for term in methods.terms(config) if term != "none"]
    panels = [
        ("losses", train, {"loss": "sum", **{term: term for term in terms if terms[1:]}}, 1.0),
        ("gradient norms of the losses", train, {f"{term}_gradient": term for term in terms}, 1.0),
        ("k-NN accuracy, %", knn, {"knn_accuracy": "k-NN"}, 100.0),
        ("RankMe", knn, RANKS, 1.0),
        ("views a second", train, {"views_per_second": "views"}, 1.0),
        ("waiting for data, % of the time", train, {"data_wait": "wait"}, 100.0),
        ("learning rate", train, {"lr": "lr"}, 1.0),
        ("peak memory, GB a process", train, {"peak_memory_gb": "memory"}, 1.0),
    ]
    drawn = []
    for title, lines, keys, factor in panels:
        every = -(-len(lines) // POINTS) or 1
        lines = lines[(len(lines) - 1) % every :: every]  # to the last one
        curves = {
            label: [(line["step"], factor * line[key]) for line in lines if key in line]
            for key, label in keys.items()
        }
        if curves := {label: points for label, points in curves.items() if points}:
            drawn.append(draw_lines(title, curves))
    return f'<div class="curves">{"".join(drawn)}</div>' if drawn else "<p>No metrics yet.</p>"


def _results(run: Path, config: Config) -> str:
    """Return the evaluations in the run's folder, each with what distinguishes it from the others."""
    records = read_results(run)
    splitting, _ = compare_settings(records)
    rows, alike = [], defaultdict(list)
    for record in records:
        kind = measurement_of(record)
        metrics = (
            f"{NAMES.get(name, name)} {100 * value:.2f}\u00a0%" for name, value in record["metrics"].items()
        )
        known = " (too high: on labels that the network has learned from)" if record.get("learned") else ""
        parts = [str(kind), tuning_of(record), variant(setting_of(record), splitting[kind])]
        home, step = home_of(record, run, config), record["encoder"].get("step")
        parts.append(f"encoder {home}" if home != str(run) else "")
        parts.append("" if step is None else f"update {_text(step)}")
        name = ", ".join(filter(None, parts))
        seeds = {"data.split.seed": record.get("asked", {}).get("data.split.seed", 0)}
        seeds |= {"labels": record["labels"].get("count"), "seed": record["setting"].get("seed")}
        alike[name].append(seeds)
        rows.append((name, seeds, ", ".join(metrics) + known))
    if not rows:
        return "<p>None yet. <code>fastsuncet evaluate</code> and <code>finetune</code> write them.</p>"
    # Seeds make no other measurement, so two of them can have one name.
    own = (variant(seeds, differing(alike[name], missing=True)) for name, seeds, _ in rows)
    return _facts((", ".join(filter(None, [name, more])), text) for (name, _, text), more in zip(rows, own))


def _weights(run: Path, config: Config) -> list[str]:
    """Return where the weights are, and the commands that use them."""
    found = [
        *steps_in(run).values(),
        *(path for name in export.FILES.values() if (path := run / export.FOLDER / name).exists()),
    ]
    if not found:
        return ["<p>No checkpoint yet.</p>"]
    rows = "".join(f"<li><code>{html.escape(str(path))}</code></li>" for path in found)
    commands = "\n".join(export.next_commands(run, config))
    return [f"<ul>{rows}</ul>", f"<pre>{html.escape(commands)}</pre>"]


def _views(run: Path) -> str:
    """Return the picture of the views, if one was saved, else the command that draws it."""
    if not (run / VIEWS).is_file():
        config, views = (shlex.quote(f"{run}/{name}") for name in ("config.yaml", VIEWS))
        command = f"fastsuncet preview {config} --output {views}"
        return f"<p>None were saved. This draws them:</p><pre>{html.escape(command)}</pre>"
    # The page goes to others: it must not hold a file of the user's that a link there names.
    try:
        content = b"" if (run / VIEWS).is_symlink() else atomic_files.read_bytes(run / VIEWS, PICTURE_BYTES)
    except OSError:
        content = b""
    if not content.startswith(b"\x89PNG\r\n\x1a\n"):
        return (
            f"<p>{VIEWS} is not shown: it is a link, or no PNG of at most {PICTURE_BYTES / 1e6:.0f} MB.</p>"
        )
    picture = base64.b64encode(content).decode()
    return f'<img alt="augmented views" src="data:image/png;base64,{picture}">'
