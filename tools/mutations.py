"""Break a copy of the code in the places of tools/mutations.yaml, one at a time, and name the test that notices each.

    python tools/mutations.py            # all of them, two at a time
    python tools/mutations.py losses     # those with a file or a harm that has this word in it

Exit code 1 if a fault was not noticed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("fastsuncet", "pipelines", "tests", "configs", "tools", "docs", "pyproject.toml")


class Mutation(NamedTuple):
    """A fault: `before` occurs once in `file` and becomes `after`. `harm` is what a user would suffer, `test` fails."""

    file: str
    before: str
    after: str
    harm: str
    test: str


MUTATIONS = [
    Mutation(**entry) for entry in yaml.safe_load((ROOT / "tools/mutations.yaml").read_text("utf-8"))
]


MISSED, SKIPPED = "NOT NOTICED by", "not tried:"


def tried(copy: Path, mutation: Mutation) -> str:
    """Return the name of the test that fails with `mutation` in `copy`, or a line on why none does. Undoes it."""
    path = copy / mutation.file
    sound = path.read_text(encoding="utf-8")
    path.write_text(sound.replace(mutation.before, mutation.after), encoding="utf-8")
    options = ["-x", "-q", "-rfEs", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command = [sys.executable, "-m", "pytest", *options, *mutation.test.split()]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    path.write_text(sound, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.M)
    if failed and done.returncode == 1:
        return failed[1]
    skipped = re.search(r"^SKIPPED .*: (.*)", done.stdout, re.M)
    return f"{SKIPPED} {skipped[1]}" if skipped else f"{MISSED} {mutation.test}"


def try_all(mutations: list[Mutation], copy: Path) -> list[str]:
    """Copy the code, make one mutation after the other there, print each with what `tried` returns; return that."""
    for part in PARTS:
        whole = ROOT / part
        shutil.copytree(whole, copy / part) if whole.is_dir() else shutil.copy(whole, copy / part)
    found = []
    for mutation in mutations:
        start = time.monotonic()
        found.append(tried(copy, mutation))
        print(f"{time.monotonic() - start:4.0f} s  {mutation.harm}\n        {found[-1]}", flush=True)
    return found


def main() -> int:
    """Run the mutations that the command line names, or all."""
    parser = argparse.ArgumentParser(description="break the code and see the tests notice")
    parser.add_argument("words", nargs="*", metavar="WORD", help="in the file or the harm of a mutation")
    words = parser.parse_args().words
    chosen = [m for m in MUTATIONS if not words or any(word in m.file + m.harm for word in words)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        copies = [Path(folder, str(number)) for number in range(2)]
        found = [each for part in pool.map(try_all, (chosen[::2], chosen[1::2]), copies) for each in part]
    missed, skipped = (sum(each.startswith(word) for each in found) for word in (MISSED, SKIPPED))
    print(f"{len(found) - missed - skipped} of {len(found)} noticed, {skipped} not tried")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
