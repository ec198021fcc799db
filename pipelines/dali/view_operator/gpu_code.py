"""Compile the view operator's kernels for a GPU."""

import torch

from pipelines import cuda_compiler
from pipelines.dali.view_operator.build import SOURCES
from pipelines.data_errors import DataError

# Whole numbers and sums are rounded where DALI's CPU operators round them, so no product may be contracted with a sum.
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false")
WIDEST_BLUR = 65  # pixels, on a GPU: kWidest of pixel.h on each side


def kernels(widest_blur: int, device_id: int) -> bytes:
    """Return view.cu as compiled for a GPU. Raises DataError, also for a blur that is too wide for it."""
    if widest_blur > WIDEST_BLUR:
        raise DataError(
            f"view_operator: true blurs up to {WIDEST_BLUR} pixels wide on a GPU, and the augmentation asks for "
            f"{widest_blur}: set data.view_operator to false"
        )
    try:
        arch = cuda_compiler.architecture(*torch.cuda.get_device_capability(device_id))
        return cuda_compiler.compiled(SOURCES / "view.cu", arch, NVRTC_OPTIONS)
    except cuda_compiler.KernelError as error:
        raise DataError(f"the view operator cannot be compiled for this GPU: {error}") from error
