"""kill -9 at any moment, again and again: the run that the same command brings to its end is the undisturbed one."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import PRELOADED
from tests.support.runs import assert_equal_to_the_bit, final_state, small_config, train

pytestmark = pytest.mark.slow

KILLS = 6
LONG = ("optimization.steps=90", "criterion.unsupervised_batch_size=96", "checkpoint.every=4")


def train_in(folder: str, rank: int, ranks: int, port: int) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    # The test's process holds the store, as torchrun's agent does.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    train(small_config(Path(folder), *LONG))


def start(folder: Path, ranks: int) -> tuple[dist.Store, list[multiprocessing.Process]]:
    # A server that has torch and DALI imported forks each process: a kill then falls into the run, not into imports.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=train_in, args=(str(folder), n, ranks, store.port)) for n in range(ranks)
    ]
    for process in processes:
        process.start()
    return store, processes  # the store must live as long as they do


def newest(latest: Path) -> int:
    return int(latest.read_text().strip()[len("step_") :]) if latest.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_run_killed_six_times_at_random_ends_bit_identical(ranks, tmp_path):
    """Of two ranks one is killed, and the other ends with it, by the connection that breaks."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _store, undisturbed = start(straight, ranks)  # at the same time as the runs that are killed
    draws, kills, steps = random.Random(0), 0, []
    latest = small_config(killed, *LONG).run_folder / "checkpoints" / "latest"
    while True:
        _others, processes = start(killed, ranks)
        victim = processes[draws.randrange(ranks)]
        was_killed = False
        if kills < KILLS:
            # Every third kill falls into the start (restoring, or before it), the others after some new step.
            before, began = newest(latest), time.monotonic()
            while victim.is_alive() and kills % 3 and newest(latest) == before:
                time.sleep(0.01)
            victim.join(draws.uniform(0, 0.4 if kills % 3 else 2))
            if victim.is_alive():
                victim.kill()
                was_killed = True
                kills += 1
                print(f"killed after {time.monotonic() - began:.1f} s, newest checkpoint {newest(latest)}")
        for process in processes:
            process.join()
        steps.append(newest(latest))
        codes = [process.exitcode for process in processes]
        if codes == [0] * ranks:
            break
        assert was_killed and victim.exitcode == -signal.SIGKILL, (
            "the run ended on its own before it was killed"
        )
        assert all(code != 0 for code in codes), "a rank went on without the other"
    for process in undisturbed:
        process.join()
        assert process.exitcode == 0
    assert kills == KILLS, f"the run was over after {kills} kills: make it longer"
    assert steps == sorted(steps), "a checkpoint was lost"
    assert len(set(steps)) > 3, "the kills all fell before a first checkpoint: nothing was continued"
    ours, theirs = (final_state(small_config(folder, *LONG)) for folder in (killed, straight))
    assert_equal_to_the_bit(ours, theirs)
