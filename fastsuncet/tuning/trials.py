"""How a kernel is tried: proved against its plain twin and timed against it, on the shapes of a run's own step.

A child does it (child.py), because a kernel that was compiled and tested elsewhere meets a GPU, a driver and a version
of torch that were never tried together.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from fastsuncet.config import Arithmetic, Config
from fastsuncet.kernels import switches
from fastsuncet.losses import contrast, contrast_kernel
from fastsuncet.models import norm_kernel
from fastsuncet.models.flops import norm_shapes
from fastsuncet.models.resnet import build_model
from fastsuncet.models.sync_batchnorm import RankBatchNorm, normalize_over_ranks
from fastsuncet.optim import LARSSettings, lars_kernel
from fastsuncet.optim.device_lr import fill
from fastsuncet.optim.lars import lars_auto
from fastsuncet.training.cuda_graph import capture_on_device
from fastsuncet.training.determinism import PRECISIONS
from fastsuncet.tuning.verdicts import Verdict, if_not_slower
from pipelines.backend import lack_of_gpu_memory
from pipelines.cuda_compiler import KernelError
from pipelines.dali.view_operator import use as view_operator
from pipelines.data_errors import DataError

ROUNDS, REPEATED = 7, 3  # of a timing, and how often a round repeats the work


class Trial(NamedTuple):
    """What decides about a kernel on a device."""

    shapes: Any  # JSON: what the verdict depends on besides the machine and the program
    prove: switches.Proof
    # Returns a call that does what the kernels are for, by them or by their twin, as they are switched; None: there is
    # no need to time it.
    work: Callable[[torch.device], Callable[[], None]] | None


def try_kernel(name: str, trial: Trial, device: torch.device) -> Verdict:
    """Prove a kernel on `device` and time it against its twin, on the stream of a rank.

    Takes seconds, and for BatchNorm about seven times the memory of the largest activations. An illegal access ends
    the process. Waits for the device.
    """
    try:
        if (reason := switches.why_not(device, trial.prove)) or trial.work is None:
            return Verdict(reason)
        base, contender = times_of(name, device, trial.work)
        return if_not_slower(Verdict(base=base, contender=contender))
    except torch.OutOfMemoryError:
        return Verdict(f"the device has too little memory for the trial of {name}", final=False)
    finally:
        torch.cuda.empty_cache()


def times_of(
    source: str, device: torch.device, prepare: Callable[[torch.device], Callable[[], None]]
) -> tuple[list[float], list[float]]:
    """Return the seconds that the work of `prepare` takes without the kernels of `source` and with them, by round.

    The sides take turns, after a round that compiles and allocates. The time is the GPU's: a small step is launched as
    one graph, and in a large one the host launches while the GPU computes. Waits for the device. The kernels, which
    were proved before, are on afterwards.
    """
    work = prepare(device)
    calls, found = [], ([], [])
    sides = ("timed without them", None)
    for reason in sides:
        switches.switch(source, device, reason)
        work()
        calls.append(_captured(work, device))
    for _ in range(1 + ROUNDS):
        for reason, call, times in zip(sides, calls, found):
            switches.switch(source, device, reason)
            times.append(seconds(call, REPEATED, device))
    return found[0][1:], found[1][1:]


def _captured(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return `work` as a CUDA graph, or itself where torch cannot capture it."""
    try:
        return capture_on_device(work, device)[0].replay
    except RuntimeError as error:  # torch raises nothing narrower; the launches are then timed too
        if lack_of_gpu_memory(error) is not None:
            raise torch.OutOfMemoryError(str(error)) from error
        return work


def seconds(call: Callable[[], Any], times: int, device: torch.device) -> float:
    """Return how long one of so many calls takes. Waits for the device."""
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - began) / times


# ------------------------------------------------------------------------------- the trial of each kernel, of a config
def lars(config: Config, arithmetic: Arithmetic) -> Trial:
    """Try lars.cu on the sizes of all parameters."""
    m = config.model
    sizes = [p.numel() for p in build_model(m.name, m.stem, *m.head, device="meta").parameters()]

    def work(device: torch.device) -> Callable[[], None]:
        params, grads, buffers = ([torch.zeros(n, device=device) for n in sizes] for _ in range(3))
        lr, settings = torch.zeros((), device=device), LARSSettings()
        fill(lr, 0.0)
        return lambda: lars_auto(params, grads, buffers, lr, settings)

    return Trial(sizes, partial(lars_kernel.prove, sizes=sizes), work)


def apex(config: Config, arithmetic: Arithmetic) -> Trial:
    """Try apex's kernels in the place of lars.cu."""
    sizes, _, of_lars = lars(config, arithmetic)

    def work(device: torch.device) -> Callable[[], None]:
        switches.switch("lars.cu", device, "another implementation is timed")
        assert of_lars is not None
        return of_lars(device)

    return Trial(sizes, partial(lars_kernel.prove_apex, sizes=sizes), work)


def contrast_rows(config: Config, arithmetic: Arithmetic) -> Trial:
    """Try contrast.cu on rows with as many keys as each loss has."""
    a = arithmetic
    keys = [n for n in (a.views * a.global_unlabeled, a.global_labeled) if n >= 37]

    def work(device: torch.device) -> Callable[[], None]:
        # A batch can have fewer keys than a chunk has anchors.
        anchors = [min(contrast.ROWS_PER_CHUNK_ON_CUDA, n) for n in keys]
        given = [
            (torch.arange(n, device=device) // 2, torch.zeros(rows, n, device=device))
            for rows, n in zip(anchors, keys)
        ]

        def passes() -> None:
            for ids, logits in given:
                contrast.row_pass_for(logits)(ids, False)(logits, 0, logits.new_ones(len(logits)))

        return passes

    return Trial(keys, partial(contrast_kernel.prove, twin=contrast.row_pass, keys=keys), work)


def norm(config: Config, arithmetic: Arithmetic) -> Trial:
    """Try norm.cu on the activations of every BatchNorm, in the run's precision."""
    m, shapes, dtype = config.model, norm_shapes(config, arithmetic), PRECISIONS[config.meta.precision]
    fused, shared = m.fused_batchnorm is not False, m.sync_batchnorm and arithmetic.world_size > 1

    def work(device: torch.device) -> Callable[[], None]:
        norms = [RankBatchNorm(shape[1]).to(device) for shape in shapes]

        def layers() -> None:
            for module, (count, channels, *size) in zip(norms, shapes):
                module.relu, module.shared = fused, shared
                pixels = torch.zeros(count, *size, channels, device=device, dtype=dtype)
                x = pixels.movedim(-1, 1).requires_grad_()
                # In this process there is one rank, and a run of several has other operators.
                operators = shared and not module.kernels_take(x)
                y = normalize_over_ranks((module,), (x,))[0] if operators else module(x)
                y = y if fused and not operators else F.relu(y)
                y.backward(torch.zeros_like(y))

        return layers

    proof = partial(norm_kernel.prove, shapes=shapes, dtypes=[dtype])
    return Trial([str(dtype), {"fused": fused, "shared": shared}, shapes], proof, work)


def view(config: Config, arithmetic: Arithmetic) -> Trial:
    """Prove the view operator, of which two launches replace more than two hundred: its time is not asked for."""
    return Trial(view_operator.state(), _prove_view, None)


def _prove_view(device: torch.device) -> None:
    try:
        view_operator.load(view_operator.built())
        view_operator.prove_on_gpu()
    except (DataError, RuntimeError) as error:
        raise KernelError(str(error)) from error
