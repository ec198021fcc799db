"""The kernels under the thread sanitizer: no race as they are, and one for every barrier that is left out."""

import re
import shutil
import subprocess

import pytest

from tests.support.host_kernels import SOURCES, built

pytestmark = pytest.mark.slow

BARRIERS = [
    f"{path.name}:{number}"
    for path in sorted(SOURCES.glob("*.cu*"))
    for number, line in enumerate(path.read_text().splitlines(), start=1)
    if re.search(r"\b__syncthreads\(\)", line.split("//")[0])
]
CLASH = "FATAL: ThreadSanitizer: unexpected memory mapping"


def run(*words):
    """Run all kernels once; the sanitizer exits with 66 if it saw a race."""
    command = [str(built("races.cpp", "-O1", "-g", "-fsanitize=thread")), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    # Random addresses can collide with the sanitizer's own.
    if CLASH in done.stderr and shutil.which("setarch"):
        done = subprocess.run(["setarch", "-R", *command], capture_output=True, text=True, timeout=100)
    if CLASH in done.stderr:
        pytest.skip(f"the thread sanitizer does not run here: {done.stderr.splitlines()[0]}")
    return done


@pytest.mark.parametrize("left_out", [(), ("device.cuh:1",)])  # no line, and one that is no barrier
def test_kernels_have_no_race(left_out):
    done = run(*left_out)
    assert BARRIERS and done.returncode == 0, done.stderr[:3000]


@pytest.mark.parametrize("barrier", BARRIERS)
def test_kernels_need_every_barrier(barrier):
    # On a busy machine the threads can take turns by chance, and there is no race to see.
    done = next((done for done in (run(barrier) for _ in range(5)) if done.returncode), None)
    assert done is not None and done.returncode == 66, barrier
    assert "WARNING: ThreadSanitizer: data race" in done.stderr, barrier
