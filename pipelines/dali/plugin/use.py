"""Decide whether a loader uses the plug-in, and load it into DALI."""

import functools
from pathlib import Path

import torch

from pipelines import cuda_compiler
from pipelines.backend import require_gpu
from pipelines.dali.plugin.build import SOURCES, build, kept, unavailable
from pipelines.data_errors import DataError
from pipelines.output import say_line, say_once

CHOICES = ("auto", "graph", "plugin")
COMMAND = "python -m pipelines.dali.plugin"
# Whole numbers and sums are rounded where DALI's CPU operators round them, so no product may be contracted with a sum.
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false")
WIDEST_BLUR = 65  # pixels, on a GPU: kWidest of pixel.h on each side


def choose(color_operator: str, device: str) -> bool:
    """Return whether the plug-in makes views on `device`, "cpu" or "gpu", and load it if so.

    "graph" never uses it. "auto" uses it on a CPU, where it is built at its first use if there is a compiler, and not
    on a GPU, where it has not been timed. Raises DataError for "plugin" where it cannot be built, loaded, or proved on
    the GPU, ValueError for another word.
    """
    if color_operator not in CHOICES:
        raise ValueError(f"color_operator must be one of {', '.join(CHOICES)}, not {color_operator!r}")
    if color_operator == "graph" or (color_operator == "auto" and device == "gpu"):
        return False
    try:
        load(built())
        if device == "gpu":
            prove_on_gpu()
    except (DataError, RuntimeError) as error:
        if color_operator == "plugin":
            raise DataError(
                f"color_operator: plugin: {error}. Set auto or graph to use DALI's own operators."
            ) from error
        say_once(f"Falling back to DALI's own operators (same pixels, slower): {error}.")
        return False
    return True


def built(*, prebuilt: bool = False) -> Path:
    """Return the plug-in, built and compared with DALI's operators if it was not before. Raises DataError."""
    if (path := kept()) is not None:
        return path
    if unavailable() is None:
        say_line(f"Building the view operator, once for this machine and user ({COMMAND}) ...")

    def prove(library: Path) -> None:
        from pipelines.dali.plugin.check_equal import require_equal  # imports DALI, which can be absent

        load(library)
        require_equal()

    return build(prove, prebuilt=prebuilt)


@functools.cache
def prove_on_gpu() -> None:
    """Compare the plug-in on this GPU with DALI's operators on the CPU, once a process. Raises DataError."""
    from pipelines.dali.plugin.check_equal import require_equal

    require_gpu()
    kernels(0, torch.cuda.current_device())  # its message would be lost in a graph's
    require_equal("gpu")


def kernels(widest_blur: int, device_id: int) -> bytes:
    """Return view.cu as compiled for a GPU. Raises DataError, also for a blur that is too wide for it."""
    if widest_blur > WIDEST_BLUR:
        raise DataError(
            f"color_operator: plugin blurs up to {WIDEST_BLUR} pixels wide on a GPU, and the augmentation asks for "
            f"{widest_blur}: set data.color_operator to graph"
        )
    try:
        arch = cuda_compiler.architecture(*torch.cuda.get_device_capability(device_id))
        return cuda_compiler.compiled(SOURCES / "view.cu", arch, NVRTC_OPTIONS)
    except cuda_compiler.KernelError as error:
        raise DataError(f"the view operator cannot be compiled for this GPU: {error}") from error


_loaded: list[str] = []  # the library's name, a hash of what decides its code


def load(path: Path) -> None:
    """Load the library at `path` into DALI, once. Raises RuntimeError with DALI's message, or if another is loaded."""
    from nvidia.dali import plugin_manager

    if not _loaded:
        plugin_manager.load_library(str(path))
        _loaded.append(path.name)
    elif _loaded != [path.name]:  # DALI refuses a second operator of the same name
        raise RuntimeError(f"this process has already loaded {_loaded[0]}, so it cannot load {path.name}")
