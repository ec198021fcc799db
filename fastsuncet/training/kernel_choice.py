"""The fast paths of a run: how each is tried on the run's own shapes, which of them a run uses, and why not others.

A path is one of the project's kernels, by its source ("norm.cu"), or GRAPH. A rank that steps by another kernel than
the others rounds differently, and DDP never sends parameters again. So the ranks agree when the step is built, a
checkpoint keeps the choice, and a continued run obeys it. `tuning.verdicts` tries the paths in another process.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fastsuncet.config import Arithmetic, Config
from fastsuncet.data.paired_stream import views
from fastsuncet.distributed.collectives import gather_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import self_test
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import norm_kernel
from fastsuncet.models.fused_batchnorm import FusedNorm
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import LARSSettings, lars_apex, lars_kernel
from fastsuncet.optim.device_lr import fill
from fastsuncet.optim.lars import lars_auto
from fastsuncet.optim.lars_apex import APEX
from fastsuncet.training.determinism import PRECISIONS
from pipelines.backend import dali_problem
from pipelines.cuda_compiler import KernelError
from pipelines.dali.view_operator import use as view_operator
from pipelines.data_errors import DataError

INT32 = 2**31 - 1
GRAPH, VIEW = "CUDA graph", "view.cu"
# Views of a rank up to which `meta.cuda_graph: auto` tries a graph. With more of them the GPU computes longer than the
# host takes to launch a step.
GRAPH_VIEWS = 256
STAYS_OFF = "the run was started without it; a new run can use it"
SLOWER = 1.03  # a kernel is slower than its twin beyond the noise of timing

Paths = dict[str, str | None]  # path -> why the run does not use it, None if it does


class Trial(NamedTuple):
    """What decides about a kernel on a device."""

    shapes: Any  # JSON: what the verdict depends on besides the machine and the program
    prove: self_test.Proof
    # Returns a call that does what the kernels are for, by them or by their twin, as they are switched; None: there is
    # no need to time it.
    work: Callable[[torch.device], Callable[[], None]] | None


class Verdict(NamedTuple):
    """What a trial found."""

    reason: str | None  # why the kernel is not used, None if it is
    milliseconds: tuple[float, float] | None = None  # with the kernel and without
    final: bool = True  # False: another try can end otherwise, as after a lack of memory


def trials(config: Config, arithmetic: Arithmetic) -> dict[str, Trial]:
    """Return the trial of every kernel that the config's step can use on a GPU, with the shapes of one rank's step.

    `config` has no precision "auto".
    """
    a, m = arithmetic, config.model
    found: dict[str, Trial] = {}
    if config.optimization.optimizer == "lars":
        sizes = [p.numel() for p in _model(config).parameters()]
        found["lars.cu"] = Trial(
            sizes, partial(lars_kernel.prove, sizes=sizes), partial(_lars_work, sizes=sizes)
        )
        # A graph reads the learning rate on the device, and apex takes it from the host.
        if lars_apex.extension() is not None and graph_problem(config, a):
            work = partial(_lars_work, sizes=sizes, without="lars.cu")
            found[APEX] = Trial(sizes, partial(lars_apex.prove, sizes=sizes), work)
    keys = [n for n in (a.views * a.global_unlabeled, a.global_labeled) if n >= 37]
    proof = partial(contrast_kernel.prove, twin=contrast.row_pass, keys=keys)
    found["contrast.cu"] = Trial(keys, proof, partial(_contrast_work, keys=keys))
    if uses_norm_kernels(config, a.world_size) and (shapes := norm_shapes(config, a)):
        dtype = PRECISIONS[config.meta.precision]
        proof = partial(norm_kernel.prove, shapes=shapes, dtypes=[dtype])
        modes = {"fused": m.fused_batchnorm is not False, "shared": m.sync_batchnorm and a.world_size > 1}
        work = partial(_norm_work, shapes=shapes, dtype=dtype, **modes)
        found["norm.cu"] = Trial([str(dtype), modes, shapes], proof, work)
    if config.data.view_operator is not False and config.data.backend != "torchvision" and not dali_problem():
        # Two launches in place of more than two hundred: its time is not asked for.
        found[VIEW] = Trial(view_operator.state(), _prove_view, None)
    return found


def try_kernel(source: str, trial: Trial, device: torch.device) -> Verdict:
    """Prove a kernel on `device` and time it against its twin.

    Takes seconds, and for BatchNorm about seven times the memory of the largest activations. An illegal access ends
    the process. Waits for the device.
    """
    try:
        reason, final = self_test.why_not(source, device, trial.prove), True
        times = None if reason or trial.work is None else self_test.milliseconds(source, device, trial.work)
    except torch.OutOfMemoryError:
        reason, times, final = f"the device has too little memory for the trial of {source}", None, False
    finally:
        torch.cuda.empty_cache()
    if times and times[0] > SLOWER * times[1]:
        reason = f"slower than PyTorch's operators: {times[0]:.3g} ms against {times[1]:.3g} ms"
    return Verdict(reason, times, final)


def agree(place: Place, own: Paths) -> Paths:
    """Return the verdicts of all ranks as one, and obey it: a kernel that one rank cannot use is used by none."""
    joined: Paths = {}
    for rank, verdicts in enumerate(gather_json(own)):
        for source, reason in verdicts.items():
            on = f"rank {rank}: " if place.world_size > 1 else ""
            joined[source] = joined.get(source) or (reason and f"{on}{reason}")
    if APEX in joined and joined.get("lars.cu", "") is None:
        joined[APEX] = "lars.cu makes fewer passes over memory"
    for source, reason in joined.items():
        self_test.switch(source, place.device, reason)
    if joined.get(VIEW, "") is None:
        view_operator.proved.add(place.device.index)
    return joined


def obey(paths: Paths, before: Mapping[str, bool], device: torch.device) -> tuple[Paths, list[str]]:
    """Return the paths of a continued run, and those it used before and cannot use here.

    A path that it did not use stays off, so that its bits do not change.
    """
    paths = dict(paths)
    for source, used in before.items():
        if not used and source != GRAPH:
            paths[source] = STAYS_OFF
            self_test.switch(source, device, STAYS_OFF)
    return paths, [path for path, used in before.items() if used and paths.get(path)]


def resolved(config: Config, paths: Paths) -> Config:
    """Return the config with the values that its "auto" keys have in a run that uses `paths`."""

    def used(path: str) -> bool:
        return path in paths and paths[path] is None

    values: dict[str, Any] = {}
    if config.model.fused_batchnorm == "auto":
        values["model.fused_batchnorm"] = _can_fuse(config) and used("norm.cu")
    if config.meta.cuda_graph == "auto":
        values["meta.cuda_graph"] = used(GRAPH)
    if used(VIEW):
        values["data.view_operator"] = True
    return config.resolved(values)


def describe(config: Config, paths: Paths) -> str:
    """Return which paths a run uses, and for each other one why not and what to do. `config` is `resolved`."""
    if not paths:
        without = "; model.fused_batchnorm has no effect here" if config.model.fused_batchnorm is True else ""
        return f"PyTorch's operators, as on any CPU{without}"
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


def graph_problem(config: Config, arithmetic: Arithmetic) -> str | None:
    """Return why a run on a GPU tries no CUDA graph, None if it does."""
    if config.meta.cuda_graph is False:
        return "meta.cuda_graph is false"
    if config.meta.cuda_graph is True:
        return None
    if config.criterion.micro_batch is not None:
        return "it has not been tried with criterion.micro_batch"
    own = arithmetic.update_samples(arithmetic.supervised_steps > 0) // arithmetic.world_size
    if own > GRAPH_VIEWS:
        return f"{own:,} views a process keep the GPU busy; `fastsuncet tune` tries it"
    return None


def _can_fuse(config: Config) -> bool:
    return config.meta.channels_last and not config.meta.compile and not config.model.name.startswith("timm/")


def uses_norm_kernels(config: Config, world_size: int) -> bool:
    """Return whether a BatchNorm of the step can be computed by norm.cu: fused, or its statistics over ranks."""
    m, meta = config.model, config.meta
    shared = m.sync_batchnorm and world_size > 1
    rows = meta.channels_last or m.head_batchnorm  # the head's activations are rows in any memory format
    fused = m.fused_batchnorm is not False and _can_fuse(config)
    return rows and not meta.compile and (fused or shared)


def norm_shapes(config: Config, arithmetic: Arithmetic) -> list[tuple[int, ...]]:
    """Return the shapes of the activations that BatchNorm sees on one rank, with labeled images and without."""
    a, model = arithmetic, _model(config)
    sizes = [view.size for view in views(config)] or [config.data.augmentation.size]
    batches: set[tuple[int, int]] = set()
    for supervised in {False, a.supervised_steps > 0}:
        for unlabeled, labeled in a.pieces(supervised):
            batches |= {
                (a.large_views * unlabeled + labeled, sizes[0]),
                (a.small_views * unlabeled, sizes[-1]),
            }
    found: set[tuple[int, ...]] = set()

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        found.add(tuple(inputs[0].shape))

    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.register_forward_pre_hook(keep)
    for count, size in batches:
        if count:
            model(torch.empty(count, 3, size, size, device="meta"))
    return sorted(found)


def check_int32(config: Config, arithmetic: Arithmetic, device: torch.device, paths: Paths) -> None:
    """Raise ConfigError for activations that torch's channels-last BatchNorm cannot index on a GPU.

    `config` is `resolved` with these paths.
    """
    fused = config.model.fused_batchnorm is True and paths.get("norm.cu", "not proven") is None
    if device.type != "cuda" or not config.meta.channels_last or fused:
        return
    largest = max(norm_shapes(config, arithmetic), key=math.prod, default=(0,))
    count = math.prod(largest)
    if count > INT32:
        most = INT32 // (count // largest[0])
        raise ConfigError(
            f"criterion.unsupervised_batch_size: each process has {largest[0]:,} views at a time, and BatchNorm sees "
            f"{tuple(largest)} activations. torch's channels-last BatchNorm counts them in 32 bits, so a process can "
            f"have {most:,} views at most. Use more GPUs, a smaller batch or criterion.micro_batch, or set "
            "meta.channels_last=false."
        )


# ------------------------------------------------------------------------------------------------- what is tried
def _lars_work(device: torch.device, sizes: list[int], without: str = "") -> Callable[[], None]:
    params, grads, buffers = ([torch.zeros(n, device=device) for n in sizes] for _ in range(3))
    lr, settings = torch.zeros((), device=device), LARSSettings()
    fill(lr, 0.0)
    if without:
        self_test.switch(without, device, "another implementation is timed")
    return lambda: lars_auto(params, grads, buffers, lr, settings)


def _contrast_work(device: torch.device, keys: list[int]) -> Callable[[], None]:
    given = [(torch.arange(n, device=device) // 2, torch.zeros(256, n, device=device)) for n in keys]

    def work() -> None:
        for ids, logits in given:
            kernel = contrast_kernel.runs_on(logits, contrast.row_pass)
            make = contrast_kernel.row_pass if kernel else contrast.row_pass
            make(ids, False)(logits, 0, logits.new_ones(len(logits)))

    return work


def _norm_work(
    device: torch.device, shapes: list[tuple[int, ...]], dtype: torch.dtype, *, fused: bool, shared: bool
) -> Callable[[], None]:
    norms = [FusedNorm(shape[1]).to(device) for shape in shapes]

    def work() -> None:
        for norm, (count, channels, *size) in zip(norms, shapes):
            norm.relu, norm.shared, norm.kernel = True, shared, fused
            x = (
                torch.zeros(count, *size, channels, device=device, dtype=dtype)
                .movedim(-1, 1)
                .requires_grad_()
            )
            # In this process there is one rank, and a run of several has other operators.
            over_ranks = shared and not (fused and norm.kernels_take(x))
            y = F.relu(norm.over_ranks(x)) if over_ranks else norm(x)
            y.backward(torch.zeros_like(y))

    return work


def _prove_view(device: torch.device) -> None:
    try:
        view_operator.load(view_operator.built())
        view_operator.prove_on_gpu()
    except (DataError, RuntimeError) as error:
        raise KernelError(str(error)) from error


def _model(config: Config) -> nn.Module:
    """Return the config's network without weights."""
    m = config.model
    return build_model(m.name, m.library, m.stem, *m.head, device="meta")
