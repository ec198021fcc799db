"""Which runs a sweep's file makes, what they are called, which task does them, and what is wrong with a file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.commands.sweep.runs import Run, runs_named, runs_of_task
from fastsuncet.config import ConfigErrors
from fastsuncet.config.reader import as_yaml, parse
from fastsuncet.errors import ConfigError
from tests.support.configs import wrong_files
from tests.support.sweeps import DIGITS, ROOT, TWO, expanded


@pytest.mark.parametrize("case", wrong_files(Path(__file__).parent / "wrong_sweeps.txt"))
def test_sweep_wrong_file(case):
    digits = f"{ROOT}/configs/digits_demo.yaml"
    with pytest.raises(ConfigErrors) as refused:
        expanded(case.text.replace("digits.yaml", digits))
    problems = [(place.replace("digits.yaml", digits), *rest) for place, *rest in case.problems]
    case._replace(problems=problems).check(refused.value)


def test_sweep_reports_all_configs_at_once():
    vary = "vary:\n  criterion.temperature: [0.1, -1, 0]\n  meta.seed: [0, x]\n"
    with pytest.raises(ConfigErrors) as refused:
        expanded(f"{DIGITS}{vary}commands: [train]\nset:\n  optimization.lrr: 3\n")
    assert str(refused.value) == (
        "3 problems in the config\n\n"
        "  two.yaml:3: criterion.temperature: -1, 0\n      must be a number above 0 and up to 1,000,000,000\n"
        "  two.yaml:4: meta.seed: x\n      must be a whole number from 0 to 2^63 - 1\n"
        "  two.yaml:7: optimization.lrr: 3\n      there is no such key; did you mean optimization.lr?"
    )


def test_sweep_names_of_runs():
    for text, expected in (
        ("vary: {meta.seed: [0, 1], data.split.fraction: [0.1], data.split.seed: [7]}\n",
         "two-meta.seed0-fraction0.1-data.split.seed7 two-meta.seed1-fraction0.1-data.split.seed7"),
        ("runs: {a: {}, b: {criterion.temperature: 0.5}}\nvary: {meta.seed: [0, 1]}\n",
         "two-a-seed0 two-a-seed1 two-b-seed0 two-b-seed1"),
        ('name: "{run}.{data.augmentation.crop_scale}"\nruns: {a: {}, b: {criterion.temperature: 0.5}}\n'
         "vary: {data.augmentation.crop_scale: [[0.2, 1.0], [0.4, 1.0]]}\n",
         "a.0.2_1.0 a.0.4_1.0 b.0.2_1.0 b.0.4_1.0"),
    ):  # fmt: skip
        assert [run.name for run in expanded(f"{DIGITS}{text}commands: [train]\n")] == expected.split()


def test_sweep_base_of_a_run_and_settings_of_a_command():
    text = (
        DIGITS
        + f"runs: {{s: {{base: {ROOT}/configs/digits_simclr.yaml}}, d: {{}}}}\n"
        + "commands:\n  train:\n  evaluate knn:\n    set: {evaluation.knn_k: 3}\n    every_checkpoint: true\n"
        + "  evaluate npi: {encoder: finetune/x, runs: {a: {npi.views: 1}, b: {npi.views: 2}}}\n"
    )
    first, second = expanded(text)
    assert [run.jobs[0].config.criterion.supervised_epochs for run in (first, second)] == [0, "all"]
    train, knn, one, two = first.jobs
    assert (train.config.evaluation.knn_k, knn.config.evaluation.knn_k) == (10, 3)
    assert knn.arguments[-1] == "--every-checkpoint"
    assert one.arguments[-2:] == two.arguments[-2:] == ("--encoder", "runs/two-s/finetune/x")
    assert [job.config.npi.views for job in (one, two)] == [1, 2]


def test_sweep_overrides_apply_to_all_runs_and_set_nothing_that_varies():
    runs = expanded(TWO, "meta.seed=3", "logging.folder=elsewhere")
    assert [run.jobs[1].config.meta.seed for run in runs] == [3, 3]
    assert runs[0].jobs[0].config.run_folder == Path("elsewhere/two-fraction0.1")
    more = "{train: , evaluate knn: {vary: {evaluation.knn_k: [1, 2]}}}"
    more = TWO.replace("[train, evaluate knn]", more) + (
        "runs: {a: {criterion.temperature: 1}, b: {criterion.temperature: 0.5}}\n"
        "name: a{criterion.temperature}-{data.split.fraction}\n"
    )
    kept = ("criterion.temperature=1", "evaluation.knn_k=1")
    for override in ("data.split.fraction=1", "data.split={fraction: 1}", *kept):
        with pytest.raises(ConfigErrors, match="varies in this sweep; leave it out, or choose runs with"):
            expanded(more, override)


def test_as_yaml_reads_back():
    plain = [None, True, 7, -1.5, 1e-07, 1e22, [], "text", "\u00e9", 99 * "a b "]
    quoted = ["", "null", "~", "1", "1_0", ".inf", "1e-4", "yes", "a b", "#x", "a: b", "-", "[x", "'\"\\"]
    for value in (*plain, *quoted, [plain, quoted]):
        back = parse(as_yaml(value), "", key="x").values
        assert repr(back) == repr(value)


@given(st.integers(1, 40), st.integers(1, 50))
def test_runs_of_task_every_run_exactly_once(count, tasks):
    runs = [Run(f"run{i}", ()) for i in range(count)]
    parts = [runs_of_task(runs, (i, tasks), {})[0] for i in range(1, tasks + 1)]
    assert sorted((run for part in parts for run in part), key=runs.index) == runs
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    slurm = [runs_of_task(runs, None, {"SLURM_ARRAY_TASK_ID": str(i)})[0] for i in range(1, count + 1)]
    assert slurm == [[run] for run in runs]


def test_runs_of_task_in_a_slurm_array():
    runs = [Run("a", ()), Run("b", ())]
    assert runs_of_task(runs, (2, 2), {"SLURM_ARRAY_TASK_ID": "1"})[0] == runs[1:]  # --task takes precedence
    with pytest.raises(ConfigError, match="there is no run 0: a Slurm array of the 2 runs is --array=1-2"):
        runs_of_task(runs, None, {"SLURM_ARRAY_TASK_ID": "0"})


def test_runs_named():
    runs = [Run(name, ()) for name in ("a-1", "a-2", "b-1")]
    assert [run.name for run in runs_named(runs, ["a-*", "b-1"])] == ["a-1", "a-2", "b-1"]
    assert runs_named(runs, []) == runs
    message = "--only 2: no run has such a name; --dry-run lists the 3 runs"
    with pytest.raises(ConfigError, match=message):
        runs_named(runs, ["a-1", "2"])
