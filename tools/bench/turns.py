"""Contenders that keep threads, workers and read-ahead of their own: each in a process of its own, one at a time.

`in_turns` opens them all; then they take turns, and only the one whose turn it is works. What it had prepared while
others had theirs is thrown away before its clock starts.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tools.bench.common import PROCESSES
from tools.bench.device_clock import settled

DRAINED = 5  # batches thrown away before a turn: more than anybody has prepared while others had theirs
# A function of this module's caller, importable by its name, and what it is called with: batch after batch, endless.
Source = tuple[Callable[..., Iterator[Any]], tuple]


def serve(pipe: Connection, source: Source, device: str) -> None:
    """A contender's process: for each number of batches asked for, sends (wall seconds, CPU seconds)."""
    torch.set_num_threads(1)
    batches = source[0](*source[1])
    next(batches)  # built, workers started
    pipe.send(None)
    try:
        while count := pipe.recv():
            for _ in range(DRAINED):
                next(batches)
            wall, cpu = settled(device), cpu_seconds()
            for _ in range(count):
                next(batches)
            pipe.send((settled(device) - wall, cpu_seconds() - cpu))
    except EOFError:
        pass  # the asking process is gone


def cpu_seconds() -> float:
    """CPU time of this process and of the workers it has now, which the system adds up only once they end."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        # After the name in brackets, which may hold spaces: user and system ticks are fields 14 and 15.
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def in_turns(
    sources: Mapping[Any, Source], count: int, rounds: int, device: str = "cpu"
) -> dict[Any, list[tuple[float, float]]]:
    """(wall, CPU) seconds over `count` batches of each source, by turn. `device` is "cpu" or "cuda"."""
    lines: dict[Any, Connection] = {}
    servers = []
    names = list(sources)
    turns: dict[Any, list[tuple[float, float]]] = {name: [] for name in names}
    try:
        for name in names:
            lines[name], far_end = multiprocessing.Pipe()
            # Not daemonic: daemons may not have the workers that a DataLoader is made of.
            server = PROCESSES.Process(target=serve, args=(far_end, sources[name], device), daemon=False)
            server.start()
            servers.append(server)
            far_end.close()
        for line in lines.values():
            line.recv()
        for turn in range(rounds):
            start = turn % len(names)
            for name in names[start:] + names[:start]:
                lines[name].send(count)
                turns[name].append(lines[name].recv())
        for line in lines.values():
            line.send(0)
    finally:
        for line in lines.values():
            line.close()
        for server in servers:
            server.join(timeout=20)
            if server.is_alive():
                server.terminate()
    return turns
