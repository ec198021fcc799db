"""Precision, and the switches of torch that make a step a function of its inputs, down to the bit."""

import os

import torch
from torch.backends import cuda, cudnn
from torch.utils import deterministic

from fastsuncet.config import Config
from fastsuncet.distributed.collectives import gather_json
from fastsuncet.distributed.place import Place

# Inductor's switches for one untimed configuration of each reduction under deterministic algorithms, and for no timing
# at all. torch turns the second on together with deterministic algorithms.
UNTIMED = ("write_are_deterministic_algorithms_enabled", "deterministic")
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def set_determinism(config: Config, place: Place) -> None:
    """Make a step a function of its inputs, down to the bit, on one kind of machine (docs/design.md, fast paths).

    TF32 is off, which would compute "fp32" in 10 bits.
    """
    if config.meta.threads is not None:
        torch.set_num_threads(config.meta.threads)
    exact = config.meta.deterministic
    autotune = not exact if config.meta.autotune is None else config.meta.autotune
    cudnn.benchmark = autotune
    cudnn.deterministic = exact
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images lower it by an environment variable
    # Convolutions inherit from here what a program has set, whatever the older switch says.
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

            for name in UNTIMED:
                setattr(inductor, name, not autotune)


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

    On ranks of different hardware it is what all of it computes; a collective for "auto". A written precision stays,
    and the note says where the hardware only emulates it, which takes several times as long.
    """
    if config.meta.precision != "auto":
        native, why = native_precision(device)
        slow = config.meta.precision == "bf16" != native
        return config, f" (slow: {why}; meta.precision=auto takes {native})" if slow else ""
    found = gather_json(native_precision(device))
    precision, why = max(found, key=lambda choice: list(PRECISIONS).index(choice[0]))
    meta = config.meta.model_copy(update={"precision": precision})
    return config.model_copy(update={"meta": meta}), f" (auto: {why})"
