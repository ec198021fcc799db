"""Write and read on a file server that is slow and wrong: for a line of faults of a writer, print a line of outcomes.

    LD_PRELOAD=faulty_files.so python -m tests.support.faulty_server FOLDER

It needs a process of its own: tests/support/faulty_files.c is preloaded. Lines are lists in JSON. A fault is the name
of a writer and the variables of faulty_files.c.
"""

import ctypes
import json
import os
import shutil
import sys
from pathlib import Path

from tests.support.writers import REFUSALS, WRITERS, images

server = ctypes.CDLL(None)


def use(folder: Path, fault: dict[str, str]) -> None:
    """Have the file server of `folder` fail as `fault` says."""
    for name in [name for name in os.environ if name.startswith(("FAULT_", "SHORT_"))]:
        del os.environ[name]
    os.environ.update(fault, FAULT_FOLDER=str(folder))
    server.faulty_files_settings()


def outcome(folder: Path, name: str, fault: dict[str, str]) -> dict:
    """Write 2 after 1 and read it, all on the faulty server; then look at what is there, on a sound one."""
    writer = WRITERS[name]
    use(folder, fault)
    try:
        writer.write(folder, 2)
        refused = None
    except REFUSALS as error:
        refused = str(error)
    use(folder, {})
    found = writer.read(folder)
    use(folder, fault)
    try:
        read = writer.read(folder)
    except REFUSALS as error:
        read = str(error)
    use(folder, {})
    writer.write(folder, 3)
    return {"refused": refused, "newest": found, "read": read, "after": writer.read(folder)}


if __name__ == "__main__":
    images()
    place = Path(sys.argv[1], "files")
    for line in sys.stdin:
        faults = json.loads(line)
        before = place.with_name(f"before {faults[0]['writer']}")
        before.mkdir()
        WRITERS[faults[0]["writer"]].write(before, 1)
        outcomes = []
        for fault in faults:
            shutil.copytree(before, place)
            outcomes.append(outcome(place, fault.pop("writer"), fault))
            shutil.rmtree(place)
        print(json.dumps(outcomes), flush=True)
