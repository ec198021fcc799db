"""kill -9 at any moment, again and again: the run that the same command brings to its end is the undisturbed one.

One trial is one run. It is killed up to eight times: one rank, all ranks, or the agent that started them, while it
starts, makes steps, saves, evaluates, or exports. Then it is continued to its end. Its weights, momentum, metrics lines
without times, the rest of its state and its export must be those of the undisturbed run, to the bit.

The command is the real one, with torchrun's agent, gloo, and DALI on JPEG files. Only the imports are saved: the agent
and its ranks are forked. FASTSUNCET_KILLS=1000 kills as often; then pytest needs `-o timeout=0`.
"""

import contextlib
import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
import torch.distributed.launcher.api

import fastsuncet.commands.train  # noqa: F401 - what the agent and the ranks would import
import pipelines.dali.engine  # noqa: F401
from fastsuncet import cli
from fastsuncet.commands import export
from fastsuncet.config import load_config
from fastsuncet.distributed.signals import STOP_SIGNALS, end_with_parent
from fastsuncet.training.trainer import Trainer
from tests.support.pictures import write_pictures
from tests.support.ranks import drop_files, start_forked
from tests.support.runs import assert_equal_to_the_bit, final_state

KILLS = int(os.environ.get("FASTSUNCET_KILLS", 0))
RUN = (
    *("data.kind=image_folder", "data.split.kind=all", "data.split.fraction=null"),
    *("data.augmentation.blur=0.5", "criterion.unsupervised_batch_size=10", "criterion.classes_per_batch=2"),
    *("criterion.supervised_imgs_per_class=4", "optimization.steps=6", "optimization.warmup=1"),
    *("checkpoint.every=2", "logging.log_every=2"),
    *("evaluation.knn_every_epochs=1", "evaluation.knn_k=3"),
)
# Phases of a run, and the last entry of each that a kill can be drawn for; a step has three.
PHASES = {"start": 1, "step": 12, "save": 4, "evaluation": 2, "export": 1}
PHASE_OF = {"saves": "save", "evaluates": "evaluation"}  # of Trainer.at; other places belong to a step
LIMIT = 900.0  # seconds to the end of every process; a busy machine is slow
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h


class Kill(NamedTuple):
    target: str  # "agent", "all ranks", "rank 0"
    phase: str
    entry: int  # of the phase, from 1
    delay: float  # seconds after it


def draw_kill(draws: random.Random, ranks: int) -> Kill:
    target = draws.choice((*["agent", "all ranks"] * (ranks > 1), *(f"rank {n}" for n in range(ranks))))
    phase = draws.choice(list(PHASES))
    # From below a millisecond to what the longest phases take.
    return Kill(target, phase, draws.randint(1, PHASES[phase]), 0.5 * draws.random() ** 3)


# The seeds draw kills of all ranks in a step, of one in a save and an export, and of the agent in an evaluation; and of
# one process in a step, a save and its start.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "kills", "seed"), [("digits_demo", 2, 4, 292025), ("digits_paws", 1, 3, 37940)]
)
def test_runs_killed_at_random_end_bit_identical(config, ranks, kills, seed, tmp_path):
    process = start_forked(kill_and_compare, tmp_path, ranks, config, KILLS or kills, seed)
    process.join()
    assert process.exitcode == 0


