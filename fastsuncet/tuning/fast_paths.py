"""Which fast paths a run uses, and why: the one table of them, and `choose`, which answers before the first step.

A path is one of the project's kernels, by its source ("norm.cu"), apex, or the CUDA graph of a whole step. Where it is
off, its plain twin computes the same. `choose` decides so:

1. A path that the config excludes is off, and one that a continued run was started without, so that its bits stay.
2. So is one that this machine lacks something for.
3. A child (child.py) tries what is left, on the run's own shapes: a kernel must agree with its twin, a graph must give
   the bits of the same step without it, and neither may be over 3 % slower (view.cu is not timed). The verdict is kept
   (verdicts.py).
4. What one rank cannot use is used by none: a kernel rounds otherwise than its twin, and DDP never sends weights again.

So a verdict can switch a path that the table allows on or off, and nothing else. A checkpoint keeps the choice.
kernels/switches.py holds it in the process (`switch`), and what uses a kernel asks there (`usable`):
losses/contrast.py, optim/lars.py, models/norm_kernel.py. norm.cu, view.cu and the graph have a key of the config too,
whose auto `resolved` writes; a true of view.cu or of the graph ends the run where it fails. Only commands/train.py and
tune.py come here: elsewhere a kernel is proved at its first use, and not timed. A CPU has no path: view_operator/use.py
compiles its operator there.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fastsuncet.config import Arithmetic, Config, flat
from fastsuncet.config.schema import TIMM
from fastsuncet.distributed.collectives import any_rank, broadcast_json, gather_json
from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import switches
from fastsuncet.models.flops import norm_shapes
from fastsuncet.optim import lars_kernel
from fastsuncet.optim.lars_kernel import APEX
from fastsuncet.training.summary import check_memory, speed_on_cpu
from fastsuncet.tuning import processes, trials, verdicts
from fastsuncet.tuning.trials import Trial
from fastsuncet.tuning.verdicts import Verdict, if_not_slower
from pipelines import cuda_compiler
from pipelines.backend import dali_problem
from pipelines.dali.view_operator import use as view_operator
from pipelines.dali.view_operator.build import too_wide, unknown
from pipelines.output import say_line

INT32 = 2**31 - 1
GRAPH, VIEW = "CUDA graph", "view.cu"
# Views of a rank up to which `meta.cuda_graph: auto` tries a graph. With more of them the GPU computes longer than the
# host takes to launch a step: a ResNet-50's 512 views take an H200 73 ms launched one by one, and 72 as a graph.
GRAPH_VIEWS = 384
STAYS_OFF = "the run was started without it; a new run can use it"
SECONDS = 600.0  # for the trials of a process; all that try kernels have twice that together

Paths = dict[str, str | None]  # path -> why the run does not use it, None if it does


# ------------------------------------------------------------------------------------------------------- the table
class FastPath(NamedTuple):
    """A row of PATHS. A reason is a clause for the line `speed`; None: there is none."""

    missing: Callable[[], str | None]  # what this machine lacks for it
    # Why the config, which has no precision "auto", does without.
    excluded: Callable[[Config, Arithmetic], str | None]
    trial: Callable[[Config, Arithmetic], Trial] | None = None  # None: whole steps are compared
    key: str | None = None  # of the config, whose "auto" it decides


def _not_lars(config: Config, arithmetic: Arithmetic) -> str | None:
    name = config.optimization.optimizer
    return None if name == "lars" else f"optimization.optimizer is {name}"


def _not_apex(config: Config, arithmetic: Arithmetic) -> str | None:
    if reason := _not_lars(config, arithmetic):
        return reason
    on_device = _not_graph(config, arithmetic) is None
    return "a CUDA graph reads the rate on the GPU, and apex takes it from the host" if on_device else None


def _not_contrast(config: Config, arithmetic: Arithmetic) -> str | None:
    return None if config.criterion.contrasts else "the method has no contrastive loss"


def _not_norm(config: Config, arithmetic: Arithmetic) -> str | None:
    m, meta = config.model, config.meta
    fused = m.fused_batchnorm is not False and can_fuse(config)
    shared = m.sync_batchnorm and arithmetic.world_size > 1
    if meta.compile:
        return "meta.compile makes its own"
    # The head's activations are rows of channels in any memory format.
    if not (meta.channels_last or m.head_batchnorm):
        return "meta.channels_last is false"
    if not (fused or shared):
        return "model.fused_batchnorm is false, or cannot be true here"
    return None if norm_shapes(config, arithmetic) else "the network has no BatchNorm"


def _not_view(config: Config, arithmetic: Arithmetic) -> str | None:
    if config.data.backend == "torchvision":
        return "data.backend is torchvision"
    if config.data.view_operator is False:
        return "data.view_operator is false"
    augmentation = config.data.augmentation
    return unknown(augmentation) or too_wide(augmentation.widest_blur)


def _not_graph(config: Config, arithmetic: Arithmetic) -> str | None:
    if config.meta.cuda_graph is False:
        return "meta.cuda_graph is false"
    if config.meta.cuda_graph is True:
        return None
    if config.criterion.micro_batch is not None:
        return "it has not been tried with criterion.micro_batch"
    own = arithmetic.update_views(arithmetic.supervised_steps > 0) // arithmetic.world_size
    if own > GRAPH_VIEWS:
        return f"{own:,} views a process keep the GPU busy; `fastsuncet tune` tries it"
    return None


def _no_kernels() -> str | None:
    return switches.switched_off() or cuda_compiler.unavailable()


def _no_apex() -> str | None:
    return switches.switched_off() or (None if lars_kernel.apex() else "NVIDIA's apex is not installed")


def _no_view_operator() -> str | None:
    return switches.switched_off() or dali_problem() or view_operator.state()[1]


# In this order they are tried. docs/speed.md has what each is for, and its twin.
PATHS = {
    "lars.cu": FastPath(_no_kernels, _not_lars, trials.lars),
    APEX: FastPath(_no_apex, _not_apex, trials.apex),
    "contrast.cu": FastPath(_no_kernels, _not_contrast, trials.contrast_rows),
    "norm.cu": FastPath(_no_kernels, _not_norm, trials.norm, "model.fused_batchnorm"),
    VIEW: FastPath(_no_view_operator, _not_view, trials.view, "data.view_operator"),
    GRAPH: FastPath(lambda: None, _not_graph, key="meta.cuda_graph"),
}


def can_fuse(config: Config) -> bool:
    """Return whether the network's BatchNorm can be fused with its neighbors."""
    return config.meta.channels_last and not config.meta.compile and not config.model.name.startswith(TIMM)


