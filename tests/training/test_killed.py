"""kill -9 at any moment, again and again: the run that the same command brings to its end is the undisturbed one.

One trial is one run. It is killed up to eight times: one rank, all ranks, or the agent that started them, while it
starts, makes steps, saves, evaluates, or exports. Then it is continued to its end. Its weights, momentum, metrics lines
without times, the rest of its state and its export must be those of the undisturbed run, to the bit.

The command is the real one, with torchrun's agent, gloo, and DALI on JPEG files. Only the imports are saved: the agent
and its ranks are forked. FASTSUNCET_KILLS=1000 kills as often; then pytest needs `-o timeout=0`.
"""

import ctypes
import gc
import mmap
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handler
import torch.distributed.launcher.api

import fastsuncet.commands.train  # noqa: F401 - what the agent and the ranks would import
import pipelines.dali.engine  # noqa: F401
from fastsuncet import cli
from fastsuncet.commands import export
from fastsuncet.config import Config, load_config
from fastsuncet.distributed.place import Place
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
PHASES = ("start", "step", "save", "evaluation", "export")
PHASE_OF = {"saves": 2, "evaluates": 3}  # of Trainer.at; other places belong to a step
MOST = (1, 12, 4, 2, 1)  # kill at the first to this entry of a phase; a step has three
LIMIT = 900.0  # seconds from a kill to the end of every process; a busy machine is slow
PID, PHASE, STEP, SINCE, ENTRIES, SECONDS = 0, 1, 2, 3, 4, 9  # columns of `table`
PR_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
# (rank, column) in memory that all processes share: what each rank does, as it was at its last moment.
table = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float64)[: 16 * 14].reshape(16, 14)


# The seeds draw kills of the agent, of one rank and of all, in an evaluation, a save, a step and an export; and of one
# process in a save, a step and its start.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks", "kills", "seed"), [("digits_demo", 2, 4, 456372), ("digits_paws", 1, 3, 6688)]
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
    runs, kills, trial = Runs(top, ranks, config), [], 0
    while len(kills) < wanted:
        kills += runs.trial(f"trial_{trial}", random.Random(f"{seed} {trial}"))
        trial += 1
    print(f"{len(kills)} kills in {trial} runs: {kills}")
    assert any(kill["step"] > 2 for kill in kills), "no kill after a first checkpoint: nothing was continued"


class Runs:
    """Runs of one config in the folders of `top`, and the undisturbed one."""

    def __init__(self, top: Path, ranks: int, config: str):
        self.top, self.ranks, self.name = top, ranks, config
        for part, count in (("train", 32), ("val", 12)):  # three steps an epoch
            write_pictures(top / "data" / part, count, classes=4, side=24)
        code, _ = self.continue_run("undisturbed", None)
        assert code == 0, (top / "undisturbed" / "log").read_text()
        self.undisturbed = self.state("undisturbed")
        self.seconds = table[0, SECONDS:] / table[0, ENTRIES:SECONDS]  # of one entry of each phase

    def overrides(self, name: str) -> list[str]:
        top = self.top
        return [*RUN, f"data.root={top}/data", f"logging.folder={top}/{name}", f"data.index={top}/index"]

    def state(self, name: str) -> tuple:
        """Return what a run that ended has left: its state, and the tensors of its export."""
        config = load_config(self.name, self.overrides(name))
        exported = config.run_folder / export.FOLDER / export.FILES["torchvision"]
        return *final_state(config), torch.load(exported, weights_only=True)

    def continue_run(self, name: str, draws: random.Random | None) -> tuple[int, dict | None]:
        """Start or continue a run, and kill it if there are `draws`; return the agent's status, and the kill."""
        table[:] = 0
        (self.top / name).mkdir(parents=True, exist_ok=True)
        agent = os.fork()
        if agent == 0:
            arguments = ["train", self.name, *self.overrides(name)]
            leave(run_job, arguments, self.ranks, self.top / name / "log")
        status: dict[int, int] = {}
        kill = draws and kill_at_random(draws, agent, self.ranks, self.seconds, status)
        if not wait(status, LIMIT, lambda: False):
            for pid in {agent, *table[: self.ranks, PID].astype(int)} - {0, *status}:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"{name} hung after {kill}")
        return status[agent], kill

    def trial(self, name: str, draws: random.Random) -> list[dict]:
        """Kill a run up to eight times, continue it to its end and compare it; return the kills."""
        wanted, kills = draws.randint(1, 8), []
        while True:
            code, kill = self.continue_run(name, draws if len(kills) < wanted else None)
            if code == 0:
                break
            assert kill is not None, f"{name} ended with {code}, and nobody killed it, after {kills}"
            kills.append(kill)
        assert_equal_to_the_bit(self.state(name), self.undisturbed, f"{name}, after {kills}")
        return kills


