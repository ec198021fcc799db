"""Which fast paths a run uses on this machine: each is proved and timed once, in a process of its own, and kept.

A verdict is a file $FASTSUNCET_CACHE/verdicts/KEY.json, else ~/.cache/fastsuncet/verdicts/KEY.json, for a path, a card,
its driver, the versions, the program and the shapes of the run. It switches a path on or off and nothing else. A file
that another user could have written, or that is not whole, counts as absent. It is never wrong to delete it.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastsuncet.config import Arithmetic, Config
from fastsuncet.console import say_line
from fastsuncet.distributed.collectives import any_rank, broadcast_json, gather_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.training.kernel_choice import (
    GRAPH,
    SLOWER,
    STAYS_OFF,
    Paths,
    Verdict,
    agree,
    check_int32,
    graph_problem,
    obey,
    resolved,
    trials,
)
from fastsuncet.training.summary import check_memory
from fastsuncet.tuning import processes
from fastsuncet.tuning.chooser import Rung
from fastsuncet.versions import digest_of_sources, versions
from pipelines import atomic_files, code_cache, cuda_compiler

LIMIT = 1 << 16  # bytes of a verdict
SECONDS = 600.0  # for the trials of a process
DRIVER = Path("/proc/driver/nvidia/version")

Key = dict[str, Any]


def settle(
    config: Config,
    arithmetic: Arithmetic,
    place: Place,
    per_class: Sequence[int],  # labeled images of each class
    before: Mapping[str, bool],
    stopped: Callable[[], bool] = lambda: False,
) -> Paths:
    """Return the paths that the run of `config` uses, equal on all ranks, and switch them so. Collective.

    {} on a CPU. `config` has no precision "auto"; `before` is what the run's checkpoint says, {} for a new run;
    `stopped` ends the trials. Raises ConfigError, before any trial where that is known before, for a step that does
    not fit the card, activations that torch cannot index, and for a written meta.cuda_graph that fails its trial.
    """
    if place.device.type != "cuda":
        return {}
    found = trials(config, arithmetic)
    # As if everything that is tried would pass.
    machine = describe_machine(place.device)
    check_memory(config, arithmetic, machine["memory"])
    hoped = resolved(config, dict.fromkeys(found))
    check_int32(hoped, arithmetic, place.device, dict.fromkeys(found))
    keys = {path: {"path": path, "shapes": trial.shapes, **machine} for path, trial in found.items()}
    # The first of the ranks with equal keys decides for all of them.
    everywhere = gather_json(keys)
    own: Paths = {}
    if everywhere.index(everywhere[place.rank]) == place.rank:
        request = {"config": config.canonical(), "arithmetic": vars(arithmetic), "device": place.device.index}
        own = _kernels(request, {path: key for path, key in keys.items() if before.get(path, True)}, stopped)
    paths, lost = obey(agree(place, own), before, place.device)
    check_int32(resolved(config, paths), arithmetic, place.device, paths)
    paths[GRAPH] = STAYS_OFF if before.get(GRAPH) is False else graph_problem(config, arithmetic)
    if paths[GRAPH] is None:
        fast = resolved(config, paths)
        paths[GRAPH] = _graph(fast, arithmetic, place, per_class, paths, machine, stopped)
        if paths[GRAPH] and config.meta.cuda_graph is True and not any_rank(stopped()):
            raise ConfigError(
                f"meta.cuda_graph is true, and a process that tried it could not use it: {paths[GRAPH]}. Write auto"
            )
    if lost and place.first:
        say_line(f"{', '.join(lost)}: used before and not here, so results are equal up to rounding only")
    return paths


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
        # The stubs do not know it.
        "cuda": torch._C._cuda_getDriverVersion(),  # pyright: ignore[reportAttributeAccessIssue]
        "nvrtc": nvrtc,
        "versions": versions(),
        "program": digest_of_sources(),
        "kernels": os.environ.get("FASTSUNCET_KERNELS", ""),
    }


def _kernels(request: dict[str, Any], keys: Mapping[str, Key], stopped: Callable[[], bool]) -> Paths:
    """Return the verdicts on kernels: kept ones, and those of a child for the others."""
    found: dict[str, Verdict | None] = {path: read(key) for path, key in keys.items()}
    while missing := [path for path, verdict in found.items() if verdict is None]:
        say_line(f"speed: tries {', '.join(missing)}, once for this machine and these shapes")
        lines, end = processes.run_child(
            {**request, "try": missing}, os.environ, processes.limited(SECONDS, stopped)
        )
        tried = ""
        for line in lines:
            tried = line["path"]
            if "reason" in line:
                found[tried] = verdict = Verdict(line["reason"], line["milliseconds"], line["final"])
                if verdict.final:
                    keep(keys[tried], verdict)
                tried = ""
        # The one that ended the process, or all where it could not even start. The others get another process.
        for path in [tried] if tried else missing if not lines else []:
            found[path] = Verdict(f"the process that tried it {end}", final=False)
    return {path: verdict.reason for path, verdict in found.items() if verdict is not None}


def _graph(
    config: Config,
    arithmetic: Arithmetic,
    place: Place,
    per_class: Sequence[int],
    paths: Paths,
    machine: Key,
    stopped: Callable[[], bool],
) -> str | None:
    """Return why the run cannot use a CUDA graph, None if it does. Collective: the children train together."""
    values = config.canonical()
    step = {section: values[section] for section in ("model", "criterion", "swav")}
    step |= {
        "meta": {name: value for name, value in values["meta"].items() if name not in ("seed", "cuda_graph")}
    }
    sizes = {
        name: value
        for name, value in vars(arithmetic).items()
        if "steps" not in name and name != "num_images"
    }
    step |= {"optimizer": config.optimization.optimizer, "sizes": sizes}
    nccl = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    request = processes.request_of(config, arithmetic, per_class, paths)
    shapes = {"step": step, "paths": request["paths"], "nccl": nccl}
    key = {"path": GRAPH, "shapes": shapes, **machine}
    kept = broadcast_json(read(key) if place.first else None)
    if kept is not None:
        return kept[0]
    if place.first:
        say_line(f"speed: tries a {GRAPH}, once for this machine and this step")
    rung = Rung(GRAPH, {"meta.cuda_graph": True}, exact=True)
    found = processes.compare(request, rung, {"meta.cuda_graph": False}, SECONDS, stopped)
    reason = found.problem
    if reason and "other bits" in reason and place.world_size > 1:
        reason += "; NCCL's registered buffers can be why: set NCCL_GRAPH_REGISTER=0 and start again"
    if reason is None and found.gain * SLOWER < 1:
        reason = f"it is slower: {1 / found.gain:.2f} times as long a step"
    verdict = Verdict(reason, (1e3 * median(found.contender), 1e3 * median(found.base)), found.final)
    if place.first and verdict.final:
        keep(key, verdict)
    return verdict.reason


# ------------------------------------------------------------------------------------------------------ the files
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
