"""A sweep's file: which runs it makes, what they are called, whose they are, and what is wrong with it."""

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet import cli
from fastsuncet.commands.sweep.runs import Run, expand
from fastsuncet.commands.sweep.spec import COMMANDS, as_yaml
from fastsuncet.commands.sweep.spec_reader import read_sweep
from fastsuncet.commands.sweep.task_share import only, share
from fastsuncet.config import ConfigErrors
from fastsuncet.config.reader import Document
from fastsuncet.errors import ConfigError
from tests.support.sweeps import DIGITS, ROOT, TWO, names, written
from tests.test_deploy import calls, command


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_ARRAY_TASK_ID", "FASTSUNCET_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


# --------------------------------------------------------------------------------------------------------- whose runs
@given(st.integers(1, 40), st.integers(1, 50))
def test_the_tasks_of_an_array_do_every_run_exactly_once(count, tasks):
    runs = [Run(f"run{i}", ()) for i in range(count)]
    shares = [share(runs, f"{i}/{tasks}", {})[0] for i in range(1, tasks + 1)]
    assert sorted((run for part in shares for run in part), key=runs.index) == runs
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    slurm = [share(runs, None, {"SLURM_ARRAY_TASK_ID": str(i)})[0] for i in range(1, count + 1)]
    assert slurm == [[run] for run in runs]


def test_a_task_without_a_run_or_with_no_number_is_refused():
    runs = [Run("a", ()), Run("b", ())]
    with pytest.raises(ConfigError) as refused:
        share(runs, None, {"SLURM_ARRAY_TASK_ID": "0"})
    assert str(refused.value) == (
        "this is task 0 of a Slurm array, and the sweep has 2 runs: submit it with --array=1-2, or give each task a "
        "share with --task I/N"
    )
    for wrong in ("3/2", "0/2", "1", "1/0", "a/b", "1/2/3"):
        with pytest.raises(ConfigError, match="--task is I/N with 1 <= I <= N, such as 2/8, not"):
            share(runs, wrong, {})
    assert share(runs, "2/2", {"SLURM_ARRAY_TASK_ID": "1"})[0] == runs[1:]  # said beats found


def test_only_chooses_by_name_and_refuses_a_name_that_is_none():
    runs = [Run(name, ()) for name in ("a-1", "a-2", "b-1")]
    assert [run.name for run in only(runs, ["a-*", "b-1"])] == ["a-1", "a-2", "b-1"]
    assert only(runs, []) == runs
    with pytest.raises(ConfigError, match="--only c: no run has such a name; there are a-1, a-2, b-1"):
        only(runs, ["a-1", "c"])


# ------------------------------------------------------------------------------------------------------------ its file
JOINED = "runs: {a: {}, b: {criterion.temperature: 0.5}}\ncommands: [train]\n"


def test_runs_are_named_after_the_sweep_and_what_varies():
    vary = "vary: {meta.seed: [0, 1], data.split.fraction: [0.1], data.split.seed: [7]}\n"
    assert names(DIGITS + vary + "commands: [train]\n") == [
        "two-meta.seed0-fraction0.1-data.split.seed7",
        "two-meta.seed1-fraction0.1-data.split.seed7",
    ]
    assert names(DIGITS + "vary: {meta.seed: [0, 1]}\n" + JOINED) == [
        "two-a-seed0",
        "two-a-seed1",
        "two-b-seed0",
        "two-b-seed1",
    ]
    named = DIGITS + 'name: "{run}.{data.augmentation.crop_scale}"\n'
    vary = "vary: {data.augmentation.crop_scale: [[0.2, 1.0], [0.4, 1.0]]}\n"
    assert names(named + vary + JOINED) == ["a.0.2_1.0", "a.0.4_1.0", "b.0.2_1.0", "b.0.4_1.0"]


