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

KILLS = 10
LONG = ("optimization.steps=150", "criterion.unsupervised_batch_size=96", "checkpoint.every=4")


def _train(folder: str) -> None:
    train(small_config(Path(folder), *LONG))


def newest(latest: Path) -> int:
    return int(latest.read_text().strip()[len("step_") :]) if latest.exists() else 0


@pytest.mark.slow
def test_a_run_killed_ten_times_at_random_ends_with_the_weights_of_the_undisturbed_one(tmp_path):
    # A server that has torch and DALI imported forks each life: a kill then falls into the run and not into imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    process = context.Process(target=_train, args=(str(straight),))
    process.start()
    process.join()
    assert process.exitcode == 0
    dice, kills, steps = random.Random(0), 0, []
    latest = small_config(killed, *LONG).run_folder / "checkpoints" / "latest"
    while True:
        process = context.Process(target=_train, args=(str(killed),))
        process.start()
        if kills < KILLS:
            # Every third kill falls into the start (restoring, or not yet); the others after some step of new ground.
            before, began = newest(latest), time.monotonic()
            while process.is_alive() and kills % 3 and newest(latest) == before:
                time.sleep(0.01)
            process.join(dice.uniform(0, 0.4 if kills % 3 else 2))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                print(f"killed after {time.monotonic() - began:.1f} s, newest checkpoint {newest(latest)}")
        process.join()
        steps.append(newest(latest))
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL, "a life ended by itself, and not well"
    assert kills == KILLS, f"the run was over after {kills} kills: make it longer"
    assert steps == sorted(steps), "a checkpoint was lost"
    assert len(set(steps)) > 3, "the kills all fell before a first checkpoint: nothing was continued"
    ours, theirs = (final_state(small_config(folder, *LONG)) for folder in (killed, straight))
    assert_equal_to_the_bit(ours, theirs)
