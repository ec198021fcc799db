"""Measure in processes: contenders with threads or workers of their own in turns, and the growth of resident memory."""

import multiprocessing
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tools.bench.harness import rotated

# Children fork from a server that has loaded torch and has computed nothing: a clean heap without the time of imports.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torchvision.transforms.v2", "PIL.Image"])

DISCARDED = (
    5  # batches before each turn: more than a contender can have prepared while others had their turns
)
# An importable function that yields batches without end, and its arguments.
Source = tuple[Callable[..., Iterator[Any]], tuple]


def time_batches_in_turns(
    sources: Mapping[Any, Source], count: int, rounds: int
) -> dict[Any, list[tuple[float, float]]]:
    """Return (wall, CPU) seconds over `count` batches of each source, by turn.

    Each source has its own process, and only the one whose turn it is works. What it prepared while others had their
    turns is discarded before its clock starts.
    """
    pipes: dict[Any, Connection] = {}
    processes = []
    turns: dict[Any, list[tuple[float, float]]] = {name: [] for name in sources}
    try:
        for name, source in sources.items():
            pipes[name], far_end = multiprocessing.Pipe()
            # Not a daemon: daemons must not have children, and a DataLoader needs workers.
            process = PROCESSES.Process(target=_serve, args=(far_end, source), daemon=False)
            process.start()
            processes.append(process)
            far_end.close()
        for pipe in pipes.values():
            pipe.recv()
        for turn in range(rounds):
            for name in rotated(list(sources), turn):
                pipes[name].send(count)
                turns[name].append(pipes[name].recv())
        for pipe in pipes.values():
            pipe.send(0)
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.terminate()
    return turns


def _serve(pipe: Connection, source: Source) -> None:
    """Send (wall seconds, CPU seconds) for each number of batches that is received, until it is 0."""
    torch.set_num_threads(1)
    batches = source[0](*source[1])
    next(batches)
    pipe.send(None)
    try:
        while count := pipe.recv():
            for _ in range(DISCARDED):
                next(batches)
            wall, cpu = time.perf_counter(), _cpu_seconds()
            for _ in range(count):
                next(batches)
            pipe.send((time.perf_counter() - wall, _cpu_seconds() - cpu))
    except EOFError:
        pass  # the parent process has ended


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its live workers, which the system adds only after they end."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        # User and system ticks are fields 14 and 15; field 2, the name in brackets, can hold spaces.
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def resident_growth(work: Callable[[], Any]) -> int:
    """Return the bytes by which this process's resident memory rose at most during `work`, as the system counts.

    Call it in a fresh process: memory that was freed before and kept by the allocator would not be counted.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        # Other systems have only a high-water mark since the start, in bytes on macOS.
        import resource

        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    # 5 sets the high-water mark to what is resident now.
    reset.write_text("5")
    before = _kib(status, "VmRSS")
    work()
    return 1024 * (_kib(status, "VmHWM") - before)


def _kib(status: Path, field: str) -> int:
    return int(re.findall(rf"{field}:\s+(\d+) kB", status.read_text())[0])