def test_a_run_can_have_a_base_of_its_own_and_a_command_its_own_settings():
    text = (
        DIGITS
        + f"runs: {{s: {{base: {ROOT}/configs/digits_simclr.yaml}}, d: {{}}}}\n"
        + "commands:\n  train:\n  evaluate knn:\n    set: {evaluation.knn_k: 3}\n    every_checkpoint: true\n"
        + "  evaluate npi: {encoder: finetune/x, runs: {a: {npi.views: 1}, b: {npi.views: 2}}}\n"
    )
    first, second = expand(read_sweep(written(text)))
    assert [run.jobs[0].config.criterion.supervised_epochs for run in (first, second)] == [0, "all"]
    train, knn, one, two = first.jobs
    assert (train.config.evaluation.knn_k, knn.config.evaluation.knn_k) == (10, 3)
    assert knn.arguments[-1] == "--every-checkpoint"
    assert one.arguments[-2:] == two.arguments[-2:] == ("--encoder", "runs/two-s/finetune/x")
    assert [job.config.npi.views for job in (one, two)] == [1, 2]


def test_overrides_are_for_all_runs_and_may_not_touch_what_varies():
    runs = expand(read_sweep(written(TWO)), ["meta.seed=3", "logging.folder=elsewhere"])
    assert [run.jobs[1].config.meta.seed for run in runs] == [3, 3]
    assert runs[0].folder == Path("elsewhere/two-fraction0.1")
    with pytest.raises(ConfigErrors) as refused:
        expand(read_sweep(written(TWO)), ["data.split.fraction=1"])
    assert "is what this sweep varies; leave it to the sweep, or choose runs with --only" in str(
        refused.value
    )


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=("C", "Z")), max_size=8)
    | st.sampled_from(["null", "1", "1e-4", "yes", "a b", "#x", "a: b", "-", ""]),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@given(json_values)
def test_a_value_reads_back_from_the_command_line_as_it_stood_in_the_file(value):
    back = Document(as_yaml(value)).values
    assert back == value and type(back) is type(value)


def test_every_command_of_a_sweep_is_one_of_the_command_line():
    assert set(COMMANDS) <= set(cli.COMMANDS)


def test_everything_wrong_with_the_configs_of_all_runs_is_told_at_once():
    text = (
        f"{DIGITS}vary:\n  criterion.temperature: [0.1, -1, 0]\n  meta.seed: [0, x]\ncommands: [train]\n"
        "set:\n  optimization.lrr: 3\n"
    )
    with pytest.raises(ConfigErrors) as refused:
        expand(read_sweep(written(text)))
    assert str(refused.value) == (
        "3 problems in the config\n\n"
        "  two.yaml:3: criterion.temperature: -1, 0\n      must be a number above 0\n"
        "  two.yaml:4: meta.seed: x\n      must be a whole number from 0 to 2^63 - 1\n"
        "  two.yaml:7: optimization.lrr: 3\n      there is no such key; did you mean optimization.lr?"
    )


def test_a_sweep_of_too_many_runs_is_a_slip_of_the_hand():
    many = ", ".join(map(str, range(50)))
    text = f"{DIGITS}vary: {{meta.seed: [{many}], data.split.seed: [{many}]}}\ncommands: [train]\n"
    with pytest.raises(ConfigErrors, match="these are 2,500 command lines; 2,000 are the most a sweep may"):
        expand(read_sweep(written(text)))


# ------------------------------------------------------------------------------------------------------ on a cluster
@pytest.mark.parametrize(
    ("code", "requeued"),
    [(0, []), (75, ["scontrol requeue 70_3"]), (5, []), (137, ["scontrol requeue 70_3"])],
)
def test_the_array_job_requeues_its_own_task_and_keeps_the_exit_code(code, requeued):
    command(Path.cwd(), "srun", f"exit {code}")
    command(Path.cwd(), "scontrol", "")
    environment = {**os.environ, "PATH": f"{Path.cwd()}:{os.environ['PATH']}", "SLURM_JOB_ID": "73"}
    environment |= {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}
    script = ROOT / "tools" / "cluster" / "sweep.sbatch"
    words = ["bash", str(script), "a sweep.yaml", "data.root=/data"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == code
    asked, *then = calls(Path.cwd())
    assert asked.endswith("fastsuncet sweep a sweep.yaml data.root=/data")
    assert then == requeued
    assert subprocess.run(["bash", str(script)], capture_output=True).returncode == 2
