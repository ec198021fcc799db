"""What the tools share: timing in turns, ratios and tables.

Machines are shared, so no figure stands alone. Contenders take turns, and a ratio is taken within each round, where
both sides met the same load. A figure is the median over the rounds, with the lowest and the highest in brackets.

On a GPU a time is the one between two CUDA events. On a CPU it is the CPU time of this process and of its workers.
"""

import contextlib
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NoReturn, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from fastsuncet.commands.report import markdown
from fastsuncet.errors import FastSuncetError
from fastsuncet.training.cuda_graph import capture_on_device, first_message
from fastsuncet.versions import installed, versions
from pipelines.data_errors import DataError
from tools.bench.dispatch_counter import Counter

DEVICES = ("auto", "cpu", "cuda")
CLOCK = {"cpu": "CPU time", "cuda": "CUDA events"}
Call = Callable[[], Any]
Row = dict[str, str]  # head of a column -> cell
Time = TypeVar("Time")


# ----------------------------------------------------------------------------------------------------------- timing
def cpu_seconds() -> float:
    """Return the CPU time of this process and of its live workers, which the system adds only after they end."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        # User and system ticks are fields 14 and 15; field 2, the name in brackets, can hold spaces.
        fields = Path(f"/proc/{worker.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def seconds_of(call: Call, device: str, repeats: int = 1) -> float:
    """Return the mean seconds of `repeats` calls on the clock of `device`, "cpu" or "cuda"."""
    if device != "cuda":
        return wall_and_cpu(call, repeats)[1] / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def wall_and_cpu(call: Call, repeats: int) -> tuple[float, float]:
    """Return the seconds on the wall and the CPU time of `repeats` calls."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    for _ in range(repeats):
        call()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def time_in_turns(
    calls: Mapping[Any, Call],
    clock: Callable[[Call], Time],
    rounds: int,
    warmup: int = 2,
    discarded: Mapping[Any, int] | None = None,
) -> dict[Any, list[Time]]:
    """Return what `clock` says of each call in each round, after `warmup` calls that choose kernels and create state.

    `discarded`: calls before each turn of a contender that works ahead while others have their turns.
    """
    for call in calls.values():
        for _ in range(warmup):
            call()
    found: dict[Any, list[Time]] = {name: [] for name in calls}
    order = deque(calls)
    for _ in range(rounds):
        for name in order:
            if discarded:
                settle()
            for _ in range((discarded or {}).get(name, 0)):
                calls[name]()
            found[name].append(clock(calls[name]))
        order.rotate(-1)  # so that none always runs behind the same neighbor
    return found


def wall_and_cpu_in_turns(
    calls: Mapping[Any, Call], count: int, rounds: int, discarded: int
) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
    """Return the seconds on the wall, and the CPU time, of `count` calls in each turn, after `discarded` calls."""
    clock = partial(wall_and_cpu, repeats=count)
    turns = time_in_turns(calls, clock, rounds, discarded=dict.fromkeys(calls, discarded))
    wall, cpu = ({name: [turn[i] for turn in found] for name, found in turns.items()} for i in (0, 1))
    return wall, cpu


def settle() -> None:
    """Wait until what works ahead has filled its queues: its work would be in the turn of another contender."""
    for _ in range(50):
        before = cpu_seconds()
        # On a busy machine a process that works gets some of this, and a tick of a worker is 0.01 s.
        time.sleep(0.3)
        if cpu_seconds() - before < 0.005:
            return


def capture_graph(name: str, call: Call) -> Call:
    """Return `call` as a CUDA graph; or print why it cannot be captured, and return `call` itself."""
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
        print(f"{name} is launched, not a CUDA graph: {first_message(error)}\n", flush=True)
        return call
    return graph.replay


@contextlib.contextmanager
def waiting_raises() -> Iterator[None]:
    """Let CUDA raise RuntimeError where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------------------------------------------- figures
def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return above / below, round by round."""
    return [a / b for a, b in zip(above, below)]


def spread(values: Sequence[float], factor: float = 1) -> str:
    """Format values times `factor` as `median (lowest-highest)`, with three significant digits."""

    def short(value: float) -> str:
        text = f"{factor * value:.3g}"
        return f"{factor * value:.0f}" if "e" in text else text

    return f"{short(median(values))} ({short(min(values))}-{short(max(values))})"


def rows_of(
    seconds: Mapping[str, Sequence[float]], device: str, ours: str, limit: str = ""
) -> dict[str, Row]:
    """Return a row of each contender by its name: its time, and its ratio to that of `ours` and of `limit`."""
    unit, factor = ("us", 1e6) if device == "cuda" else ("CPU ms", 1e3)
    rows = {}
    for name, times in seconds.items():
        rows[name] = {"": name, unit: spread(times, factor)}
        rows[name]["time, x ours"] = spread(ratios(times, seconds[ours]))
        if limit in seconds:
            rows[name]["time, x limit"] = spread(ratios(times, seconds[limit]))
    return rows


def counted(call: Call, device: str) -> Row:
    """Return the cells of what a call does at torch's dispatcher, and on a GPU how many launches CUDA sees."""
    with Counter() as counter:
        call()
    cells = {"operators": f"{counter.operators:,}", "host waits": f"{counter.waits}"}
    cells["memory, MB"] = f"{1e-6 * counter.peak:.3g}"
    return cells | launched(call) if device == "cuda" else cells


def launched(call: Call) -> Row:
    """Return the cell of how many kernels, copies and fills a call starts on the GPU; none where CUDA records none."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        torch.cuda.synchronize()
    count = sum(each.count for each in recorded.key_averages() if each.device_type.name == "CUDA")
    return {"launches": f"{count:,}"} if count else {}


def show(title: str, rows: Collection[Row]) -> None:
    """Print a Markdown table with a column for each head that a row has."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    cells = [[row.get(head, "") for head in heads] for row in rows]
    print(title, "", *markdown(heads, cells), "", sep="\n", flush=True)


def show_target(what: str, measured: Sequence[float], limit: float, *, at_least: bool) -> None:
    """Print a figure and the limit that was asked for; its median decides whether it is met.

    A missed target is a finding, not a failure.
    """
    met = median(measured) >= limit if at_least else median(measured) <= limit
    bound = "at least" if at_least else "at most"
    print(f"{'met' if met else 'MISSED'}: {what}: {spread(measured)}, target {bound} {limit:g}\n", flush=True)


# ------------------------------------------------------------------------------------------------- machine and errors
def machine() -> str:
    """Return the date, the processor, how busy it is, the commit and the versions, as BENCHMARKS.md names them."""
    found = versions() | {name: installed(name) for name in ("lightly", "pillow")}
    named = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    processor = models[0] if models else platform.machine()
    # With a plus where files differ from the commit.
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    where = f"{date.today()}, {processor}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return f"{where}. Commit `{commit}`, {named}."


def run(main: Callable[[], int]) -> NoReturn:
    """End the process with the exit code of `main`; print a wrong folder, key or device as one line."""
    try:
        code = main()
    except (FastSuncetError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)
