"""How many CPU cores a process may use, and so how many threads decode for it."""

import os
from pathlib import Path

QUOTA = Path(
    "/sys/fs/cgroup/cpu.max"
)  # of a container, cgroup v2: "400000 100000" is 4 cores, "max 100000" no quota
MOST = 16  # threads of one stream by default: a GPU's decoder wants no more, and each has buffers of its own


def cores() -> int:
    """Those that the system lets this process run on, or fewer where its container has less time than they have."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = QUOTA.read_text().split()
    except (OSError, ValueError):  # no such file, or not in these words: no quota that we know of
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))


def decode_threads(asked: int | None, processes: int | None = None) -> int:
    """`asked`, or this process's share of its machine's cores: torchrun tells how many `processes` share them."""
    if asked is not None:
        return asked
    if processes is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return max(1, min(MOST, cores() // processes))
