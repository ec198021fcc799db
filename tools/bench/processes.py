"""Measure in processes: contenders with threads or workers of their own, in turns."""

import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tools.bench.harness import rotated

# Children fork from a server that has loaded torch and has computed nothing: a clean heap without the time of imports.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "torchvision.transforms.v2", "PIL.Image"])

# An importable function that yields batches without end, and its arguments.
Source = tuple[Callable[..., Iterator[Any]], tuple]


class Turn(NamedTuple):
    """What a turn took: seconds on the wall, processor seconds and bytes of memory, of all processes."""

    wall: float
    cpu: float
    memory: int


def time_batches_in_turns(
    sources: Mapping[Any, Source], count: int, rounds: int, discarded: int
) -> dict[Any, list[Turn]]:
    """Return what `count` batches of each source take, by turn; progress goes to stderr.

    Each source has its own process, and only the one whose turn it is works. `discarded` batches come before the clock:
    more than a source can prepare while others have their turns. `count` must be several times that. Else batches that
    were prepared before the clock, or half of one that is nearly done, are a large part of a turn.
    """
    if count < 2 * discarded:
        raise ValueError(f"{count} batches a turn are too few for sources that prepare up to {discarded - 1}")
    pipes: dict[Any, Connection] = {}
    processes = []
    turns: dict[Any, list[Turn]] = {name: [] for name in sources}
    try:
        for name, source in sources.items():
            pipes[name], far_end = multiprocessing.Pipe()
            # Not a daemon: daemons must not have children, and a DataLoader needs workers.
            process = PROCESSES.Process(target=_serve, args=(far_end, source), daemon=False)
            process.start()
            processes.append(process)
            far_end.close()
            pipes[name].recv()
        order = [name for turn in range(rounds) for name in rotated(list(sources), turn)]
        for name in tqdm(order, "turns", file=sys.stderr, mininterval=1):
            pipes[name].send((discarded, count))
            turns[name].append(pipes[name].recv())
        for pipe in pipes.values():
            pipe.send(None)
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.terminate()
    return turns


def rates(turns: Sequence[Turn], count: int) -> dict[str, list[float]]:
    """Return things a second, CPU milliseconds a thing, and memory in MB, by turn of `count` things."""
    return {
        "per_second": [count / turn.wall for turn in turns],
        "cpu_ms": [1e3 * turn.cpu / count for turn in turns],
        "memory": [turn.memory / 1e6 for turn in turns],
    }


def _serve(pipe: Connection, source: Source) -> None:
    """Send a Turn for each pair of numbers that is received, until it is None."""
    torch.set_num_threads(1)
    batches = source[0](*source[1])
    next(batches)
    pipe.send(None)
    try:
        while asked := pipe.recv():
            discarded, count = asked
            for _ in range(discarded):
                next(batches)
            wall, cpu = time.perf_counter(), _cpu_seconds()
            for _ in range(count):
                next(batches)
            pipe.send(Turn(time.perf_counter() - wall, _cpu_seconds() - cpu, _memory()))
    except EOFError:
        pass  # the parent process has ended


def _cpu_seconds() -> float:
    """Return the CPU time of this process and of its live workers, which the system adds only after they end."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        # User and system ticks are fields 14 and 15; field 2, the name in brackets, can hold spaces.
        fields = Path(f"/proc/{worker.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _memory() -> int:
    """Return the bytes of this process and of its workers; pages that several share are counted once in all."""
    ids = ["self", *(worker.pid for worker in multiprocessing.active_children())]
    texts = (Path(f"/proc/{each}/smaps_rollup").read_text(encoding="utf-8") for each in ids)
    return sum(1024 * int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) for text in texts)