# -------------------------------------------------------------------------------------------------- which, and why
def choose(
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
    machine = verdicts.describe_machine(place.device)
    check_memory(config, arithmetic, machine["memory"])
    paths: Paths = {
        name: path.excluded(config, arithmetic) or (STAYS_OFF if before.get(name) is False else None)
        for name, path in PATHS.items()
    }
    check_int32(resolved(config, paths), arithmetic, paths)  # as if all that is tried would pass
    own = {name: PATHS[name].missing() for name, reason in paths.items() if reason is None and name != GRAPH}
    keys = {
        name: {"path": name, "shapes": trial(config, arithmetic).shapes, **machine}
        for name, reason in own.items()
        if reason is None and (trial := PATHS[name].trial) is not None
    }
    # The first of the ranks with equal keys decides for all of them.
    everywhere = gather_json(keys)
    if everywhere.index(everywhere[place.rank]) == place.rank:
        request = {"config": config.canonical(), "arithmetic": vars(arithmetic), "device": place.device.index}
        own |= _try_kernels(request, keys, stopped)
    for rank, reasons in enumerate(gather_json(own)):
        for name, reason in reasons.items():
            on = f"rank {rank}: " if place.world_size > 1 else ""
            paths[name] = paths[name] or (reason and f"{on}{reason}")
    if paths["lars.cu"] is None and paths[APEX] is None:
        paths[APEX] = "lars.cu makes fewer passes over memory"
    for name in paths.keys() - {GRAPH}:
        switches.switch(name, place.device, paths[name])
    if paths[VIEW] is None:
        view_operator.proved.add(place.device.index)
    check_int32(resolved(config, paths), arithmetic, paths)
    if paths[GRAPH] is None:
        fast = resolved(config, paths)
        paths[GRAPH] = _try_graph(fast, arithmetic, place, per_class, paths, machine, stopped)
        if paths[GRAPH] and config.meta.cuda_graph is True and not any_rank(stopped()):
            raise ConfigError(
                f"meta.cuda_graph is true, and a process that tried it could not use it: {paths[GRAPH]}. Write auto"
            )
    lost = [name for name, used in before.items() if used and paths.get(name)]
    if lost:
        place.say(f"{', '.join(lost)}: used before and not here, so results are equal up to rounding only")
    return paths


def resolved(config: Config, paths: Paths) -> Config:
    """Return the config with the values that its "auto" keys have in a run that uses `paths`."""
    values, found = flat(config.canonical()), {}
    for name, path in PATHS.items():
        # On a CPU, where `paths` is empty, the view operator is used without a trial.
        if path.key and values[path.key] == "auto" and (paths or name != VIEW):
            used = paths.get(name, "no GPU") is None
            found[path.key] = used and (name != "norm.cu" or can_fuse(config))
    return config.resolved(found)


def describe(config: Config, paths: Paths) -> str:
    """Return which paths a run uses, and for each other one why not and what to do. `config` is `resolved`."""
    if not paths:
        return speed_on_cpu(config)
    used = [path for path, reason in paths.items() if reason is None]
    notes = [f"not {path}: {reason}" for path, reason in paths.items() if reason]
    meta = config.meta
    if not meta.compile:
        notes.append("not torch.compile: `fastsuncet tune` tries it")
    else:
        used.append("torch.compile")
        if meta.deterministic and not meta.autotune:
            notes.append("Inductor does not time its reductions (meta.autotune)")
    return "; ".join([", ".join(used) or "PyTorch's operators", *notes])


def check_int32(config: Config, arithmetic: Arithmetic, paths: Paths) -> None:
    """Raise ConfigError for activations that torch's BatchNorm cannot index in channels-last memory on a GPU.

    `config` is `resolved` with these paths.
    """
    fused = config.model.fused_batchnorm is True and paths.get("norm.cu", "not proven") is None
    if config.meta.channels_last and not fused:
        fix = "Use more GPUs, a smaller batch or criterion.micro_batch"
        require_int32("criterion.unsupervised_batch_size", norm_shapes(config, arithmetic), fix)


def require_int32(key: str, shapes: Iterable[tuple[int, ...]], fix: str) -> None:
    """Raise ConfigError for the largest of channels-last `shapes` if torch's BatchNorm cannot count it in 32 bits."""
    largest = max(shapes, key=math.prod, default=(0,))
    count = math.prod(largest)
    if count > INT32:
        most = INT32 // (count // largest[0])
        raise ConfigError(
            f"{key}: each process has {largest[0]:,} views at a time, and BatchNorm sees {tuple(largest)} activations. "
            f"torch's channels-last BatchNorm counts them in 32 bits, so a process can have {most:,} views at most. "
            f"{fix}, or set meta.channels_last=false."
        )


# ---------------------------------------------------------------------------------------------- trials in children
def _try_kernels(request: dict, keys: Mapping[str, verdicts.Key], stopped: Callable[[], bool]) -> Paths:
    """Return the verdicts on kernels: kept ones, and those of a child for the others."""
    found: dict[str, Verdict | None] = {path: verdicts.read(key) for path, key in keys.items()}
    # The other ranks wait for the verdicts, and not longer than for a rank that hangs.
    ends = time.monotonic() + min(2 * SECONDS, request["config"]["meta"]["timeout"])
    while missing := [path for path, verdict in found.items() if verdict is None]:
        say_line(f"speed: tries {', '.join(missing)}, once for this machine and these shapes")
        # Half of what is left: a kernel that hangs leaves time for the others, and several cannot take it each anew.
        go_on = processes.limited((ends - time.monotonic()) / 2, stopped)
        lines, end = processes.run_child({**request, "try": missing}, os.environ, go_on)
        tried = ""
        for line in lines:
            tried = line.pop("path")
            if line:
                found[tried] = verdict = Verdict(**line)
                if verdict.final:
                    verdicts.keep(keys[tried], verdict)
                tried = ""
        # The one that ended the process, or all where it could not even start. The others get another process.
        for path in [tried] if tried else missing if not lines else []:
            found[path] = Verdict(f"the process that tried it {end}", final=False)
    return {path: verdict.problem for path, verdict in found.items() if verdict is not None}


def _try_graph(
    config: Config,
    arithmetic: Arithmetic,
    place: Place,
    per_class: Sequence[int],
    paths: Paths,
    machine: verdicts.Key,
    stopped: Callable[[], bool],
) -> str | None:
    """Return why the run cannot use a CUDA graph, None if it does. Collective: the children train together."""
    values, sizes = config.canonical(), vars(arithmetic)
    step = {section: values[section] for section in ("model", "criterion", "swav", "paws")}
    step["side"] = config.data.augmentation.size
    step["meta"] = {name: x for name, x in values["meta"].items() if name not in ("seed", "cuda_graph")}
    step["sizes"] = {name: x for name, x in sizes.items() if "steps" not in name and name != "num_images"}
    step["optimizer"] = config.optimization.optimizer
    request = processes.request_of(config, arithmetic, per_class, paths)
    key = {"path": GRAPH, "shapes": {"step": step, "paths": request["paths"]}, **machine}
    kept = verdicts.read(key) if place.first else None
    if kept := broadcast_json(kept and [kept.problem]):
        return kept[0]
    place.say(f"speed: tries a {GRAPH}, once for this machine and this step")
    without, with_it = ({"meta.cuda_graph": value} for value in (False, True))
    verdict = if_not_slower(processes.compare(request, without, with_it, SECONDS, stopped))
    if verdict.problem and "other bits" in verdict.problem and place.world_size > 1:
        hint = "; NCCL's registered buffers can be why: set NCCL_GRAPH_REGISTER=0 and start again"
        verdict = replace(verdict, problem=verdict.problem + hint)
    if place.first and verdict.final:
        verdicts.keep(key, verdict)
    return verdict.problem
