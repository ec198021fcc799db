"""What the cases share: timing in turns, ratios, tables, the command line and the report.

Machines are shared, so no figure stands alone. Contenders take turns, and a ratio is taken within each round, where
both sides met the same load. A figure is the median over the rounds, with the lowest and the highest in brackets.

On a GPU a time is the one between two CUDA events. On a CPU it is the CPU time of this process, all threads together.
"""

import argparse
import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
from torch.profiler import ProfilerActivity, profile

from fastsuncet.commands.report.tables import markdown
from fastsuncet.errors import FastSuncetError
from fastsuncet.training.cuda_graph import capture_on_device, first_message
from fastsuncet.versions import installed, versions
from pipelines import atomic_files
from pipelines.data_errors import DataError
from tools.bench.dispatch_counter import counts

CLOCK = {"cpu": "CPU time of this process", "cuda": "CUDA events"}
Call = Callable[[], Any]
Column = tuple[str, str, Callable[[Any], str]]  # head, key of a point, formatter
COUNTS: list[Column] = [
    ("launches", "launches", "{:,}".format),
    ("operators", "operators", "{:,}".format),
    ("host waits", "host_waits", "{:,}".format),
]


class Case(NamedTuple):
    """How run.py measures a case: `measure` gets the options and the report, and returns what the report ends with."""

    measure: Callable[[argparse.Namespace, "Report"], dict[str, Any]]
    rounds: int  # by default
    quick: str  # what --quick leaves
    device: str = ""  # by default; "" for a case without --device
    config: bool = False  # whether it takes CONFIG section.key=value ...
    add_arguments: Callable[[Callable], Any] = lambda add: None  # gets the parser's add_argument


def processor() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return platform.machine()


# Timing


def seconds_of(call: Call, device: str, repeats: int = 1) -> float:
    """Return the mean seconds of `repeats` calls on the clock of `device`, "cpu" or "cuda"."""
    if device != "cuda":
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def seconds_until_launched(call: Call, device: str, repeats: int) -> float:
    """Return the mean seconds until a call returns. On a GPU the calls before it have ended: its queue is empty.

    With calls queued, the driver holds the host up once about a thousand launches wait, and the time is the GPU's.
    """
    seconds = 0.0
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        seconds += time.perf_counter() - start
    return seconds / repeats


def rotated(names: Sequence[Any], turn: int) -> list[Any]:
    """Return `names` starting with another one each turn, so that none always runs behind the same neighbor."""
    start = turn % max(1, len(names))
    return [*names[start:], *names[:start]]


