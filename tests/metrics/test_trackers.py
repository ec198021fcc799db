"""What the trackers hold of a run: config, numbers, pictures, results. The real packages where they are installed."""

import contextlib
import re
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest

from fastsuncet.errors import FastSuncetError, Preempted
from fastsuncet.metrics import trackers
from fastsuncet.metrics.results import send_results
from fastsuncet.metrics.trackers import Trackers
from fastsuncet.metrics.writer import MetricsWriter, read
from tests.support import trackers as support
from tests.support.reports import result
from tests.support.runs import small_config

COLUMNS = ("loss", "lr")
CALLS = ("__init__", "settings", "write", "close")  # of a tracker
FAILED = "{} failed and gets nothing more ({}); the files of the run have it all"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB__TRANSACTION_LOG_FLUSH_INTERVAL"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("WANDB_ERROR_REPORTING", "MLFLOW_DISABLE_TELEMETRY"):  # what the code sets is taken back
        monkeypatch.setenv(name, "true")


def config_of(tmp_path, name: str, *overrides: str):
    value = "true" if name == "tensorboard" else "project"
    return small_config(tmp_path, f"logging.{name}={value}", *overrides)


def run(config, first: int, last: int) -> list[str]:
    """Write the steps after `first` up to `last` as a run or a continued one; return what was printed."""
    said = []
    options = {"say": said.append, "resume_step": first or None}
    with MetricsWriter(config.run_folder, COLUMNS, config, **options) as writer:
        writer.write({"step": first, "paths": []}, kind="chosen")  # without a number
        for step in range(first + 1, last + 1):
            writer.write({"step": step, "loss": 1 / step, "lr": 0.5})
            writer.sync()
        writer.write({"step": last, "accuracy": 0.25}, kind="knn")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_tracker_holds_config_numbers_views_and_results_of_a_continued_run(tmp_path, monkeypatch, name):
    """Also of one whose folder was moved, and nothing is written to its old place."""
    support.package(monkeypatch, name)
    config = config_of(tmp_path, name, f"logging.folder={tmp_path / 'before'}")
    pixels = np.zeros((9, 8, 3), np.uint8)
    with Trackers(config, config.run_folder) as before_the_start:
        before_the_start.tell(lambda tracker: tracker.picture("views", pixels, 0))
    said = run(config, 0, 4)
    assert said[0].startswith("metrics: also to ") and not [line for line in said if "failed" in line]
    # From step 2 on, with another value of a key that is free.
    (tmp_path / "before").rename(tmp_path / "after")
    support.forget(name)
    config = config_of(tmp_path, name, f"logging.folder={tmp_path / 'after'}", "logging.log_every=3")
    assert not [line for line in run(config, 2, 3) if "failed" in line]
    send_results(config, [result(config.run_folder, 4, 0.5, tag="labels10-step_00000004")])

    assert not (tmp_path / "before").exists()
    held = support.held[name](config.run_folder)
    hidden = name == "tensorboard"  # the other two keep what a restart undid
    losses = [(1, 1.0), (2, 0.5), (3, 1 / 3)] + ([] if hidden else [(4, 0.25), (3, 1 / 3)])
    assert held["numbers"]["train/loss"] == [(step, pytest.approx(loss)) for step, loss in losses]
    assert held["numbers"]["results/finetune/labels10/top1"] == [(4, 0.5)]
    assert held["numbers"]["knn/accuracy"][-1] == (3, 0.25)
    temperature = held["config"].get("criterion.temperature") or held["config"]["criterion"]["temperature"]
    assert float(temperature) == config.criterion.temperature
    assert [each for each in held["pictures"] if "views" in each]
    assert held.get("status", "FINISHED") == "FINISHED"
    if name != "wandb":
        assert any(text.startswith("config") for text in held["texts"])
        results = "results/finetune-bernoulli-0.1-step00000004"
        assert any(text.startswith(results) for text in held["texts"])


def test_wandb_is_offline_unless_the_user_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    fake = support.stand_in(monkeypatch, "wandb")
    config = config_of(tmp_path, "wandb", "logging.folder=~/runs")
    monkeypatch.delenv("WANDB_ERROR_REPORTING")
    assert "offline; WANDB_MODE=online" in run(config, 0, 1)[0]
    assert trackers.os.environ["WANDB_ERROR_REPORTING"] == "false"
    monkeypatch.setenv("WANDB_MODE", "online")
    run(config, 1, 2)
    before, after = fake.begun
    assert before["name"] == config.logging.write_tag
    assert (before["mode"], after["mode"]) == ("offline", "online")
    assert before | {"mode": ""} == after | {"mode": ""}, "the same run, continued"
    with Trackers(config, config.run_folder / "finetune" / "labels10"):
        pass
    assert fake.begun[-1]["name"] == f"{before['name']}/finetune/labels10"
    copy = tmp_path / "runs" / "copy"
    shutil.copytree(config.run_folder, copy)
    run(config_of(tmp_path, "wandb", f"logging.folder={copy.parent}", "logging.write_tag=copy"), 2, 3)
    run(config, 0, 1)
    assert len({begun["id"] for begun in fake.begun}) == 4, "a copy under another name, and a fresh start"


