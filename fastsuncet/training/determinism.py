"""Precision, and the switches of torch that make a step a function of its inputs, down to the bit."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch.backends import cuda, cudnn
from torch.utils import deterministic

from fastsuncet.config import Config
from fastsuncet.distributed.collectives import gather_json
from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError

# Inductor's switches, which older torch has not, for one untimed configuration of each reduction under deterministic
# algorithms, and for no timing at all. torch turns the second on together with deterministic algorithms.
UNTIMED = ("write_are_deterministic_algorithms_enabled", "deterministic")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def set_determinism(config: Config, place: Place) -> None:
    """Make a step a function of its inputs, down to the bit, on one kind of machine.

    `meta.deterministic` keeps torch to kernels that give the same bits in every run; torch warns where it has none.
    `meta.autotune` is about choosing among them: cuDNN and Inductor time several, and a restart can choose another.
    TF32 is off, which would compute "fp32" in 10 bits.

    Raises ConfigError where this torch's Inductor cannot be kept from choosing by timing.
    """
    if config.meta.threads is not None:
        torch.set_num_threads(config.meta.threads)
    exact = config.meta.deterministic
    autotune = not exact if config.meta.autotune is None else config.meta.autotune
    cudnn.benchmark = autotune
    cudnn.deterministic = exact
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images lower it by an environment variable
    if hasattr(cudnn, "fp32_precision"):
        # Since torch 2.9 convolutions inherit from here what a program has set, whatever the older switch says.
        cudnn.fp32_precision = "ieee"
    cudnn.allow_tf32 = False
    if place.device.type == "cuda":
        # cuBLAS reads it when it starts, so it must be set before the first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(exact, warn_only=True)
        # By default that also fills every new tensor with NaN before it is written: a pass over each activation.
        setattr(deterministic, "fill_uninitialized_memory", False)  # noqa: B010 - the stubs do not know it
        # With warn_only the fused kernels of attention stay as they are: their backward pass adds in any order.
        for enable in (cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp, cuda.enable_cudnn_sdp):
            enable(not exact)
        if config.meta.compile:
            from torch._inductor import config as inductor  # slow to import, and only now needed

            found = [name for name in UNTIMED if hasattr(inductor, name)]
            for name in found:
                setattr(inductor, name, not autotune)
            if not found and not autotune:
                raise ConfigError(
                    f"meta.compile chooses kernels by timing with torch {torch.__version__}, so a restart can end in "
                    "other bits. Install a newer torch, or set meta.autotune=true"
                )


@contextmanager
def in_a_callers_process() -> Iterator[None]:
    """Compute as in a new process, whatever torch's defaults and modes are, and leave its switches as they were.

    The caller's own training would otherwise go on without TF32, in deterministic kernels and in other threads.
    """
    # Since torch 2.9 TF32 has a second switch. Where a program has used it, the first cannot be read.
    newer = (torch.backends, cudnn, getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None), cuda.matmul)
    owners = [
        *((owner, "fp32_precision") for owner in newer),
        *((cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")),
        (deterministic, "fill_uninitialized_memory"),
        *((sys.modules.get("torch._inductor.config"), name) for name in UNTIMED),
    ]
    with ExitStack() as undo:
        for owner, name in owners:
            with suppress(AttributeError, RuntimeError):
                undo.callback(setattr, owner, name, getattr(owner, name))
        with suppress(RuntimeError):  # restored before the newer switches
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        exact = torch.are_deterministic_algorithms_enabled()
        undo.callback(torch.use_deterministic_algorithms, exact, warn_only=warn_only)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(cuda.enable_flash_sdp, cuda.flash_sdp_enabled())
        undo.callback(cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled())
        undo.callback(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())
        torch.set_default_dtype(torch.float32)
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        # Neither is free: a default device costs each call of torch, and autocast inside another keeps no weights.
        if torch.get_default_device().type != "cpu":
            undo.enter_context(torch.device("cpu"))
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            undo.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


def native_precision(device: torch.device) -> tuple[str, str]:
    """Return the precision of `meta.precision: auto` on `device`, and the reason."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return "bf16", "this GPU computes bfloat16"
        return "fp16", f"this GPU, of compute capability {major}.{minor}, has no bfloat16"
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return "bf16", "this CPU computes bfloat16"
    return "fp32", "this CPU has neither AVX512_BF16 nor AMX"


def resolve_precision(config: Config, device: torch.device) -> tuple[Config, str]:
    """Return `config` with the precision that `meta.precision: auto` means here, and a note for the summary.

    A written precision stays; the note says where the hardware only emulates it, which takes several times as long.

    The same on all ranks: of different hardware, the precision that all of it computes. A collective for "auto". The
    run keeps it, as if it had been written: a checkpoint of another precision is refused by name.
    """
    if config.meta.precision != "auto":
        native, why = native_precision(device)
        slow = config.meta.precision == "bf16" != native
        return config, f" (slow: {why}; meta.precision=auto takes {native})" if slow else ""
    found = gather_json(native_precision(device))
    precision, why = max(found, key=lambda choice: list(PRECISIONS).index(choice[0]))
    meta = config.meta.model_copy(update={"precision": precision})
    return config.model_copy(update={"meta": meta}), f" (auto: {why})"
