"""Save and load checkpoints on a file server that is slow and wrong; print a line of JSON for each fault.

    LD_PRELOAD=slow_files.so python -m tests.support.faulty_server FOLDER FAULT...

It needs a process of its own: tools/bench/slow_files.c is preloaded. A fault is JSON, the variables of slow_files.c.
"""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

from fastsuncet.checkpoint import manager
from fastsuncet.errors import CheckpointError
from tests.support.checkpoints import assert_whole, save

server = ctypes.CDLL(None)


def use(folder: Path, fault: dict[str, str]) -> None:
    """Have the file server of `folder` fail as `fault` says."""
    for name in [name for name in os.environ if name.startswith(("FAULT_", "SHORT_"))]:
        del os.environ[name]
    os.environ.update(fault, SLOW_FOLDER=str(folder))
    server.slow_files_settings()


def newest(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, which must be whole."""
    loaded = manager.load_newest(folder, say=lambda line: None)
    if loaded is not None:
        assert_whole(loaded)
    return loaded and loaded.step


def outcome(folder: Path, fault: dict[str, str]) -> dict:
    """Save step 2 after step 1 and load it, all on the faulty server; then look at what is there, on a sound one."""
    save(folder, 1)
    use(folder, fault)
    try:
        save(folder, 2)
        saved = None
    except CheckpointError as error:
        saved = str(error)
    use(folder, {})
    found = newest(folder)
    use(folder, fault)
    try:
        read = newest(folder)
    except CheckpointError as error:
        read = str(error)
    use(folder, {})
    save(folder, 3)
    return {"save": saved, "newest": found, "read": read, "after": newest(folder)}


if __name__ == "__main__":
    for number, text in enumerate(sys.argv[2:]):
        place = Path(sys.argv[1], str(number))
        place.mkdir()
        print(json.dumps(outcome(place, json.loads(text))), flush=True)
        shutil.rmtree(place)
