"""Whether a loader's graph uses the plug-in, and getting it into DALI."""

from pathlib import Path

from pipelines.dali.plugin.build import kept, unavailable
from pipelines.data_errors import DataError

CHOICES = ("auto", "graph", "plugin")
COMMANDS = {"cpu": "python -m pipelines.dali.plugin", "gpu": "python -m pipelines.dali.plugin --gpu"}


def choose(color_operator: str, device: str) -> bool:
    """Whether exact colour on `device` ("cpu" or "gpu") is the plug-in's, which is loaded then.

    "auto": on a CPU, where it was built; on a GPU never, until it has been timed on one. Raises DataError for "plugin"
    where it was not built or cannot be loaded, ValueError for another word.
    """
    if color_operator not in CHOICES:
        raise ValueError(f"color_operator is one of {', '.join(CHOICES)}, not {color_operator!r}")
    if color_operator == "graph" or (color_operator == "auto" and device == "gpu"):
        return False
    path = kept(device)
    if path is None:
        if color_operator == "auto":
            return False
        why = unavailable(device)
        remedy = f"it cannot be built here: {why}" if why else f"build it with: {COMMANDS[device]}"
        raise DataError(
            f"color_operator: plugin was asked for, and there is none for this machine's {device.upper()}: {remedy}. "
            "With auto or graph DALI's own operators do it."
        )
    try:
        load(path, device)
    except RuntimeError as error:
        if color_operator == "plugin":
            raise DataError(f"the color operator cannot be loaded: {error}") from error
        print(
            f"the color operator cannot be loaded ({error}): DALI's own give the same pixels, later. "
            f"Remove {path} and run: {COMMANDS[device]}",
            flush=True,
        )
        return False
    return True


_loaded: dict[str, str] = {}  # device -> the library's name, which everything that decides it is in


def load(path: Path, device: str = "cpu") -> None:
    """Gives DALI the operator of the library at `path`, unless it has it. Raises RuntimeError with DALI's words, or
    where this process has loaded another one.
    """
    from nvidia.dali import plugin_manager

    if device not in _loaded:
        plugin_manager.load_library(str(path))
        _loaded[device] = path.name
    elif _loaded[device] != path.name:  # DALI refuses a second operator of one name
        raise RuntimeError(f"this process has loaded {_loaded[device]} already, not {path.name}")