def test_mlflow_writes_to_a_server_and_reports_what_was_not_sent(tmp_path, monkeypatch):
    fake, config = support.stand_in(monkeypatch, "mlflow"), config_of(tmp_path, "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    run(config, 0, 1)
    assert fake.uris == {"http://server"}
    fake.unsent = iter([RuntimeError("no\n  answer"), *(RuntimeError("too late"),) * 2])
    lost = "OSError: 3 lines of numbers not sent; the first: no answer"
    assert run(config, 1, 3)[-1] == FAILED.format("MLflow", lost)


def test_mlflow_begins_again_where_it_was_stopped_as_it_made_its_file(tmp_path, monkeypatch):
    fake, config = support.stand_in(monkeypatch, "mlflow"), config_of(tmp_path, "mlflow")
    with monkeypatch.context() as patch:
        patch.setattr(fake, "search_experiments", mock.Mock(side_effect=OSError("stopped")))
        assert run(config, 0, 1)[-1] == FAILED.format("MLflow", "OSError: stopped")
    assert not (config.run_folder / "mlflow.db").exists()
    assert len(run(config, 1, 2)) == 1
    assert [path.name for path in config.run_folder.glob("mlflow.db*")] == ["mlflow.db"]


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [(Preempted("SIGTERM"), "KILLED", 75), (OSError("full"), "FAILED", 1), (None, "FINISHED", 0)],
)
def test_tracker_is_told_how_a_run_ended_and_an_evaluation_beside_it_ends_nothing(
    tmp_path, monkeypatch, failure, status, code
):
    mlflow, wandb = (support.stand_in(monkeypatch, name) for name in ("mlflow", "wandb"))
    config, started = config_of(tmp_path, "mlflow"), threading.Barrier(3)
    both = config.with_values({"logging.wandb": "project"})
    run(config, 0, 1)  # it has a status
    with (
        contextlib.suppress(Preempted, OSError),
        MetricsWriter(config.run_folder, COLUMNS, both, resume_step=1) as writer,
    ):
        writer.trackers.tell(lambda _: started.wait(60))  # in the threads of both
        started.wait(60)
        send_results(config, [])
        assert [run.info.status for run in mlflow.runs.values()] == ["RUNNING"]
        if failure:
            raise failure
    assert [run.info.status for run in mlflow.runs.values()] == [status]
    mlflow.runs["run0"].info.status = "a training's that goes on"
    send_results(config, [])
    assert mlflow.runs["run0"].info.status == "a training's that goes on"
    assert wandb.begun[-1]["exit_code"] == code


@pytest.mark.parametrize("call", ["__init__", "write", "close"])
def test_tracker_that_hangs_delays_no_line_and_the_end_for_a_moment_only(tmp_path, monkeypatch, call):
    """Whether it hangs as the run begins, in its middle or at its end."""
    monkeypatch.setattr(trackers, "PATIENCE", 0.2)
    woken, abandon = threading.Event(), mock.Mock()
    methods = {name: mock.Mock(return_value=None) for name in CALLS} | {"abandon": abandon}
    methods[call] = mock.Mock(side_effect=lambda *_: woken.wait(60))
    support.stand_in(monkeypatch, "mlflow")
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", type("MLflow", (), {"where": "there", **methods}))
    config = config_of(tmp_path, "mlflow")
    *_, last = run(config, 0, 3)
    woken.set()
    assert re.fullmatch(r"MLflow did not answer for 0 s at the end of the run, \d+ messages .*", last)
    assert [line["step"] for line in read(config.run_folder / "metrics.jsonl", "train")] == [1, 2, 3]
    abandon.assert_called_with()


@pytest.mark.slow
def test_wandb_whose_process_was_killed_hinders_neither_imports_nor_the_end(tmp_path):
    """W&B has hooks at both, which raise without its process. What it was given seconds before is kept."""
    if find_spec("wandb") is None:
        pytest.skip("needs W&B")
    program = f"""
import os, signal, sys, time
from pathlib import Path
from fastsuncet.metrics.writer import MetricsWriter
from tests.support.runs import small_config
config = small_config(Path({str(tmp_path)!r}), "logging.wandb=project")
with MetricsWriter(config.run_folder, ("loss",), config) as writer:
    writer.write({{"step": 1, "loss": 1.0}})
    time.sleep(3)
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    for core in sum(children, []):
        os.kill(int(core), signal.SIGKILL)
    for step in range(2, 50):
        writer.write({{"step": step, "loss": 1.0}})
import sklearn
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "WeightsAndBiases failed and gets nothing more" in ended.stdout and "Traceback" not in ended.stderr
    __import__("wandb")
    assert support.held["wandb"](small_config(tmp_path).run_folder)["numbers"]["train/loss"] == [(1, 1.0)]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SystemExit(3)])
@pytest.mark.parametrize("call", CALLS)
def test_tracker_that_fails_is_left_out_and_ends_nothing(tmp_path, monkeypatch, call, error):
    """The others, and the files, get every line."""
    calls = {name: mock.Mock(return_value=None) for name in (*CALLS, "abandon")}
    failing = {**calls, call: mock.Mock(side_effect=error)}
    for name, methods in (("tensorboard", failing), ("mlflow", calls)):
        support.package(monkeypatch, name)
        monkeypatch.setitem(trackers.TRACKERS, name, type(name, (), {"where": "there", **methods}))
    config = config_of(tmp_path, "tensorboard", "logging.mlflow=experiment")
    assert FAILED.format("tensorboard", f"{type(error).__name__}: {error}") in run(config, 0, 2)
    assert [line["step"] for line in read(config.run_folder / "metrics.jsonl", "train")] == [1, 2]
    assert calls["write"].call_count >= 3 and calls["close"].call_count >= 1


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_tracker_without_its_package_is_named_before_a_file_changes(tmp_path, monkeypatch, name):
    config = config_of(tmp_path, name)
    run(small_config(tmp_path), 0, 3)  # which needs it only on request
    before = (config.run_folder / "metrics.jsonl").read_bytes()
    monkeypatch.setitem(sys.modules, name, None)  # importing it now raises
    with pytest.raises(FastSuncetError, match=f"`pip install {name}`"):
        run(config, 1, 2)
    assert (config.run_folder / "metrics.jsonl").read_bytes() == before
