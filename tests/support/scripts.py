"""Scripts with stand-ins for the programs that they call, and modules that must not be imported."""

import os
import subprocess
from pathlib import Path


def stand_in(folder: Path, name: str, body: str) -> None:
    """Write a program that appends its arguments to calls.txt, then runs `body`."""
    path = folder / name
    path.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/calls.txt"\n{body}\n')
    path.chmod(0o755)


def run_script(
    folder: Path, shell: str, script: Path, *words: str, cwd: Path | None = None, **variables: str
):
    """Run a script with the stand-ins of `folder` first in PATH."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = [shell, str(script), *words]
    return subprocess.run(command, cwd=cwd or folder, env=environment, capture_output=True, text=True)


def calls(folder: Path) -> list[str]:
    path = folder / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []


def shadow(folder: Path, *names: str) -> None:
    """Put packages and modules into `folder` that raise at import."""
    for name in names:
        path = folder / (name if name.endswith(".py") else f"{name}/__init__.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise RuntimeError('imported from the working directory')")
