"""The configs of the package: find one by its name, list them, and copy one to start from."""

import os
import re
from difflib import get_close_matches
from pathlib import Path

from fastsuncet.errors import ConfigError

# Folder of the configs that are installed with the package: in a checkout the link `fastsuncet/configs`.
SHIPPED = (Path(__file__).resolve().parents[1] / "configs").resolve()


def shipped() -> dict[str, Path]:
    """Return the files of the shipped configs by name: "in1k_10pct", "paper/in1k_simclr"."""
    return {str(path.relative_to(SHIPPED).with_suffix("")): path for path in sorted(SHIPPED.rglob("*.yaml"))}


def find_config(name: str, folder: str = "") -> str:
    """Return the path that `name` has below `folder` or, where no file is there, that of the shipped config `name`."""
    path = os.path.join(folder, os.path.expanduser(name))
    exists = os.path.exists(path) and not os.path.isdir(path)
    return path if exists else os.fspath(shipped().get(name, path))


def listing() -> list[str]:
    """Return a line for each shipped config: its name, and the first comment of its file."""
    first = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in shipped().items()}
    width = max(map(len, first))
    return [f"{name:<{width}}  {line.lstrip('# ')}" for name, line in first.items()]


def config_text(name: str) -> str:
    """Return the text of a shipped config with its bases by name, so that it can be saved in any folder.

    Raises ConfigError for an unknown name.
    """
    files = shipped()
    if name not in files:
        near = get_close_matches(name, files, 1)
        raise ConfigError(
            f"no config of the package is called {name}"
            + (f"; did you mean {near[0]}?" if near else "; `fastsuncet configs` lists them")
        )
    names = {os.fspath(path): name for name, path in files.items()}

    def by_name(match: re.Match[str]) -> str:
        return "base: " + names.get(os.path.normpath(files[name].parent / match[1]), match[1])

    return re.sub(r"\bbase: ([\w./-]+)", by_name, files[name].read_text(encoding="utf-8"))


def copy(name: str, file: Path) -> None:
    """Write `config_text` to a new file. Raises ConfigError where there is one already or its folder is missing."""
    text = config_text(name)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except (FileExistsError, FileNotFoundError) as error:
        raise ConfigError(f"{file}: {error.strerror}. Name another file: --copy FILE") from None