def time_in_turns(
    calls: Mapping[str, Call],
    device: str,
    rounds: int,
    repeats: int = 1,
    warmup: int = 2,
    discarded: Mapping[str, int] | None = None,
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, after `warmup` calls that choose kernels and create state.

    `discarded`: calls before each turn of a contender that works ahead while others have their turns.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in rotated(list(calls), turn):
            for _ in range((discarded or {}).get(name, 0)):
                calls[name]()
            seconds[name].append(seconds_of(calls[name], device, repeats))
    return seconds


def copy_of(moved: int, device: str) -> Call:
    """Return a copy that reads half of `moved` bytes and writes the other half: the limit for such traffic."""
    # Not empty: unwritten memory is a single page, read from the cache.
    source = torch.ones(moved // 2, dtype=torch.uint8, device=device)
    destination = torch.ones_like(source)
    return lambda: destination.copy_(source)


def count_launches(call: Call) -> int | None:
    """Return how many kernels, copies and fills a call starts on the GPU; None where CUDA records none."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    return sum(each.count for each in recorded.key_averages() if each.device_type.name == "CUDA") or None


def capture_graph(call: Call) -> tuple[Call, str]:
    """Return `call` as a CUDA graph and ""; or `call` itself and the reason why it cannot be captured."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries choose their kernels and allocate outside of a capture.
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph, _ = capture_on_device(call, torch.device("cuda"))
    # torch raises nothing narrower for what a graph cannot hold.
    except (RuntimeError, AssertionError) as error:
        return call, first_message(error)
    return graph.replay, ""


# Figures and tables


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return above / below, round by round."""
    return [a / b for a, b in zip(above, below)]


def spread(values: Sequence[float], factor: float = 1) -> str:
    """Format values times `factor` as `median (lowest-highest)`, with three significant digits."""

    def short(value: float) -> str:
        text = f"{factor * value:.3g}"
        return f"{factor * value:.0f}" if "e" in text else text

    return f"{short(median(values))} ({short(min(values))}-{short(max(values))})"


def add_counts(points: Sequence[dict[str, Any]], calls: Mapping[str, Call], device: str) -> None:
    """Add to the points of `calls` the operators, host waits and moved bytes of a call; on a GPU its launches."""
    for point in points:
        if call := calls.get(point["name"]):
            point |= counts(call)
            if device == "cuda":
                point["launches"] = count_launches(call)


def points_of(seconds: Mapping[str, Sequence[float]], ours: str, limit: str = "") -> list[dict[str, Any]]:
    """Return a point per contender: name, seconds by round, and their ratios to those of `ours` and of `limit`."""
    points = []
    for name, times in seconds.items():
        point = {"name": name, "seconds": times, "time_to_ours": ratios(times, seconds[ours])}
        if limit in seconds:
            point["time_to_limit"] = ratios(times, seconds[limit])
        points.append(point)
    return points


def time_columns(device: str) -> list[Column]:
    """Return the columns of such points, seconds in the unit that fits the device."""
    unit, factor = ("us", 1e6) if device == "cuda" else ("CPU ms", 1e3)
    return [
        ("", "name", str),
        (unit, "seconds", partial(spread, factor=factor)),
        ("time, x ours", "time_to_ours", spread),
        ("time, x limit", "time_to_limit", spread),
    ]


def spread_columns(heads: Mapping[str, str]) -> list[Column]:
    """Return the column of the names, and a column of spreads for each key of a point and its head."""
    return [("", "name", str), *((head, key, spread) for key, head in heads.items())]


def table(title: str, points: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> dict[str, Any]:
    """Return {"title", "head", "rows"} of text.

    A cell whose point has no such key is empty. A column of empty cells is left out, unless it is the first.
    """
    first, *others = columns
    columns = [first, *(c for c in others if any(p.get(c[1]) is not None for p in points))]
    rows = [["" if p.get(key) is None else form(p[key]) for _, key, form in columns] for p in points]
    return {"title": title, "head": [head for head, _, _ in columns], "rows": rows}


def target(what: str, measured: Sequence[float], limit: float, *, at_least: bool) -> str:
    """Return the line on a figure and the limit that was asked for; its median decides whether it is met.

    A missed target is a finding, not a failure.
    """
    met = median(measured) >= limit if at_least else median(measured) <= limit
    bound = "at least" if at_least else "at most"
    return f"{'met' if met else 'MISSED'}: {what}: {spread(measured)}, target {bound} {limit:g}"


# The report and the command line


def environment() -> dict[str, Any]:
    """Return where and with what a measurement is taken, and how busy the machine is before it."""
    peers = {name: installed(name) for name in ("lightly", "pillow")}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "versions": {name: found for name, found in (versions() | peers).items() if found},
        "command": " ".join(["python", *sys.argv]),
    }


def commit() -> str | None:
    """Return the checkout's commit, with a plus where files differ from it; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Report:
    """What a tool found. Create it before the first measurement: it notes how busy the machine is."""

    def __init__(self, tool: str, path: Path | None, **facts: Any):
        self.path = path
        self.content: dict[str, Any] = {"tool": tool, "environment": environment(), **facts}

    def save(self, **found: Any) -> None:
        """Add `found` and write everything as JSON, where a path was given. A reader never sees half a file."""
        self.content |= found
        if self.path is not None:
            atomic_files.replace(self.path, atomic_files.as_json(self.content))

    def finish(
        self,
        tables: Sequence[Mapping[str, Any]],
        *,
        notes: Sequence[str] = (),
        wrong: Sequence[str] = (),
        **found: Any,
    ) -> int:
        """Save and print everything, as Markdown; return 1 if something computes wrong results, else 0."""
        self.save(tables=list(tables), notes=list(notes), wrong=list(wrong), **found)
        for each in tables:
            print(each["title"], "", *markdown(each["head"], each["rows"]), "", sep="\n")
        for text in (*notes, *(f"WRONG: {each}" for each in wrong)):
            print(text, "", sep="\n", flush=True)
        return 1 if wrong else 0


def parser(
    description: str | None,
    *,
    rounds: int | None = None,
    quick: str = "",
    device: str = "",
    config: bool = False,
) -> argparse.ArgumentParser:
    """Return a parser with --json and, where asked for, CONFIG, --rounds and --device by their defaults, --quick."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    add = made.add_argument
    add("--json", type=Path, help="also write everything to this file")
    if config:
        add("config", help="a YAML file, or the name of a shipped one")
        add("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    if rounds is not None:
        add("--rounds", type=int, default=rounds, help="turns of each contender (default: %(default)s)")
    if device:
        add("--device", choices=("auto", "cpu", "cuda"), default=device)
    if quick:
        add("--quick", action="store_true", help=f"{quick}: for a look and for the tests")
    return made


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of `main`; print a wrong folder, key or device as one line."""
    try:
        code = main()
    except (FastSuncetError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
