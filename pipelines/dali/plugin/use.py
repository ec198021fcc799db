"""Decide whether a loader uses the plug-in, and load it into DALI."""

from pathlib import Path

from pipelines.dali.plugin.build import kept, unavailable
from pipelines.data_errors import DataError
from pipelines.output import say_line

CHOICES = ("auto", "graph", "plugin")
COMMANDS = {"cpu": "python -m pipelines.dali.plugin", "gpu": "python -m pipelines.dali.plugin --gpu"}


def choose(color_operator: str, device: str) -> bool:
    """Return whether the plug-in makes exact color on `device`, "cpu" or "gpu", and load it if so.

    "graph" never uses it. "auto" uses it on a CPU if it was built, and not on a GPU, where it has not been timed.
    Raises DataError for "plugin" where it was not built or cannot be loaded, ValueError for another word.
    """
    if color_operator not in CHOICES:
        raise ValueError(f"color_operator must be one of {', '.join(CHOICES)}, not {color_operator!r}")
    if color_operator == "graph" or (color_operator == "auto" and device == "gpu"):
        return False
    path = kept(device)
    if path is None:
        if color_operator == "auto":
            return False
        reason = unavailable(device)
        remedy = f"it cannot be built here: {reason}" if reason else f"build it with: {COMMANDS[device]}"
        raise DataError(
            f"color_operator: plugin needs the operator for this machine's {device.upper()}, which is not built; "
            f"{remedy}. Or set auto or graph to use DALI's own operators."
        )
    try:
        load(path, device)
    except RuntimeError as error:
        if color_operator == "plugin":
            raise DataError(f"the color operator {path} cannot be loaded: {error}") from error
        say_line(
            f"The color operator cannot be loaded ({error}). Falling back to DALI's own operators: same pixels, "
            f"slower. Delete {path} and run: {COMMANDS[device]}"
        )
        return False
    return True


_loaded: dict[str, str] = {}  # device -> the library's name, a hash of what decides its code


def load(path: Path, device: str = "cpu") -> None:
    """Load the library at `path` into DALI, once. Raises RuntimeError with DALI's message, or if another is loaded."""
    from nvidia.dali import plugin_manager

    if device not in _loaded:
        plugin_manager.load_library(str(path))
        _loaded[device] = path.name
    elif _loaded[device] != path.name:  # DALI refuses a second operator of the same name
        raise RuntimeError(
            f"this process has already loaded {_loaded[device]}, so it cannot load {path.name}"
        )
