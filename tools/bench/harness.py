"""What the bench tools share: timing in turns, ratios, tables, the command line and the report.

Machines are shared, so no figure stands alone. Contenders take turns, and a ratio is taken within each round, where
both sides met the same load. A figure is the median over the rounds, with the lowest and the highest in brackets.

On a GPU a time is the one between two CUDA events. On a CPU it is the CPU time of this process, all threads together.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.profiler import ProfilerActivity, profile

from fastsuncet.errors import FastSuncetError
from fastsuncet.tuning.record import processor
from fastsuncet.versions import installed
from pipelines.data_errors import DataError

CLOCK = {"cpu": "CPU time of this process", "cuda": "CUDA events"}
Call = Callable[[], Any]


# Timing


def wall_clock(device: str) -> float:
    """Return seconds on the wall clock, after a GPU has finished its work."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(call: Call, device: str, repeats: int = 1) -> float:
    """Return the mean seconds of `repeats` calls on the clock of `device` ("cpu" or "cuda")."""
    if device == "cpu":
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


def rotated(names: Sequence[Any], turn: int) -> list[Any]:
    """Return `names` starting with another one each turn, so that none always runs behind the same neighbor."""
    start = turn % max(1, len(names))
    return [*names[start:], *names[:start]]


def time_in_turns(
    calls: Mapping[str, Call], device: str, rounds: int, repeats: int = 1, warmup: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each call in each round, after `warmup` calls that choose kernels and create state."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in rotated(list(calls), turn):
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
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in recorded.key_averages() if event.device_type == cuda) or None


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
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    # torch raises nothing narrower for what a graph cannot hold.
    except (RuntimeError, AssertionError) as error:
        return call, first_line(error)
    return graph.replay, ""


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU operators on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Figures and tables


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the lowest and the highest value."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Return the spread of above / below, taken round by round."""
    return spread([a / b for a, b in zip(above, below)])


def format_spread(figure: Mapping[str, float], digits: int = 3) -> str:
    """Format as `median (min-max)` with that many significant digits."""

    def short(value: float) -> str:
        text = f"{value:.{digits}g}"
        return f"{value:.0f}" if "e" in text else text

    return f"{short(figure['median'])} ({short(figure['min'])}-{short(figure['max'])})"


def scaled(factor: float, digits: int = 3) -> Callable[[Sequence[float]], str]:
    """Return a formatter of the spread of values times `factor`: 1e3 for seconds as milliseconds."""
    return lambda values: format_spread(spread([factor * value for value in values]), digits)


def seconds_column(device: str, key: str = "seconds") -> tuple[str, str, Callable[[Any], str]]:
    """Return the table column of seconds in the unit that fits the device."""
    return ("us", key, scaled(1e6)) if device == "cuda" else ("CPU ms", key, scaled(1e3))


def table(
    title: str, points: Sequence[Mapping[str, Any]], columns: Sequence[tuple[str, str, Callable[[Any], str]]]
) -> dict[str, Any]:
    """Return {"title", "head", "rows"} of text from columns (head, key, formatter).

    A cell whose point has no such key is empty. A column of empty cells is left out, unless it is the first.
    """
    first, *others = columns
    columns = [first, *(c for c in others if any(p.get(c[1]) is not None for p in points))]
    rows = [["" if p.get(key) is None else form(p[key]) for _, key, form in columns] for p in points]
    return {"title": title, "head": [head for head, _, _ in columns], "rows": rows}


def print_table(table: Mapping[str, Any]) -> None:
    """Print the title and the rows, the first column to the left and figures to the right."""
    print(table["title"])
    lines = [table["head"], *table["rows"]]
    widths = [max(len(str(cell)) for cell in column) for column in zip(*lines)]
    for line in lines:
        first, *others = (str(cell) for cell in line)
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:]))]
        print("  ".join(cells).rstrip())
    print(flush=True)


def markdown(table: Mapping[str, Any]) -> list[str]:
    """Return the lines of a Markdown table, without its title."""
    rule = ["---"] + ["---:"] * (len(table["head"]) - 1)
    return [f"| {' | '.join(line)} |" for line in (table["head"], rule, *table["rows"])]


def target(what: str, measured: Mapping[str, float], limit: float, *, at_least: bool) -> dict[str, Any]:
    """Return a figure with the limit that was asked for; its median decides whether it is met."""
    met = measured["median"] >= limit if at_least else measured["median"] <= limit
    return {"what": what, "measured": dict(measured), "limit": limit, "at_least": at_least, "met": met}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, "" for an error without one."""
    return (str(error).splitlines() or [""])[0]


# The report and the command line


def environment() -> dict[str, Any]:
    """Return where and with what a measurement is taken, and how busy the machine is before it."""
    packages = "torch torchvision timm nvidia-dali-cuda120 nvidia-dali-cuda130 "
    packages += "pytorch-metric-learning lightly numpy pillow"
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: found for name in packages.split() if (found := installed(name))},
        "command": " ".join(["python", *sys.argv]),
    }


def _commit() -> str | None:
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
            partial = self.path.with_name(f"{self.path.name}.part")
            partial.write_text(json.dumps(self.content, indent=1) + "\n")
            os.replace(partial, self.path)

    def finish(
        self,
        tables: Sequence[Mapping[str, Any]],
        *,
        notes: Sequence[str] = (),
        targets: Sequence[Mapping[str, Any]] = (),
        wrong: Sequence[str] = (),
        **found: Any,
    ) -> int:
        """Save and print everything; return 1 if something computes wrong results, else 0.

        A missed target is a finding, not a failure.
        """
        self.save(tables=list(tables), notes=list(notes), targets=list(targets), wrong=list(wrong), **found)
        for each in tables:
            print_table(each)
        for note in notes:
            print(note)
        for each in targets:
            verdict = "met   " if each["met"] else "MISSED"
            bound = "at least" if each["at_least"] else "at most"
            measured = format_spread(each["measured"])
            print(f"{verdict}  {each['what']}: {measured}, target {bound} {each['limit']:g}")
        for each in wrong:
            print(f"WRONG   {each}")
        return 1 if wrong else 0


def parser(
    description: str | None,
    *,
    rounds: int | None = None,
    quick: str = "",
    devices: Sequence[str] = ("auto", "cpu", "cuda"),
) -> argparse.ArgumentParser:
    """Return a parser with --json and, where given, --rounds, --device (the first is the default) and --quick."""
    made = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    made.add_argument("--json", type=Path, help="also write everything to this file")
    if rounds is not None:
        made.add_argument(
            "--rounds", type=int, default=rounds, help="turns of each contender (default: %(default)s)"
        )
    if devices:
        made.add_argument("--device", choices=devices, default=devices[0])
    if quick:
        made.add_argument("--quick", action="store_true", help=f"{quick}: for a look and for the tests")
    return made


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of `main`; print a wrong folder, key or device as one line."""
    try:
        code = main()
    except (FastSuncetError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