def kill_and_compare(top: Path, ranks: int, config: str, wanted: int, seed: int) -> None:
    """Make trials until there were so many kills. Raises AssertionError with the kills of a run that differs."""
    torch.set_num_threads(1)
    # Ranks whose agent was killed become children of this process, which can then wait for them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for part, count in (("train", 32), ("val", 12)):  # three steps an epoch
        write_pictures(top / "data" / part, count, classes=4, side=24)

    def words(name: str) -> list[str]:
        return [*RUN, f"data.root={top}/data", f"logging.folder={top}/{name}", f"data.index={top}/index"]

    def continue_run(name: str, kill: Kill | None) -> int:
        """Start or continue a run, and kill it; return the agent's exit code."""
        (top / name).mkdir(exist_ok=True)
        agent = os.fork()
        if agent == 0:
            leave(run_job, ["train", config, *words(name)], ranks, top / name, kill)
        return wait_for_all(f"{name} after {kill}")[agent]

    def state(name: str) -> tuple:
        """Return what a run that ended has left: its state, and the tensors of its export."""
        of_run = load_config(config, words(name))
        exported = of_run.run_folder / export.FOLDER / export.FILES["torchvision"]
        return *final_state(of_run), torch.load(exported, weights_only=True)

    assert continue_run("undisturbed", None) == 0, (top / "undisturbed" / "log").read_text()
    undisturbed, kills = state("undisturbed"), []
    for trial in range(10**6):
        name, draws = f"trial_{trial}", random.Random(f"{seed} {trial}")
        most, noted = draws.randint(1, 8), []
        while code := continue_run(name, draw_kill(draws, ranks) if len(noted) < most else None):
            note = top / name / "kill"
            assert note.exists(), f"{name} ended with {code}, and nobody killed it, after {noted}"
            noted.append(note.read_text().splitlines()[0])
            note.unlink()
        assert_equal_to_the_bit(state(name), undisturbed, f"{name}, after {noted}")
        kills += noted
        if len(kills) >= wanted:
            break
    print(f"{len(kills)} kills in {trial + 1} runs: {kills}")
    assert any(int(kill.split()[-1]) > 2 for kill in kills), "all kills were before the first checkpoint"


def wait_for_all(what: str) -> dict[int, int]:
    """Return the exit codes of all processes that this one started or inherited, by process ID."""
    codes, end = {}, time.monotonic() + LIMIT
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                codes[pid] = os.waitstatus_to_exitcode(status)
            else:
                time.sleep(0.01)
        for _ in range(2):  # the agent, then the ranks that it leaves
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            time.sleep(1)
        raise AssertionError(f"{what} hung")
    return codes


# ---------------------------------------------------------------------------------------------- in forked processes
def run_rank(arguments: list[str], environment: dict[str, str], folder: Path, kill: Kill | None) -> int:
    """Train as a rank that the agent has started; return the exit code. The rank itself does what `kill` says."""
    gc.freeze()
    os.setsid()
    drop_files()  # as a new program has none of the agent's
    for name in STOP_SIGNALS:
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    os.environ.update(environment)
    rank, at, write = int(environment.get("RANK", 0)), Trainer.at, export.export_at_end
    torch.cuda.device_count = lambda: 0  # they are only counted to start the ranks
    agent, entries, position = os.getppid(), [], ["start", 0]
    mine = kill is not None and (
        kill.target in ("all ranks", f"rank {rank}") or (kill.target, rank) == ("agent", 0)
    )

    def strike() -> None:
        with open(folder / "kill", "a") as file:
            file.write(f"{kill.target} in {position[0]} of step {position[1]}\n")
        os.kill(agent if kill.target == "agent" else os.getpid(), signal.SIGKILL)

    def enter(phase: str, step: int = 0) -> None:
        position[:] = phase, step
        entries.append(phase)
        if mine and phase == kill.phase and entries.count(phase) == kill.entry:
            timer = threading.Timer(kill.delay, strike)
            timer.daemon = True
            timer.start()

    def watched(trainer: Trainer, point: str) -> None:
        enter(PHASE_OF.get(point, "step"), trainer.step)
        at(trainer, point)

    def watched_export(config, place) -> None:
        enter("export", config.optimization.steps)
        write(config, place)

    Trainer.at, export.export_at_end = watched, watched_export
    enter("start")
    return cli.main(arguments)


def leave(function, *arguments) -> None:
    """End this process with the exit code that `function` returns, never through the stack that was forked."""
    code = 1
    try:
        code = function(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def run_job(arguments: list[str], ranks: int, folder: Path, kill: Kill | None) -> int:
    """Do what `fastsuncet train` does on a machine with `ranks` GPUs; return the exit code."""
    end_with_parent(signal.SIGKILL)
    for descriptor in (1, 2):
        os.dup2(os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if ranks == 1:
        return run_rank(arguments, {}, folder, kill)

    class Forked(subprocess.Popen):
        """A rank that is forked; a new program would import for seconds before it trains."""

        def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
            self.pid = os.fork()
            if self.pid == 0:
                leave(run_rank, arguments, env, folder, kill)
            self._child_created = True

    handler.Popen = Forked
    torch.cuda.device_count = lambda: ranks
    return cli.main(arguments)
