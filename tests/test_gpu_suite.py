"""The suite for a bare GPU machine keeps to its time, survives its parts, and leaves what it found."""

import json
import time
from pathlib import Path

import torch

from tools import gpu_parts, gpu_suite
from tools.gpu_speed import Options, table
from tools.gpu_suite import PARTS, Part, suite

GOOD = Part("good", 1, "says hello", ("-c", "print('hello')"))
BROKEN = Part("broken", 1, "fails", ("-c", "import sys; print('why it failed'); sys.exit(3)"))
HANGING = Part(
    "hanging",
    0.05,
    "never ends, nor does its child",
    (
        "-c",
        "import subprocess, sys, time; c = [sys.executable, '-c', 'import time; time.sleep(99)'];"
        "print(subprocess.Popen(c).pid, flush=True); time.sleep(99)",
    ),
)


def test_a_part_that_fails_or_hangs_takes_nothing_along(tmp_path):
    began = time.perf_counter()
    report = suite([BROKEN, HANGING, GOOD], 2, "cpu", True, tmp_path / "suite")
    assert [part["status"] for part in report["parts"]] == ["failed (3)", "out of time", "done"]
    assert time.perf_counter() - began < 30
    assert json.loads((tmp_path / "suite.json").read_text()) == report
    text = (tmp_path / "suite.md").read_text()
    assert (
        "why it failed" in text and "hello" in text and "| hanging: never ends, nor does its child |" in text
    )
    child = int(report["parts"][1]["said"])
    status = Path(f"/proc/{child}/status")
    # Gone, or dead and not yet fetched by whoever inherited it.
    assert not status.exists() or "zombie" in status.read_text()


def test_what_no_time_is_left_for_is_left_out_and_named(tmp_path):
    report = suite([GOOD, BROKEN], 0.1, "cpu", True, tmp_path / "suite")
    assert [part["status"] for part in report["parts"]] == ["left out: no time"] * 2
    assert "left out: no time" in (tmp_path / "suite.md").read_text()


def test_the_suite_runs_a_real_part_and_draws_its_table(tmp_path, capsys):
    arguments = [
        "--minutes",
        "2",
        "--device",
        "cpu",
        "--small",
        "--only",
        "losses",
        "--output",
        f"{tmp_path}/suite",
    ]
    assert gpu_suite.main(arguments) == 0
    assert "losses" in capsys.readouterr().out
    text = (tmp_path / "suite.md").read_text()
    assert "### losses: 256 rows of 128, forward and backward" in text and "| suncet |" in text
    assert "no figure of it is a measurement" in text


def test_parts_come_in_the_order_of_worth_and_all_can_be_run():
    names = [part.name for part in PARTS]
    assert names[:5] == ["tests", "kernels", "pixels", "resume", "precision"] and names[-1] == "race"
    assert set(names) - {"tests"} == set(gpu_parts.PARTS)
    assert sum(part.limit for part in PARTS) <= 50


def test_a_part_that_finds_something_wrong_ends_with_1(tmp_path, monkeypatch):
    found = table("x", [""], []) | {"wrong": ["a kernel"]}
    monkeypatch.setitem(gpu_parts.PARTS, "kernels", lambda options: found)
    assert gpu_parts.main(["kernels", "--device", "cpu", "--json", str(tmp_path / "k.json")]) == 1
    assert json.loads((tmp_path / "k.json").read_text()) == found


def test_a_resumed_run_that_differs_is_seen(tmp_path, monkeypatch):
    real, calls = gpu_parts.trained, []

    def spoiled(config):
        loaded = real(config)
        calls.append(config)
        if len(calls) == 2:
            name = next(iter(loaded.model))
            loaded.model[name] = loaded.model[name] + 1e-6
        return loaded

    monkeypatch.setattr(gpu_parts, "trained", spoiled)
    torch.set_num_threads(1)
    found = gpu_parts.resume(Options("cpu", True, tmp_path / "pictures", tmp_path))
    assert found["wrong"] == ["fp32"]
    assert [row[1] for row in found["tables"][0]["rows"]] == ["DIFFERENT", "equal to the bit"]
