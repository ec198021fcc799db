"""Whether a loader's graph uses the plug-in, and getting it into DALI."""

from pathlib import Path

from pipelines.errors import DataError
from pipelines.plugin.build import kept, unavailable

CHOICES = ("auto", "graph", "plugin")
COMMAND = "python -m pipelines.plugin"


def choose(color_operator: str, device: str) -> bool:
    """Whether exact colour on `device` ("cpu" or "gpu") is the plug-in's, which is loaded then.

    "auto": where it was built. Raises DataError for "plugin" where it was not, or cannot be loaded, or on a GPU, for
    which there is none; ValueError for another word.
    """
    if color_operator not in CHOICES:
        raise ValueError(f"color_operator is one of {', '.join(CHOICES)}, not {color_operator!r}")
    if color_operator == "graph" or (color_operator == "auto" and device == "gpu"):
        return False
    if device == "gpu":
        raise DataError(
            "color_operator: plugin is for a CPU, and pixels are made on a GPU here: choose auto or graph"
        )
    path = kept()
    if path is None:
        if color_operator == "auto":
            return False
        why = unavailable()
        remedy = f"it cannot be built here: {why}" if why else f"build it with: {COMMAND}"
        raise DataError(
            f"color_operator: plugin was asked for, and there is none for this machine: {remedy}. "
            "With auto or graph DALI's own operators give the same pixels, later."
        )
    try:
        load(path)
    except RuntimeError as error:
        if color_operator == "plugin":
            raise DataError(f"the color operator cannot be loaded: {error}") from error
        print(
            f"the color operator cannot be loaded ({error}): DALI's own give the same pixels, later. "
            f"Remove {path} and run: {COMMAND}",
            flush=True,
        )
        return False
    return True


_loaded: list[Path] = []


def load(path: Path) -> None:
    """Gives DALI the operator of the library at `path`, unless it has one. Raises RuntimeError with DALI's words."""
    from nvidia.dali import plugin_manager

    if not _loaded:  # DALI refuses a second operator of one name
        plugin_manager.load_library(str(path))
        _loaded.append(path)