def kill_at_random(
    draws: random.Random, agent: int, ranks: int, seconds, status: dict[int, int]
) -> dict | None:
    """Kill the agent, one rank or all at a moment of a phase; return what was killed, None if all had ended before."""
    several = ("agent", "all ranks") if ranks > 1 else ()
    target = draws.choice((*several, *(f"rank {n}" for n in range(ranks))))
    phase = draws.randrange(len(PHASES))
    entry, delay = draws.randint(1, MOST[phase]), draws.uniform(0, seconds[phase])
    if target != "agent" or phase:  # else it can be killed before it has started a rank
        wait(status, LIMIT, lambda: table[0, ENTRIES + phase] >= entry and table[:ranks, PID].all())
    time.sleep(delay)
    victims = {"agent": [agent], "all ranks": [int(pid) for pid in table[:ranks, PID]]}
    pids = victims.get(target) or [int(table[int(target[-1]), PID])]
    if agent in status:
        return None
    try:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    row = table[int(target[-1]) if target.startswith("rank") else 0]
    return {"target": target, "phase": PHASES[int(row[PHASE])], "step": int(row[STEP])}


def wait(status: dict[int, int], seconds: float, until) -> bool:
    """Collect in `status` how processes end; return whether all have, or `until()` came true, within `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            pid, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            status[pid] = os.waitstatus_to_exitcode(code)
        elif until():
            return True
        else:
            time.sleep(0.002)
    return False


# ---------------------------------------------------------------------------------------------- in forked processes
def enter(rank: int, phase: int, step: int = 0) -> None:
    """Note that `rank` is in `phase` of `step` now."""
    row, now = table[rank], time.monotonic()
    row[SECONDS + int(row[PHASE])] += now - row[SINCE]
    row[ENTRIES + phase] += 1
    row[PHASE], row[STEP], row[SINCE] = phase, step, now


def run_rank(arguments: list[str], environment: dict[str, str]) -> int:
    """Train as a rank that the agent has started; return the exit code."""
    gc.freeze()
    os.setsid()
    drop_files()  # as a new program has none of the agent's
    for name in STOP_SIGNALS:
        signal.signal(signal.Signals[name], signal.SIG_DFL)
    os.environ.update(environment)
    rank, at, write = int(environment.get("RANK", 0)), Trainer.at, export.export_at_end
    table[rank, PID], table[rank, SINCE] = os.getpid(), time.monotonic()
    enter(rank, 0)
    torch.cuda.device_count = lambda: 0  # they are only counted to start the ranks

    def watched(trainer: Trainer, point: str) -> None:
        enter(rank, PHASE_OF.get(point, 1), trainer.step)
        at(trainer, point)

    def watched_export(config: Config, place: Place) -> None:
        enter(rank, PHASES.index("export"), config.optimization.steps or 0)
        write(config, place)

    Trainer.at, export.export_at_end = watched, watched_export
    code = cli.main(arguments)
    enter(rank, 0)  # so that the last phase gets its time
    return code


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


def run_job(arguments: list[str], ranks: int, log: Path) -> int:
    """Do what `fastsuncet train` does on a machine with `ranks` GPUs; return the exit code."""
    end_with_parent(signal.SIGKILL)
    os.nice(4)  # the killing process must wake first, or it would miss the short phases
    for descriptor in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    if ranks == 1:
        return run_rank(arguments, {})

    class Forked(subprocess.Popen):
        """A rank that is forked; a new program would import for seconds before it trains."""

        def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:
            self.pid = os.fork()
            if self.pid == 0:
                leave(run_rank, arguments, env)
            self._child_created = True

    handler.Popen = Forked
    torch.cuda.device_count = lambda: ranks
    return cli.main(arguments)
