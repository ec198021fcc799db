"""The paths that people write, and that of this program, to start it in another process."""

import os
import sys
from pathlib import Path


def typed_path(text: str | os.PathLike[str] | None) -> Path:
    """Return a path that a person wrote, with ~ expanded; None: the empty path.

    The `~name` of no account stays as it is, as in a shell, and is then found missing: pathlib raises RuntimeError.
    """
    return Path(os.path.expanduser(text or ""))


def steps_in(run: Path) -> dict[int, Path]:
    """Return step -> folder of the checkpoints in a run's folder, ascending, by their names; none is opened.

    A user's copy, step_00000003.old, is none.
    """
    found = ((path.name.removeprefix("step_"), path) for path in (run / "checkpoints").glob("step_*"))
    return dict(sorted((int(name), path) for name, path in found if name.isdecimal()))


def cli_command() -> list[str]:
    """Return the words that start `fastsuncet` in another process; append the arguments.

    The process imports the same copy of `fastsuncet` and `pipelines` as this one, installed or not, and nothing from
    the working directory; see `fastsuncet/__main__.py`.
    """
    return [sys.executable, str(Path(__file__).resolve().with_name("__main__.py"))]
