"""A file server on this machine: processes whose files open, read and write wrongly."""

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faulty_files.c")
COMPILER = shutil.which("cc")


def preloaded(scratch: Path) -> dict[str, str]:
    """Return the environment of a process in which faulty_files.c is the file server."""
    library = scratch / "faulty_files.so"
    assert COMPILER is not None, "it needs a C compiler, cc"
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library)}
