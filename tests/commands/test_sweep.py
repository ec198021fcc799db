"""A sweep: many runs from one file, in order, each command once, and whatever ends it told by its exit code."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fastsuncet import cli
from fastsuncet.checkpoint import atomic_files
from fastsuncet.commands import sweep
from fastsuncet.commands.sweep import jobs
from fastsuncet.commands.sweep.child import Children
from fastsuncet.commands.sweep.runs import expand
from fastsuncet.commands.sweep.spec_reader import read_sweep
from fastsuncet.config import ConfigErrors
from fastsuncet.errors import ConfigError
from tests.support.sweeps import ROOT, TWO, names, written


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_ARRAY_TASK_ID", "FASTSUNCET_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def children(monkeypatch):
    """Stands in for the processes: notes what they were given, does what a train does, ends with `codes` in order."""

    class Script:
        def __init__(self):
            self.ran, self.codes, self.meanwhile = [], [], lambda children: None

        def run(self, children, arguments):
            command = " ".join(word for word in arguments[:2] if "." not in word and "/" not in word)
            tag = next(word for word in arguments if word.startswith("logging.write_tag="))
            self.ran.append(f"{command} {tag.partition('=')[2]}")
            self.meanwhile(children)
            code = self.codes.pop(0) if self.codes else 0
            if code == 0 and command == "train":
                folder = Path("runs") / tag.partition("=")[2]
                folder.mkdir(parents=True)
                (folder / "status.json").write_text('{"state": "done", "step": 2}')
            return code

    script = Script()
    monkeypatch.setattr(Children, "run", lambda self, arguments: script.run(self, arguments))
    return script


# ------------------------------------------------------------------------------------------------------- real, in small
def test_real_runs_are_trained_and_evaluated_once_and_a_lost_number_is_measured_again(capfd, monkeypatch):
    path = written(TWO.replace("[train, evaluate knn]", "[train]"))
    assert cli.main(["sweep", path]) == 0
    states = [json.loads(Path("runs", run, "status.json").read_text())["state"] for run in names(TWO)]
    assert states == ["done", "done"]
    path = written(TWO)
    capfd.readouterr()
    assert cli.main(["sweep", path, "--only", "*0.5"]) == 0
    said = capfd.readouterr().out
    assert said.count("sweep    run ") == 1
    assert said.endswith(
        "run              command       state\n"
        "two-fraction0.5  train         done\n"
        "                 evaluate knn  done\n"
        "1 run, 2 commands: all done\n"
    )
    (result,) = Path("runs/two-fraction0.5/results").glob("knn-*.json")
    assert json.loads(result.read_text())["labels"]["fraction"] == 0.5
    # Done is done: no process is started. Other places, threads, log intervals make no other number.
    asked = []
    monkeypatch.setattr(Children, "run", lambda self, arguments: asked.append(arguments[:2]) or 0)
    for same in ([], ["data.decode_threads=1", "logging.log_every=1"]):
        assert cli.main(["sweep", path, "--only", "*0.5", *same]) == 0
    assert asked == []
    # Another k does, and so does a lost result.
    assert cli.main(["sweep", path, "--only", "*0.5", "evaluation.knn_k=3"]) == 0
    assert asked == [("evaluate", "knn")]
    result.unlink()
    assert cli.main(["sweep", path, "--list"]) == 0
    assert f"to do again: {result.name} is gone" in capfd.readouterr().out
    assert cli.main(["sweep", path, "--only", "*0.5"]) == 0
    assert asked == [("evaluate", "knn")] * 2


def test_sigterm_reaches_the_run_which_saves_and_the_sweep_leaves_with_75():
    endless = TWO.replace("optimization.steps: 2", "optimization.steps: 1000000")
    path = written(endless)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fastsuncet", "sweep", path],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    checkpoints = Path("runs/two-fraction0.1/checkpoints")
    deadline = time.monotonic() + 120
    while not list(checkpoints.glob("step_*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    status = json.loads(Path("runs/two-fraction0.1/status.json").read_text())
    assert status["state"] == "preempted" and status["message"].startswith("SIGTERM"), said
    assert not Path("runs/two-fraction0.5").exists()
    assert "two-fraction0.1: train was stopped by a signal; the same command goes on" in said
    (first, *rest) = [jobs.state(job) for run in expand(read_sweep(path)) for job in run.jobs]
    assert (first.done, first.words) == (False, f"preempted at step {status['step']}")
    assert {state.words for state in rest} == {"to do"}


# ---------------------------------------------------------------------------------------------- in order, and to where
def test_commands_run_in_order_and_the_second_time_nothing_does(children):
    path = written(TWO)
    assert sweep.sweep(path) == 0
    order = [f"{command} two-fraction{p}" for p in (0.1, 0.5) for command in ("train", "evaluate knn")]
    assert children.ran == order
    assert sweep.sweep(path) == 0
    assert children.ran == order


@pytest.mark.parametrize("code", [2, 3, 4, 5, 137])
def test_a_failure_ends_the_sweep_with_its_exit_code(children, capsys, code):
    children.codes = [0, code]
    assert sweep.sweep(written(TWO)) == code
    assert children.ran == ["train two-fraction0.1", "evaluate knn two-fraction0.1"]
    said = f"two-fraction0.1: evaluate knn ended with exit code {code}; its message stands above"
    assert said in capsys.readouterr().out


def test_keep_going_leaves_out_the_rest_of_the_failed_run_alone(children):
    children.codes = [4]
    assert sweep.sweep(written(TWO), keep_going=True) == 4
    assert children.ran == ["train two-fraction0.1", "train two-fraction0.5", "evaluate knn two-fraction0.5"]


def test_a_run_that_saved_on_a_signal_ends_the_sweep_with_75_even_when_it_keeps_going(children):
    children.codes = [75]
    assert sweep.sweep(written(TWO), keep_going=True) == 75
    assert children.ran == ["train two-fraction0.1"]


def test_a_signal_that_a_command_outlives_starts_no_further_one(children):
    children.meanwhile = lambda running: running._handle(signal.SIGUSR1, None)
    assert sweep.sweep(written(TWO)) == 75
    assert children.ran == ["train two-fraction0.1"]


def test_a_run_of_other_settings_in_its_folder_is_refused_before_anything_starts(children):
    path = written(TWO)
    folder = Path("runs/two-fraction0.5")
    folder.mkdir(parents=True)
    job = expand(read_sweep(path))[1].jobs[0]
    (folder / "config.yaml").write_text(job.config.to_yaml().replace("lr: 1.0", "lr: 2.0"))
    with pytest.raises(ConfigError) as refused:
        sweep.sweep(path)
    assert str(refused.value) == (
        "runs/two-fraction0.5 holds a run with optimization.lr: 2.0, and this one has 1.0. Give the sweep another "
        "name, or move that folder away"
    )
    assert children.ran == []


def test_an_evaluation_of_a_run_that_went_on_is_done_again(children):
    path = written(TWO)
    sweep.sweep(path)
    Path("runs/two-fraction0.1/status.json").write_text('{"state": "done", "step": 3}')
    states = [jobs.state(job).words for run in expand(read_sweep(path)) for job in run.jobs]
    assert states == ["done", "to do again: the run has moved on", "done", "done"]


def test_under_torchrun_a_sweep_is_refused(children, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="call it without torchrun"):
        sweep.sweep(written(TWO))


def test_a_dry_run_prints_every_command_and_loads_no_torch():
    path = written(
        TWO.replace("[train, evaluate knn]", "{train: , evaluate npi: {vary: {npi.views: [1, 2]}}}")
    )
    code = (
        "import sys; from fastsuncet.cli import main; code = main(['sweep', 'two.yaml', '--dry-run', '--only', '*5']);"
        "print(code, sorted({'torch', 'nvidia'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    same = (
        f"{ROOT}/configs/digits_demo.yaml optimization.steps=2 optimization.warmup=0 "
        "criterion.unsupervised_batch_size=16 criterion.supervised_imgs_per_class=2 checkpoint.every=1 "
        "evaluation.knn_every_epochs=null data.split.fraction=0.5"
    )
    tag = "logging.write_tag=two-fraction0.5"
    assert done.stdout.splitlines() == [
        f"fastsuncet train {same} {tag}",
        f"fastsuncet evaluate npi {same} npi.views=1 {tag}",
        f"fastsuncet evaluate npi {same} npi.views=2 {tag}",
        "",
        "dry run: 1 run, 3 commands; every config is sound, nothing was started",
        "0 []",
    ]
    assert done.stderr == "" and path == "two.yaml"


def wrong_sweeps() -> list:
    """(file, message) of each case of wrong_sweeps.txt, named."""
    cases = (Path(__file__).parent / "wrong_sweeps.txt").read_text().split("\n=== ")[1:]
    parts = [re.fullmatch(r"(.*?)\n(.*?)---\n(.*)", case.rstrip("\n"), re.S) for case in cases]
    return [pytest.param(case[2], case[3], id=case[1]) for case in parts]


@pytest.mark.parametrize(("text", "message"), wrong_sweeps())
def test_a_wrong_sweep_is_told_with_its_line_before_anything_starts(children, text, message):
    base = f"{ROOT}/configs/digits_demo.yaml"
    with pytest.raises(ConfigErrors) as refused:
        sweep.sweep(written(text.replace("digits.yaml", base)))
    assert str(refused.value).replace(base, "digits.yaml").split("\n\n", 1)[1] == message
    assert children.ran == []


# ------------------------------------------------------------------------------------------------------------ processes
def scripted(monkeypatch, code: str) -> Children:
    """Children that run `code` instead of fastsuncet, and say "ready" by making a file."""
    popen = subprocess.Popen
    text = f"import os, signal, sys, time, pathlib\n{code}"
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", text], **options)
    )
    return Children()


READY = "pathlib.Path('ready').touch(); time.sleep(60)"


def asked_to_stop(number: int = signal.SIGTERM) -> None:
    """Signals this process once the child is there."""

    def wait_and_signal():
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=wait_and_signal, daemon=True).start()


@pytest.mark.parametrize(
    ("code", "ends"),
    [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137), ("pass", 0), ("sys.exit(75)", 75)],
)
def test_a_child_that_nobody_stopped_ends_as_it_would_in_a_shell(monkeypatch, code, ends):
    with scripted(monkeypatch, code) as children:
        assert children.run(["version"]) == ends
        assert children.requested is None


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (READY, 75),  # one that knows nothing of signals dies of it: nothing is lost but its time
        (f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); {READY}", 75),
        (
            f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); {READY}",
            5,
        ),  # could not save: a person has to look
        (f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); {READY}", 0),
    ],
)
def test_a_signal_is_passed_on_and_the_child_has_the_last_word(monkeypatch, code, ends):
    before = signal.getsignal(signal.SIGTERM)
    with scripted(monkeypatch, code) as children:
        asked_to_stop()
        assert children.run(["train"]) == ends
        assert children.requested == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_lets_the_run_save(monkeypatch):
    saves = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); {READY}"
    with scripted(monkeypatch, saves) as children:
        asked_to_stop(signal.SIGHUP)
        assert children.run(["train"]) == 75
        assert children.requested == "SIGHUP"


def test_a_child_has_a_session_of_its_own_so_a_signal_to_the_group_comes_to_it_once(monkeypatch):
    with scripted(monkeypatch, "sys.exit(0 if os.getsid(0) == os.getpid() else 3)") as children:
        assert children.run(["train"]) == 0


def test_a_signal_just_before_a_child_is_there_reaches_it(monkeypatch):
    with scripted(monkeypatch, "time.sleep(60)") as children:
        os.kill(os.getpid(), signal.SIGTERM)
        assert children.run(["train"]) == 75


@pytest.mark.parametrize(("held", "words"), [(True, "running at step 1"), (False, "stopped at step 1")])
def test_a_run_that_is_running_is_told_from_one_that_was_killed(held, words):
    (job, _) = expand(read_sweep(written(TWO)))[0].jobs
    folder = job.config.run_folder
    folder.mkdir(parents=True)
    (folder / "status.json").write_text('{"state": "running", "step": 1}')
    with atomic_files.exclusive(folder / ".running") if held else contextlib.nullcontext():
        assert jobs.state(job).words == words


def test_a_status_that_says_nothing_is_a_run_to_go_on_with():
    (job, _) = expand(read_sweep(written(TWO)))[0].jobs
    job.config.run_folder.mkdir(parents=True)
    (job.config.run_folder / "status.json").write_text('{"step": 1}')
    assert jobs.state(job) == jobs.State(False, "stopped at step 1")
