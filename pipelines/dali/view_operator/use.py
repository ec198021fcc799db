"""Decide whether a loader uses the view operator, build it where it is not, and load it into DALI."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pipelines import atomic_files, code_cache
from pipelines.dali.view_operator import build
from pipelines.dali.view_operator.build import kept, kernels, library_name, unavailable
from pipelines.data_errors import DataError
from pipelines.output import say_line, say_once
from pipelines.sampling.augmentation import Augmentation, Center

COMMAND = "python -m pipelines.dali.view_operator"


def choose(
    view_operator: bool | Literal["auto"], device: str, augmentations: Sequence[Augmentation | Center]
) -> bool:
    """Return whether the view operator makes these views on `device`, "cpu" or "gpu", and load it if so.

    It makes random views only. "auto" uses it on a CPU, where it is built at its first use if there is a compiler, and
    not on a GPU: a caller that has tried it there asks for True. Raises DataError for True where it does not know a
    setting of the views, or cannot be built, loaded, or proved on the GPU.
    """
    random = [each for each in augmentations if isinstance(each, Augmentation)]
    if not view_operator or not random or (view_operator == "auto" and device == "gpu"):
        return False
    try:
        if reason := next(filter(None, map(build.unknown, random)), None):
            raise DataError(reason)
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
    """Return the view operator, compiled and compared with DALI's operators if it was not before.

    It is kept in this package if `prebuilt`, else in the cache folder. Raises DataError where it cannot be compiled
    (the text says what is missing, or what the compiler said), kept or loaded by DALI, or differs from DALI's.
    """
    if (path := kept(prebuilt=prebuilt)) is not None:
        return path
    if (reason := unavailable()) is not None:
        raise DataError(f"the view operator cannot be built here: {reason}")
    say_line(f"Building the view operator, once for this machine and user ({COMMAND}) ...")
    folder = build.PREBUILT if prebuilt else code_cache.cache_folder("view_operator")
    try:
        atomic_files.make_folder(folder, 0o700)
        # The ranks of a machine start together, and one build serves them all.
        with (
            atomic_files.exclusive(folder / ".lock", wait=True),
            tempfile.TemporaryDirectory(dir=folder, prefix=".tmp-") as work,
        ):
            if (path := kept(prebuilt=prebuilt)) is not None:  # by another process, meanwhile
                return path
            library = Path(work) / library_name()
            build.compile_library(library)
            prove(library)
            path = folder / library.name
            code_cache.write(path, library.read_bytes())
            if prebuilt:
                folder.chmod(0o755)
                path.chmod(0o644)
    except OSError as error:
        raise DataError(
            f"the view operator cannot be kept in {folder}: {error.strerror or error}; set FASTSUNCET_CACHE to "
            "a folder that can be written"
        ) from error
    return path


def prove(library: Path) -> None:
    """Load a new library and compare it with DALI's operators. Raises DataError."""
    # It imports DALI, which can be absent.
    from pipelines.dali.view_operator.check_equal import require_equal

    try:
        load(library)
        require_equal()
    except RuntimeError as error:  # from DALI
        raise DataError(f"the view operator compiles, but DALI cannot run it: {error}") from error


proved: set[int] = set()  # the GPUs on which it was compared, by this process or by another


def prove_on_gpu() -> None:
    """Compare the view operator on this GPU with itself on the CPU, unless that was done. Raises DataError."""
    import torch  # not above: a CPU's operator is built and compared without it

    from pipelines.dali.view_operator.check_equal import require_equal

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
        # As bytes: a home directory need not be UTF-8, and DALI refuses such a str.
        plugin_manager.load_library(os.fsencode(path))  # pyright: ignore[reportArgumentType]
        _loaded.append(path.name)
    elif _loaded != [path.name]:  # DALI ends the process at a second operator of the same name
        raise RuntimeError(f"this process has already loaded {_loaded[0]}, so it cannot load {path.name}")
