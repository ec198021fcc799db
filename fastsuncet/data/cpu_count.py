"""How many CPU cores a process can use, and so how many threads decode for it."""

import os
from pathlib import Path

# The time that a container (cgroup v2) is given: "400000 100000" is 4 cores, "max 100000" has no limit.
QUOTA = Path("/sys/fs/cgroup/cpu.max")
# Threads of one stream by default: more do not speed up a GPU's decoder, and each has its own buffers.
MOST = 16


def cores() -> int:
    """Return the number of cores this process can run on, at most as many as its container has time for."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # no such file, or another format: no known limit
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def processes_here() -> int:
    """Return how many processes of the run share this machine, as its launcher says; 1 where it does not."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def cores_of_process() -> int:
    """Return this process's share of the cores that all processes of the run on this machine can use."""
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_CPUS_ON_NODE" not in os.environ:
        return cores() // processes_here()
    # A Slurm task for each process can be bound to its share of the node or see all of it.
    return min(cores(), int(os.environ["SLURM_CPUS_ON_NODE"]) // processes_here())


def decode_threads(asked: int | None, streams: int = 1) -> int:
    """Return `asked`, or the share of the cores of one of a process's `streams` that decode at the same time."""
    return max(1, min(MOST, cores_of_process() // streams)) if asked is None else asked
