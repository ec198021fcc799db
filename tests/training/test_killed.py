"""kill -9 at any moment, again and again: the run that the same command brings to its end is the undisturbed one."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.ranks import PRELOADED
from tests.support.runs import assert_equal_to_the_bit, final_state, small_config, train

pytestmark = pytest.mark.slow

KILLS = 6
LONG = ("optimization.steps=90", "criterion.unsupervised_batch_size=96", "checkpoint.every=4")


def train_in(folder: str) -> None:
    train(small_config(Path(folder), *LONG))


def newest(latest: Path) -> int:
    return int(latest.read_text().strip()[len("step_") :]) if latest.exists() else 0


@pytest.mark.slow
def test_run_killed_six_times_at_random_ends_bit_identical(tmp_path):
    # A server that has torch and DALI imported forks each process: a kill then falls into the run, not into imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    # At the same time as the runs that are killed.
    undisturbed = context.Process(target=train_in, args=(str(straight),))
    undisturbed.start()
    draws, kills, steps = random.Random(0), 0, []
    latest = small_config(killed, *LONG).run_folder / "checkpoints" / "latest"
    while True:
        process = context.Process(target=train_in, args=(str(killed),))
        process.start()
        if kills < KILLS:
            # Every third kill falls into the start (restoring, or before it), the others after some new step.
            before, began = newest(latest), time.monotonic()
            while process.is_alive() and kills % 3 and newest(latest) == before:
                time.sleep(0.01)
            process.join(draws.uniform(0, 0.4 if kills % 3 else 2))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                print(f"killed after {time.monotonic() - began:.1f} s, newest checkpoint {newest(latest)}")
        process.join()
        steps.append(newest(latest))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, (
            "the run ended on its own before it was killed, with an error"
        )
    undisturbed.join()
    assert undisturbed.exitcode == 0
    assert kills == KILLS, f"the run was over after {kills} kills: make it longer"
    assert steps == sorted(steps), "a checkpoint was lost"
    assert len(set(steps)) > 3, "the kills all fell before a first checkpoint: nothing was continued"
    ours, theirs = (final_state(small_config(folder, *LONG)) for folder in (killed, straight))
    assert_equal_to_the_bit(ours, theirs)
