"""`fastsuncet sweep`: each command of each run once, in order, and the exit code says how it ended."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet import cli
from fastsuncet.commands.sweep import Children, sweep
from fastsuncet.commands.sweep.jobs import JobState, job_state
from fastsuncet.config import load_config
from fastsuncet.errors import ConfigError
from fastsuncet.metrics.results import asked
from pipelines import atomic_files
from tests.support.checkpoints import save
from tests.support.reports import result
from tests.support.sweeps import ROOT, SMALL, TWO, expanded, written

pytestmark = pytest.mark.slow

FIRST, SECOND = "two-fraction0.1", "two-fraction0.5"


@pytest.fixture
def script(monkeypatch):
    """Replace the processes: note their arguments, write what a command writes, end with the next of `codes`."""

    script = SimpleNamespace(ran=[], codes=[], meanwhile=lambda children: None)

    def run(children, arguments):
        words = 2 if arguments[0] == "evaluate" else 1
        command, (base, *overrides) = " ".join(arguments[:words]), arguments[words:]
        config = load_config(base, [each for each in overrides if each != "--every-checkpoint"])
        script.ran.append(f"{command} {config.logging.write_tag}")
        script.meanwhile(children)
        code = script.codes.pop(0) if script.codes else 0
        if code == 0 and command == "train":
            write_status(config.run_folder, 2)
        elif code == 0:
            settings = asked(config, arguments[1])
            result(config.run_folder, 2, 0.5, kind=arguments[1], asked=settings)
        return code

    monkeypatch.setattr(Children, "run", run)
    return script


def write_status(folder: Path, step: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": step}))


def test_sweep_trains_and_evaluates_once(capfd, monkeypatch):
    """What is done is skipped until something that its numbers depend on changes.

    The commands run in this process.
    """
    command = ["sweep", "two.yaml", "--only", "*0.5"]
    monkeypatch.setattr(Children, "run", lambda self, arguments: cli.main(list(arguments)))
    written(TWO.replace("[train, evaluate knn]", "[train]"))
    assert cli.main(command) == 0
    assert json.loads(Path("runs", SECOND, "status.json").read_text())["state"] == "done"
    written(TWO)
    capfd.readouterr()
    assert cli.main(command) == 0
    out = capfd.readouterr().out
    assert out.count("sweep    run ") == 1
    assert out.endswith("                 evaluate knn  done\n1 run, 2 commands: all done\n")
    (written_result,) = Path("runs", SECOND, "results").glob("knn-*.json")
    assert json.loads(written_result.read_text())["labels"]["fraction"] == 0.5
    started = []
    monkeypatch.setattr(Children, "run", lambda self, arguments: started.append(arguments[:2]) or 0)
    for same in ([], ["data.decode_threads=1", "logging.log_every=1"], ["finetune.epochs=3"]):
        assert cli.main([*command, *same]) == 0
    assert started == []
    assert cli.main([*command, "evaluation.knn_k=3"]) == 0
    assert started == [("evaluate", "knn")]


def test_sweep_dry_run_loads_no_torch():
    written(TWO.replace("[train, evaluate knn]", "{train: , evaluate npi: {vary: {npi.views: [1, 2]}}}"))
    code = (
        "import sys; from fastsuncet.cli import main; code = main(['sweep', 'two.yaml', '--dry-run', '--only', '*5']);"
        "print(code, sorted({'torch', 'nvidia'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *commands, empty, said, loaded = done.stdout.splitlines()
    kept = " ".join(f"{line.strip().replace(': ', '=')}" for line in SMALL.splitlines()[1:])
    same = f"{ROOT}/configs/digits_demo.yaml {kept} data.split.fraction=0.5"
    assert commands == [
        f"fastsuncet train {same} logging.write_tag={SECOND}",
        f"fastsuncet evaluate npi {same} npi.views=1 logging.write_tag={SECOND}",
        f"fastsuncet evaluate npi {same} npi.views=2 logging.write_tag={SECOND}",
    ]
    assert said == "dry run: 1 run, 3 commands; every config is valid, nothing was started"
    assert (empty, loaded) == ("", "0 []")
    assert done.stderr == ""


def test_sweep_runs_commands_in_order_and_only_once_unless_the_run_went_on(script):
    path = written(TWO)
    for _ in range(2):
        assert sweep(path) == 0
        assert script.ran == [
            f"{each} {run}" for run in (FIRST, SECOND) for each in ("train", "evaluate knn")
        ]
    write_status(Path("runs", FIRST), 3)
    states = [job_state(job).text for run in expanded(TWO) for job in run.jobs]
    assert states == ["done", "to do again: the run has gone on", "done", "done"]


@pytest.mark.parametrize(
    ("command", "changes", "done"),
    [
        ("evaluate knn: ", {}, True),
        ("evaluate knn: ", {"kind": "linear"}, False),
        ("evaluate knn: ", {"asked": {}}, False),
        ("evaluate knn: ", {"setting": {"precision": "bf16"}}, False),
        ("evaluate knn: ", {"encoder": {"source": "moved/two-fraction0.1/checkpoints/step_00000002", "step": 2}}, True),
        ("evaluate knn: ", {"encoder": {"source": "runs/other/checkpoints/step_00000002", "step": 2}}, False),
        ("evaluate knn: {every_checkpoint: true}", {}, False),  # there are two
        ("evaluate knn: {encoder: finetune/x}", {}, False),
        ("evaluate knn: {encoder: finetune/x}", {"encoder": {"source": "moved/x", "step": 2, "sha256": "x"}}, True),
        ("evaluate knn: {encoder: finetune/x}",  # which was made again
         {"encoder": {"source": "runs/two-fraction0.1/finetune/x/checkpoints/step_00000009", "sha256": "y"}}, False),
        ("evaluate knn: {encoder: finetune/y}", {"encoder": {"sha256": hashlib.sha256(b"y").hexdigest()}}, True),
        ("evaluate knn: ",  # of a fine-tuning that has the run's name
         {"encoder": {"source": "finetune/two-fraction0.1/checkpoints/step_00000009", "step": 2}}, False),
        ("transfer: ", {"kind": "transfer", "metrics": {"cifar10": 0.5}}, False),
        ("transfer: ", {"kind": "transfer", "metrics": {"cifar10": 0.5, "cifar100": 0.5, "voc07": 0.5}}, True),
        ("transfer: {set: {transfer.datasets: [voc07]}}",
         {"kind": "transfer", "metrics": {"cifar10": 0.5, "voc07": 0.5}, "asked": "cifar10"}, True),
        ("transfer: ", {"kind": "transfer", "metrics": {"cifar10": 0.5, "cifar100": 0.5, "voc07": 0.5},
         "asked": "cifar10"}, True),
    ],
)  # fmt: skip
def test_job_is_done_when_its_result_exists(command, changes, done):
    text = TWO.replace("[train, evaluate knn]", f"{{{command}}}")
    job = expanded(text.replace("0.5]", "]"))[0].jobs[0]
    folder = job.config.run_folder
    write_status(folder, 2)
    for step in (1, 2):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000003.old").mkdir()  # a user's copy is none
    tuned = folder / "finetune/x/checkpoints/step_00000009"
    tuned.mkdir(parents=True)
    (tuned / "meta.json").write_text(json.dumps({"files": {"model.safetensors": {"sha256": "x"}}}))
    (folder / "finetune/y").write_bytes(b"y")
    settings = asked(job.config, job.command.split()[-1])
    if changes.get("asked") == "cifar10":  # by the task before
        changes = changes | {"asked": settings | {"transfer.datasets": ["cifar10"]}}
    result(folder, 2, 0.5, **{"kind": "knn", "asked": settings, **changes})
    assert job_state(job).done == done


@pytest.mark.parametrize(
    ("codes", "keep_going", "ends", "ran"),
    [
        *(([0, code], False, code, [f"train {FIRST}", f"evaluate knn {FIRST}"]) for code in (2, 137)),
        ([4], True, 4, [f"train {FIRST}", f"train {SECOND}", f"evaluate knn {SECOND}"]),
        ([75], True, 75, [f"train {FIRST}"]),  # a run that saved on a signal ends the sweep in any case
    ],
)
def test_sweep_ends_with_the_exit_code_of_a_failure(script, capsys, codes, keep_going, ends, ran):
    script.codes = list(codes)
    assert sweep(written(TWO), keep_going=keep_going) == ends
    assert script.ran == ran
    if len(codes) == 2:
        failed = f"failed with exit code {ends}"
        said, table = capsys.readouterr().out.split("\n\n")
        assert f"{FIRST}: evaluate knn {failed}; see its message above" in said and failed in table


def test_sweep_says_a_damaged_checkpoint_goes_on_and_repeats_nothing(script, capsys):
    """A good checkpoint without a result is measured."""
    commands = "{train: , evaluate knn: {every_checkpoint: true}, evaluate linear: }"
    run = expanded(TWO.replace("[train, evaluate knn]", commands))[0]
    folder = Path("runs", FIRST)
    checkpoints = folder / "checkpoints"
    (checkpoints / "step_00000001").mkdir(parents=True)
    said = f"{FIRST}: evaluate knn is done but for step_00000001, damaged in {checkpoints}: "
    for _ in range(2):
        assert sweep("two.yaml") == 5
        printed = capsys.readouterr().out
        assert printed.count(said) == 1
        assert "6 commands: 1 to do" in printed
        commands = ("train", "evaluate knn", "evaluate linear")
        assert script.ran == [f"{command} {run}" for run in (FIRST, SECOND) for command in commands]
    save(checkpoints, 1)
    assert job_state(run.jobs[1]).text == "to do again: the run has gone on"
    shutil.rmtree(checkpoints / "step_00000001")
    assert sweep("two.yaml") == 0
    (checkpoints / "step_00000002").mkdir()
    write_status(folder, 3)  # of a checkpoint that was moved away
    assert [job_state(job).done for job in run.jobs] == [True, True, False]


@pytest.mark.parametrize(
    ("run", "codes", "ends", "ran"),
    [
        (FIRST, [], 5, [f"train {FIRST}", f"train {SECOND}", f"evaluate knn {SECOND}"]),
        (FIRST, [0, 3], 3, [f"train {FIRST}", f"train {SECOND}"]),  # a command that fails later
        (SECOND, [3], 3, [f"train {FIRST}", f"train {SECOND}"]),  # and one that failed before
    ],
)
def test_sweep_names_a_damaged_result_and_does_the_rest(script, capsys, run, codes, ends, ran):
    damaged = Path("runs", run, "results", "knn.json")
    damaged.parent.mkdir(parents=True)
    damaged.touch()
    script.codes = list(codes)
    assert sweep(written(TWO), keep_going=run == SECOND) == ends
    assert script.ran == ran
    for part in capsys.readouterr().out.split("\n\n"):
        assert f"not known to be done: the result {damaged} cannot be read" in part
    assert sweep("two.yaml", show=True) == 0


def test_sweep_starts_nothing_after_a_signal(script):
    script.meanwhile = lambda children: children._handle(signal.SIGUSR1, None)
    assert sweep(written(TWO)) == 75
    assert script.ran == [f"train {FIRST}"]


def test_sweep_starts_no_ranks_of_a_rank(script, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="call it without torchrun"):
        sweep(written(TWO))
    assert script.ran == []


STARTED, DONE = '{"state": "running", "step": 1}', '{"state": "done", "step": 2}'


def test_job_state_of_a_run():
    """A run that is running holds a lock; one that was killed does not. Its config has the precision it has chosen."""
    # A date is text.
    job = expanded(TWO, "meta.precision=auto", "data.validation=2026-11-21")[0].jobs[0]
    folder, chosen = job.config.run_folder, job.config.with_values({"meta.precision": "fp32"})
    folder.mkdir(parents=True)
    for status, config, locked, text in (
        (STARTED, b"", False, "stopped at step 1"),
        ('{"step": 1}', b"", False, "stopped at step 1"),
        ('{"state": "running", ', b"", False, "to do"),
        (DONE, b"", False, "done"),
        (DONE, b"meta: {seed: 7}", False, "other settings"),  # training it refuses, with their names
        (DONE, b"\xff", False, "other settings"),
        (STARTED, b"", True, "running at step 1"),
    ):
        (folder / "status.json").write_text(status)
        (folder / "config.yaml").write_bytes(config or chosen.to_yaml().encode())
        with atomic_files.exclusive(folder / ".running") if locked else contextlib.nullcontext():
            assert job_state(job) == JobState(text == "done", text)


# ----------------------------------------------------------------------------------------- commands as processes
READY = "pathlib.Path('ready').touch(); time.sleep(60)"


def scripted(monkeypatch, code: str) -> Children:
    """Return Children that run `code` instead of fastsuncet."""
    script = [sys.executable, "-c", f"import os, signal, sys, time, pathlib\n{code}"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen(script, **options))
    return Children()


def test_children_run_this_program(capfd):
    with Children() as children:
        assert children.run(["version"]) == 0
    assert capfd.readouterr().out.startswith("fastsuncet ")


def test_children_get_sigterm_when_their_parent_is_killed(monkeypatch):
    code = "signal.signal(signal.SIGTERM, lambda *_: os._exit(pathlib.Path('ended').touch() or 0)); " + READY
    with scripted(monkeypatch, code) as children:
        parent = os.fork()
        if parent == 0:
            children.run([])
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    end = time.monotonic() + 30
    while not Path("ended").exists():
        assert time.monotonic() < end, "the child goes on alone"
        time.sleep(0.01)


EXIT = "signal.signal(signal.{}, lambda *_: sys.exit({})); " + READY
NOHUP = pytest.mark.skipif(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, reason="nohup ignores SIGHUP")


@pytest.mark.parametrize(
    ("code", "number", "ends"),
    [
        pytest.param("sys.exit(3)", None, 3, id="no-signal"),
        pytest.param("sys.exit(os.getsid(0) != os.getpid())", None, 0, id="has-its-own-session"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", None, 137, id="killed"),
        pytest.param(READY, signal.SIGTERM, 75, id="dies-of-the-signal"),
        pytest.param(EXIT.format("SIGTERM", 75), signal.SIGTERM, 75, id="saves"),
        pytest.param(EXIT.format("SIGTERM", 5), signal.SIGTERM, 5, id="cannot-save"),
        pytest.param(EXIT.format("SIGTERM", 0), signal.SIGTERM, 0, id="was-done"),
        pytest.param(EXIT.format("SIGINT", 130), signal.SIGINT, 75, id="interrupted-at-its-start"),
        pytest.param(EXIT.format("SIGHUP", 75), signal.SIGHUP, 75, id="closed-terminal", marks=NOHUP),
    ],
)
def test_children_exit_codes_and_signals(monkeypatch, code, number, ends):
    """This process gets the signal `number` once the child has made the file `ready`, and passes it on."""

    def wait_and_signal():
        while not Path("ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    with scripted(monkeypatch, code) as children:
        if number is not None:
            threading.Thread(target=wait_and_signal, daemon=True).start()
        assert children.run(["train"]) == ends
        assert children.requested == (number and signal.Signals(number).name)
    if number is not None:
        os.kill(os.getpid(), number)  # a repeated signal does not change the exit code of the sweep


def test_children_signal_just_before_the_start(monkeypatch):
    with scripted(monkeypatch, "time.sleep(60)") as children:
        os.kill(os.getpid(), signal.SIGTERM)
        assert children.run(["train"]) == 75
