"""Verdicts on fast paths, kept on the disk: a later start with the same key tries nothing.

A verdict is a file $FASTSUNCET_CACHE/verdicts/KEY.json, else ~/.cache/fastsuncet/verdicts/KEY.json, for a path, a card,
its driver, versions, program, environment and the shapes of the run. It switches a path on or off and nothing else. A
file that another user could have written, or that is not whole, counts as absent. It is never wrong to delete it.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from fastsuncet.tuning.trials import Verdict
from fastsuncet.versions import digest_of_sources, versions
from pipelines import atomic_files, code_cache, cuda_compiler
from pipelines.output import say_line

LIMIT = 1 << 16  # bytes of a verdict
DRIVER = Path("/proc/driver/nvidia/version")
# Variables by which a step is slower or cannot be captured: a start to debug must leave no verdict to later runs.
DECISIVE = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_", "NCCL_", "TORCH_NCCL_")

Key = dict[str, Any]


def describe_machine(device: torch.device) -> Key:
    """Return what a verdict on a GPU depends on besides its path and its shapes."""
    card = torch.cuda.get_device_properties(device)
    try:
        nvrtc = list(cuda_compiler.version())
    except cuda_compiler.KernelError as error:
        nvrtc = [str(error)]
    return {
        "card": card.name,
        "memory": card.total_memory,
        "driver": DRIVER.read_text(encoding="utf-8")[:LIMIT] if DRIVER.exists() else "",
        "cuda": cuda_compiler.driver_version(),
        "nvrtc": nvrtc,
        "versions": versions(),
        "program": digest_of_sources(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(DECISIVE)},
    }


def file_of(key: Key) -> Path:
    """Return the file that keeps the verdict for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return code_cache.cache_folder("verdicts") / f"{digest}.json"


def read(key: Key) -> Verdict | None:
    """Return the verdict that is kept for exactly this key; None if there is none, with a line if one is refused."""
    try:
        content = json.loads(atomic_files.read_bytes(file_of(key), LIMIT, own=True))
        reason, times = content["reason"], content["milliseconds"]
        if content["key"] != json.loads(json.dumps(key)) or not isinstance(reason, str | None):
            raise ValueError("it is for something else; remove it")
        return Verdict(reason, times)
    except FileNotFoundError:
        return None
    # RuntimeError: this user has no home directory.
    except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
        say_line(f"speed: no verdict kept: {error}")
        return None


def keep(key: Key, verdict: Verdict) -> None:
    """Keep a verdict for later runs; say why if that fails, because no run needs it."""
    content = {"reason": verdict.reason, "milliseconds": verdict.milliseconds, "key": key}
    try:
        code_cache.replace(file_of(key), json.dumps(content, indent=1).encode())
    except (OSError, RuntimeError) as error:
        say_line(f"speed: the verdict on {key['path']} cannot be kept for later runs: {error}")
