"""A file server on this machine: processes whose files open and read wrongly, or are cut short while they are read."""

import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("faulty_files.c")
COMPILER = shutil.which("cc")


def preloaded(scratch: Path, **settings: object) -> dict[str, str]:
    """Return the environment of a process in which faulty_files.c is the file server. `settings`: its variables."""
    library = scratch / "faulty_files.so"
    assert COMPILER is not None, "it needs a C compiler, cc"
    subprocess.run([COMPILER, "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), **{key: str(value) for key, value in settings.items()}}
