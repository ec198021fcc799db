"""What the tests of the view operator (`pipelines.dali.view_operator`) share."""

from pathlib import Path

from pipelines.dali.view_operator import build

MISSING = build.unavailable()


def tiny_compiler(folder: Path, body: str = 'echo code > "$out"') -> Path:
    """Write a compiler that runs `body`, where $out is the file to write."""
    path = folder / "cc"
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout=$2\n{body}\n')
    path.chmod(0o755)
    return path
