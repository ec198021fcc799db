"""Settings of all tests."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Hypothesis without a clock: on a busy machine a slow example says nothing about the code. New examples are drawn in
# every run; `pytest --hypothesis-profile=thorough` draws many at once.
# A bare GPU machine may lack it. The tests that use it import it by themselves and say so; those for the GPU do not.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    timeless = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("quick", timeless, max_examples=20)
    settings.register_profile("thorough", timeless, max_examples=500)
    settings.load_profile("quick")


def pytest_configure():
    """Keep the tests' files in memory where there is room: a disk takes milliseconds for each of thousands of syncs."""
    memory = Path("/dev/shm")
    executes = memory.is_dir() and not os.statvfs(memory).f_flag & os.ST_NOEXEC
    if executes and shutil.disk_usage(memory).free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


def pytest_collection_finish():
    """Leave what is imported by now out of every garbage collection: 3 % of the suite's processor time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item):
    """Fork the server of ranks before the first test, and skip the tests that need a GPU where there is none."""
    if ranks := sys.modules.get("tests.support.ranks"):
        ranks.start_server()
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _signal_handlers():
    """Restore the handlers after a test: what was asked to stop ignores further signals from then on."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


@pytest.fixture
def group():
    """Make a process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def small_disk(tmp_path):
    """mount(options) gives a folder on a file system of its own; skips where mounting is not allowed."""
    folder, mounted = tmp_path / "disk", []

    def mount(options: str) -> Path:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if mounted:
            command = ["mount", "-o", f"remount,{options}", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("no mount command here")
        if done.returncode:
            pytest.skip(f"mounting a small disk is not allowed here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", "-l", str(folder)], check=True)
