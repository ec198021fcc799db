"""Decide whether a loader uses the view operator, and load it into DALI."""

from pathlib import Path
from typing import Literal

import torch

from pipelines.backend import require_gpu
from pipelines.dali.view_operator.build import build, kept, kernels, library_name, unavailable
from pipelines.data_errors import DataError
from pipelines.output import say_line, say_once

COMMAND = "python -m pipelines.dali.view_operator"


def choose(view_operator: bool | Literal["auto"], device: str) -> bool:
    """Return whether the view operator makes views on `device`, "cpu" or "gpu", and load it if so.

    "auto" uses it on a CPU, where it is built at its first use if there is a compiler, and not on a GPU: a caller that
    has tried it there asks for True. Raises DataError for True where it cannot be built, loaded, or proved on the GPU.
    """
    if not view_operator or (view_operator == "auto" and device == "gpu"):
        return False
    try:
        load(built())
        if device == "gpu":
            prove_on_gpu()
    except (DataError, RuntimeError) as error:
        if view_operator is True:
            raise DataError(
                f"view_operator: true: {error}. Set auto or false to use DALI's own operators."
            ) from error
        say_once(f"Falling back to DALI's own operators (same pixels, slower): {error}.")
        return False
    return True


def built(*, prebuilt: bool = False) -> Path:
    """Return the view operator, built and compared with DALI's operators if it was not before. Raises DataError."""
    if (path := kept()) is not None:
        return path
    if unavailable() is None:
        say_line(f"Building the view operator, once for this machine and user ({COMMAND}) ...")

    def prove(library: Path) -> None:
        # It imports DALI, which can be absent.
        from pipelines.dali.view_operator.check_equal import require_equal

        load(library)
        require_equal()

    return build(prove, prebuilt=prebuilt)


proved: set[int] = set()  # the GPUs on which it was compared, by this process or by another


def prove_on_gpu() -> None:
    """Compare the view operator on this GPU with itself on the CPU, unless that was done. Raises DataError."""
    from pipelines.dali.view_operator.check_equal import require_equal

    require_gpu()
    device = torch.cuda.current_device()
    if device not in proved:
        kernels(0, device)  # its message would be lost in a graph's
        require_equal("gpu")
        proved.add(device)


def state() -> list[str | None]:
    """Return what decides whether it can be used: the name of its library, and why that cannot be built."""
    return [library_name(), None if kept() else unavailable()]


_loaded: list[str] = []  # the library's name, a hash of what decides its code


def load(path: Path) -> None:
    """Load the library at `path` into DALI, once. Raises RuntimeError with DALI's message, or if another is loaded."""
    from nvidia.dali import plugin_manager

    if not _loaded:
        plugin_manager.load_library(str(path))
        _loaded.append(path.name)
    elif _loaded != [path.name]:  # DALI refuses a second operator of the same name
        raise RuntimeError(f"this process has already loaded {_loaded[0]}, so it cannot load {path.name}")
