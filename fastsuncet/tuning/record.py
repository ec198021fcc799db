"""What a choice is valid for, the file that keeps it, and what a run writes about it.

The file is $FASTSUNCET_CACHE/speed/KEY.json, else ~/.cache/fastsuncet/speed/KEY.json. It is never wrong to delete it.
"""

import contextlib
import hashlib
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastsuncet.checkpoint import atomic_files
from fastsuncet.checkpoint.format import versions
from fastsuncet.config import Arithmetic, Config
from fastsuncet.data.cpu_count import cores
from fastsuncet.distributed.collectives import gather_json
from fastsuncet.errors import FastSuncetError
from fastsuncet.tuning.chooser import BASE, CONTENDER, PLAIN, Choice, Rung, Verdict
from pipelines.code_cache import cache_folder

CARDS = """
import torch
torch.cuda.init()
cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
names = [f"{card.name} {card.total_memory >> 20} MiB" for card in cards]
print("; ".join(names), "driver for CUDA", torch._C._cuda_getDriverVersion())
"""

Record = dict[str, Any]  # JSON types: "chosen" (dotted key -> value), "line", "key", "rungs"
SOURCES = Path(__file__).resolve().parents[2]
PATHS = ("root", "csv", "index", "pack", "split", "download", "bad_images", "train", "validation")


def key(config: Config, arithmetic: Arithmetic, device: str, rungs: Sequence[Rung]) -> dict[str, Any]:
    """Return all that a choice depends on. Collective; raises NoKey on all ranks if they differ or one finds none."""
    try:
        here, problem = _own_key(config, arithmetic, device, rungs), None
    # Nothing that is unknown about a machine may end a run, and a rank that left would keep the others waiting.
    except Exception as error:
        here, problem = {}, str(error)
    everywhere = gather_json([here, problem])
    if problem := next((f"rank {rank}: {p}" for rank, (_, p) in enumerate(everywhere) if p), None):
        raise NoKey(f"the hardware cannot be named, {problem}")
    if any(each != here for each, _ in everywhere):
        raise NoKey("the ranks run on different hardware or versions")
    return here


def _own_key(config: Config, arithmetic: Arithmetic, device: str, rungs: Sequence[Rung]) -> dict[str, Any]:
    values = config.canonical()
    return {
        "hardware": cards() if device == "cuda" else processor(),
        "cores": [cores(), torch.get_num_threads()],
        "versions": versions(),
        "sources": digest_of_sources(),
        "ranks": arithmetic.world_size,
        "batch": [arithmetic.local_unlabeled, arithmetic.local_labeled, arithmetic.views],
        "rungs": [rung.values for rung in rungs],
        "data": {name: value for name, value in values["data"].items() if name not in PATHS},
        "meta": {name: value for name, value in values["meta"].items() if name not in ("seed", "speed")},
        **{section: values[section] for section in ("model", "criterion", "swav")},
    }


def cards() -> str:
    """Return the GPUs that torch sees and what their driver supports.

    Asks another process: CUDA in this one would keep memory on the GPU. Raises RuntimeError with what torch says.
    """
    # In the sources' folder, because Python would import a torch.py of the user's.
    asked = subprocess.run([sys.executable, "-c", CARDS], capture_output=True, text=True, cwd=SOURCES)
    if asked.returncode:
        raise RuntimeError((asked.stderr.strip().splitlines() or ["it gives no reason"])[-1])
    return asked.stdout.strip()


def processor() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return platform.machine()


def digest_of_sources() -> str:
    """Return the sha256 of this program's sources, kernels included."""
    digest = hashlib.sha256()
    for folder in ("fastsuncet", "pipelines"):
        for path in sorted((SOURCES / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".cc", ".h"):
                digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class NoKey(FastSuncetError):
    """Nothing says what a choice would be valid for, so there is none."""


def cache_file(key: dict[str, Any]) -> Path:
    """Return the file that keeps the choice for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder("speed") / f"{digest}.json"


def cached(key: dict[str, Any]) -> Record | None:
    """Return the record that is kept for exactly this key; None if there is none, or none that can be read."""
    try:
        record = json.loads(cache_file(key).read_bytes())
        return record if record["key"] == key and isinstance(record["chosen"], dict) else None
    # RuntimeError: this user has no home directory.
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None


def keep(record: Record) -> None:
    """Keep a record for later runs. Raises OSError, RuntimeError."""
    path = cache_file(record["key"])
    atomic_files.make_folder(path.parent)
    atomic_files.replace(path, atomic_files.as_json(record))


def applied(config: Config, record: Record | None) -> Config:
    """Return the config with the values that were chosen; what is written in it wins."""
    chosen = {} if record is None else record["chosen"]
    return config.with_values({key: value for key, value in chosen.items() if not config.is_written(key)})


def overrides(record: Record) -> list[str]:
    """Return the choice as words of a command line."""
    return [f"{key}={json.dumps(value)}" for key, value in record["chosen"].items()]


def record_of(choice: Choice, key: dict[str, Any]) -> Record:
    """Return the record of a choice."""
    return {"chosen": choice.values, "line": line(choice, key["ranks"]), "key": key, "rungs": rows(choice)}


def rows(choice: Choice) -> list[dict[str, Any]]:
    """Return one JSON row for each rung that was tried: its times, what it gained, what is wrong with it."""
    return [_row(verdict) for verdict in choice.verdicts]


def _row(verdict: Verdict) -> dict[str, Any]:
    row = {"name": verdict.rung.name, "values": verdict.rung.values, "clock": verdict.rung.clock}
    row |= {"won": verdict.won, "problem": verdict.problem}
    if verdict.problem is None:
        seconds = {side: list(verdict.seconds[side]) for side in (PLAIN, BASE, CONTENDER)}
        row |= {
            "seconds": seconds,
            "gain": verdict.gain(),
            "over_base": verdict.gain(BASE),
            "views": verdict.views,
        }
    return row


def line(choice: Choice, ranks: int) -> str:
    """Return in one line what was chosen, what it gained, and what determinism costs on this card."""
    timed = [verdict for verdict in choice.verdicts if verdict.problem is None]
    failed = [verdict for verdict in choice.verdicts if verdict.problem is not None]
    best = choice.best
    if best is None:
        text = f"plain; none of {len(timed)} contenders is faster"
    else:
        names = " + ".join(v.rung.name for v in choice.verdicts if v.won)
        plain, ours = (milliseconds(best.seconds[side]) for side in (PLAIN, CONTENDER))
        many = f", {ranks} ranks" if ranks > 1 else ""
        text = f"{names}, {best.gain():.2f}x plain ({plain} -> {ours} ms a step{many})"
    for verdict in timed:
        if verdict.rung.values == {"meta.deterministic": False}:
            text += f"; deterministic costs {max(0.0, 1 - 1 / verdict.gain(BASE)):.0%}"
    return text + (f"; {len(failed)} not usable" if failed else "")


def milliseconds(seconds: Sequence[float]) -> str:
    """Return the median of seconds in milliseconds, with at least three digits."""
    middle = 1e3 * median(seconds)
    return f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}"
