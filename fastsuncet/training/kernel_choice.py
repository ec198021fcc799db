"""Which of the project's CUDA kernels a run uses: those that agree with their twins on its own shapes, on every rank.

A rank that steps by another kernel than the others rounds differently, and DDP never sends parameters again. So the
ranks agree when the step is built, a checkpoint keeps the choice, and a continued run obeys it.
"""

import math
from functools import partial

import torch
from torch import nn

from fastsuncet.config import Arithmetic, Config
from fastsuncet.data.paired_stream import views
from fastsuncet.distributed.collectives import gather_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import self_test
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import norm_kernel
from fastsuncet.models.resnet import build_model
from fastsuncet.optim import lars_kernel
from fastsuncet.training.determinism import PRECISIONS

INT32 = 2**31 - 1


def prove(config: Config, arithmetic: Arithmetic, device: torch.device) -> dict[str, str | None]:
    """Prove every kernel that the config's step can use on `device`, on the shapes of one rank's step.

    Returns {source: None, or why it cannot be used}; {} on a CPU. `config` has no precision "auto". Takes seconds and
    about seven times the memory of the largest activations. An illegal access ends the process: what must survive that
    calls it in a child process. Waits for the device.
    """
    if device.type != "cuda":
        return {}
    keys = [arithmetic.views * arithmetic.global_unlabeled, arithmetic.global_labeled]
    proofs: dict[str, self_test.Proof] = {
        "lars.cu": partial(lars_kernel.prove, sizes=[p.numel() for p in _model(config).parameters()]),
        "contrast.cu": partial(
            contrast_kernel.prove, twin=contrast.row_pass, keys=[n for n in keys if n >= 37]
        ),
    }
    if uses_norm_kernels(config, arithmetic.world_size):
        dtype = PRECISIONS[config.meta.precision]
        shapes = norm_shapes(config, arithmetic)
        proofs["norm.cu"] = partial(norm_kernel.prove, shapes=shapes, dtypes=[dtype])
    verdicts = {source: self_test.why_not(source, device, proof) for source, proof in proofs.items()}
    torch.cuda.empty_cache()
    return verdicts


def agree(place: Place, own: dict[str, str | None]) -> dict[str, str | None]:
    """Return the verdicts of all ranks as one, and obey it: a kernel that one rank cannot use is used by none."""
    joined: dict[str, str | None] = {}
    for rank, verdicts in enumerate(gather_json(own)):
        for source, reason in verdicts.items():
            on = f"rank {rank}: " if place.world_size > 1 else ""
            joined[source] = joined.get(source) or (reason and f"{on}{reason}")
    for source, reason in joined.items():
        self_test.settle(source, place.device, reason)
    return joined


def obey(
    verdicts: dict[str, str | None], used_before: dict[str, bool], device: torch.device
) -> tuple[dict[str, str | None], list[str]]:
    """Return the verdicts of a continued run, and the kernels it used before and cannot use here.

    A kernel that it did not use stays off, so that its bits do not change.
    """
    verdicts, lost = dict(verdicts), []
    for source, before in used_before.items():
        if source in verdicts and not before and verdicts[source] is None:
            verdicts[source] = "the run was started without it"
            self_test.settle(source, device, verdicts[source])
        elif before and verdicts.get(source):
            lost.append(source)
    return verdicts, lost


def describe(config: Config, verdicts: dict[str, str | None]) -> str:
    """Return which kernels a run uses and why not others, for its summary."""
    if not verdicts:
        without = "; model.fused_batchnorm has no effect here" if config.model.fused_batchnorm else ""
        return f"PyTorch's operators, as on any CPU{without}"
    used = ", ".join(source for source, reason in verdicts.items() if reason is None) or "PyTorch's operators"
    notes = [f"not {source}: {reason}" for source, reason in verdicts.items() if reason]
    meta = config.meta
    if meta.compile and meta.deterministic and not meta.autotune:
        notes.append("Inductor does not time its reductions (meta.autotune)")
    return "; ".join([used, *notes])


def uses_norm_kernels(config: Config, world_size: int) -> bool:
    """Return whether a BatchNorm of the step can be computed by norm.cu: fused, or its statistics over ranks."""
    m, meta = config.model, config.meta
    shared = m.sync_batchnorm and world_size > 1
    rows = meta.channels_last or m.head_batchnorm  # the head's activations are rows in any memory format
    return rows and not meta.compile and (m.fused_batchnorm or shared)


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


def check_int32(
    config: Config, arithmetic: Arithmetic, device: torch.device, verdicts: dict[str, str | None]
) -> None:
    """Raise ConfigError for activations that torch's channels-last BatchNorm cannot index on a GPU."""
    fused = config.model.fused_batchnorm and verdicts.get("norm.cu", "not proven") is None
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


def _model(config: Config) -> nn.Module:
    """Return the config's network without weights."""
    m = config.model
    return build_model(m.name, m.library, m.stem, m.hidden, m.output, m.head_batchnorm, device="meta")
