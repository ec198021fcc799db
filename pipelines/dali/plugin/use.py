"""Decide whether a loader uses the plug-in, and load it into DALI."""

from pathlib import Path

import torch

from pipelines.backend import require_gpu
from pipelines.dali.plugin.build import build, kept, library_name, unavailable
from pipelines.dali.plugin.gpu_code import kernels
from pipelines.data_errors import DataError
from pipelines.output import say_line, say_once

CHOICES = ("auto", "graph", "plugin")
COMMAND = "python -m pipelines.dali.plugin"


def choose(color_operator: str, device: str) -> bool:
    """Return whether the plug-in makes views on `device`, "cpu" or "gpu", and load it if so.

    "graph" never uses it. "auto" uses it on a CPU, where it is built at its first use if there is a compiler, and not
    on a GPU: a caller that has tried it there asks for "plugin". Raises DataError for "plugin" where it cannot be
    built, loaded, or proved on the GPU, ValueError for another word.
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


proved: set[int] = set()  # the GPUs on which it was compared, by this process or by another


def prove_on_gpu() -> None:
    """Compare the plug-in on this GPU with itself on the CPU, unless that was done. Raises DataError."""
    from pipelines.dali.plugin.check_equal import require_equal

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
