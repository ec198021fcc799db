"""What a trial of a fast path found, and what follows. It is kept on the disk, so that a later start tries nothing.

The file is verdicts/KEY.json in the folder of pipelines/code_cache.py, for a path, a card, its driver, versions,
program, environment and the shapes of the run. It switches a path on or off and nothing else. A file that another user
could have written, or that is not whole, counts as absent. It is never wrong to delete it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastsuncet.versions import digest_of_sources, versions
from pipelines import atomic_files, code_cache, cuda_compiler
from pipelines.output import say_line

MARGIN = 1.03  # times as fast: less is not worth another path, and as slow is noise
MEMORY_LEFT = 0.08  # of the card: less can end the run hours later
LIMIT = 1 << 16  # bytes of a verdict
DRIVER = Path("/proc/driver/nvidia/version")
# Variables by which a step is slower or cannot be captured: a start to debug must leave no verdict to later runs.
DECISIVE = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_", "NCCL_", "TORCH_NCCL_")

Key = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """What a trial found on one rank, or by `judge` on all. JSON types only."""

    # Why the contender is not used: the proof that failed, or what ended the child.
    problem: str | None = None
    final: bool = True  # False: another try can end otherwise, as after a lack of memory
    # Seconds without it, by window; of several ranks the slowest one's; (): not timed.
    base: Sequence[float] = ()
    contender: Sequence[float] = ()  # and with it
    memory_left: float = 1.0  # of the card, 0 to 1, while the contender trains

    @property
    def gain(self) -> float:
        """How many times as fast as the base."""
        return median(self.base) / median(self.contender) if self.base else 1.0

    @property
    def milliseconds(self) -> list[float]:
        """With it and without; empty if it was not timed."""
        return [1e3 * median(side) for side in (self.contender, self.base) if side]

    @property
    def won(self) -> bool:
        """Whether it is faster by `MARGIN`, and in the median faster than any window of the base."""
        return not self.problem and self.gain >= MARGIN and median(self.contender) < min(self.base)


def if_not_slower(found: Verdict) -> Verdict:
    """Return `found`, with a problem if the contender is slower beyond the noise of timing."""
    if found.gain * MARGIN >= 1:
        return found
    problem = "slower than without it: {:.3g} ms against {:.3g} ms".format(*found.milliseconds)
    return replace(found, problem=problem)


def judge(ranks: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a contender from what each rank found."""
    # What was proved wrong before what merely ended: ranks end each other.
    failed = [(not r.final, rank, r.problem) for rank, r in enumerate(ranks) if r.problem]
    if failed:
        ended, rank, problem = min(failed)
        where = f"rank {rank}: " if len(ranks) > 1 else ""
        return Verdict(f"{where}{problem}", final=not ended)
    left = min(each.memory_left for each in ranks)
    if left < MEMORY_LEFT:
        problem = f"leaves {left:.0%} of the memory free, {MEMORY_LEFT:.0%} are needed"
        return Verdict(problem, final=False)
    # Ranks wait for each other, so a step takes as long as the slowest one's.
    base = [max(window) for window in zip(*(each.base for each in ranks))]
    contender = [max(window) for window in zip(*(each.contender for each in ranks))]
    return Verdict(base=base, contender=contender)


def describe_machine(device: torch.device) -> Key:
    """Return what a verdict on a GPU depends on besides its path and its shapes."""
    card = torch.cuda.get_device_properties(device)
    return {
        "card": card.name,
        "memory": card.total_memory,
        "driver": DRIVER.read_text(encoding="utf-8")[:LIMIT] if DRIVER.exists() else "",
        "cuda": cuda_compiler.driver_version(),
        "nvrtc": cuda_compiler.unavailable() or cuda_compiler.version(),
        "versions": versions(),
        "program": digest_of_sources(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(DECISIVE)},
    }


def file_of(key: Key) -> Path:
    """Return the file that keeps the verdict for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return code_cache.cache_folder("verdicts") / f"{digest}.json"


def read(key: Key) -> Verdict | None:
    """Return the verdict that is kept for exactly this key; None if there is none, with a line if one is refused.

    Its times are not read.
    """
    try:
        content = json.loads(atomic_files.read_bytes(file_of(key), LIMIT, own=True))
        reason = content["reason"]
        if content["key"] != json.loads(json.dumps(key)) or not isinstance(reason, str | None):
            raise ValueError("it is for something else; remove it")
        return Verdict(reason)
    except FileNotFoundError:
        return None
    # RuntimeError: this user has no home directory.
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        say_line(f"speed: no verdict kept: {error}")
        return None


def keep(key: Key, verdict: Verdict) -> None:
    """Keep a verdict for later runs; say why if that fails, because no run needs it."""
    content = {"reason": verdict.problem, "milliseconds": verdict.milliseconds, "key": key}
    try:
        code_cache.replace(file_of(key), json.dumps(content, indent=1).encode())
    except (OSError, RuntimeError) as error:
        say_line(f"speed: the verdict on {key['path']} cannot be kept for later runs: {error}")
