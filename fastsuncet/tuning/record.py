"""What a choice is valid for, the file that keeps it, and what a run writes about it.

The file is $FASTSUNCET_CACHE/speed/KEY.json, else ~/.cache/fastsuncet/speed/KEY.json. It is never wrong to delete it.
"""

import contextlib
import hashlib
import json
import platform
import subprocess
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
from fastsuncet.tuning.chooser import BASE, CONTENDER, PLAIN, Choice, Rung, Verdict
from pipelines.code_cache import cache_folder

Record = dict[str, Any]  # JSON types: "chosen" (dotted key -> value), "line", "key", "rungs"
SOURCES = Path(__file__).resolve().parents[2]
PATHS = ("root", "csv", "index", "pack", "split", "download", "bad_images", "train", "validation")


def key(config: Config, arithmetic: Arithmetic, device: str, rungs: Sequence[Rung]) -> dict[str, Any] | None:
    """Return all that a choice depends on, None where the ranks differ in it. Collective."""
    values = config.canonical()
    here = {
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
    everywhere = gather_json(here)
    return here if all(each == here for each in everywhere) else None


def cards() -> str:
    """Return this machine's GPUs and their driver. Asks another process: CUDA here would keep memory on the GPU."""
    query = "--query-gpu=name,memory.total,driver_version,compute_mode"
    asked = subprocess.run(
        ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, check=True
    )
    return "; ".join(asked.stdout.strip().splitlines())


def processor() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
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


def cache_file(key: dict[str, Any]) -> Path:
    """Return the file that keeps the choice for a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder("speed") / f"{digest}.json"


def cached(key: dict[str, Any]) -> Record | None:
    """Return the record that is kept for exactly this key; None if there is none, or none that can be read."""
    try:
        record = json.loads(cache_file(key).read_bytes())
        return record if record["key"] == key and isinstance(record["chosen"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(record: Record) -> None:
    """Keep a record for later runs. Raises OSError."""
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
    row |= {"won": verdict.won, "problem": verdict.problem, "notes": list(verdict.notes)}
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
        plain, ours = (1e3 * median(best.seconds[side]) for side in (PLAIN, CONTENDER))
        many = f", {ranks} ranks" if ranks > 1 else ""
        text = f"{names}, {best.gain():.2f}x plain ({plain:.3g} -> {ours:.3g} ms a step{many})"
    for verdict in timed:
        if verdict.rung.values == {"meta.deterministic": False}:
            text += f"; deterministic costs {max(0.0, 1 - 1 / verdict.gain(BASE)):.0%}"
    return text + (f"; {len(failed)} not usable" if failed else "")
