"""The suite for a bare GPU machine keeps to its time, survives its parts, and leaves what it found."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tools.gpu import drawn_digits
from tools.gpu import parts as gpu_parts
from tools.gpu import suite as gpu_suite
from tools.gpu.drawn_digits import draw_digits
from tools.gpu.speed import Options, table
from tools.gpu.suite import GPU_TESTS, PARTS, Part, suite

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


def test_the_section_says_on_what_it_was_measured_and_not_where_that_machine_keeps_things(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        sys,
        "argv",
        ["/home/me/fastsuncet/tools/gpu/suite.py", "--output", f"{tmp_path}/suite", "--minutes", "2"],
    )
    text = gpu_suite.markdown(suite([GOOD], 2, "cpu", True, tmp_path / "suite"))
    assert f"{os.cpu_count()} cores, load " in text and f"CUDA {torch.version.cuda or 'none'}" in text
    assert (
        "`python tools/gpu/suite.py --minutes 2`" in text
        and str(tmp_path) not in text
        and "/home" not in text
    )
    assert "lowest and highest" in text


def test_small_networks_on_a_card_are_a_rehearsal_too_and_a_card_is_told_with_its_units(monkeypatch):
    line = "NVIDIA H200, 580.65.06, 143771 MiB, 1980 MHz"
    asked = subprocess.CompletedProcess([], 0, stdout=f"{line}\n{line}\n", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: asked)
    told = "NVIDIA H200, one of 2, driver 580.65.06, 143771 MiB, 1980 MHz at most"
    assert gpu_suite.card("cuda", False) == told
    assert gpu_suite.card("cuda", True).startswith("a rehearsal with small networks: no figure")


def test_without_a_gpu_or_a_folder_nothing_is_started_and_nothing_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_suite.main(["--minutes", "2", "--output", f"{tmp_path}/suite"]) == 2
    assert "here (torch sees no GPU); --device cpu --small rehearses" in capsys.readouterr().err
    assert gpu_suite.main(["--minutes", "2", "--device", "cpu", "--output", f"{tmp_path}/new/suite"]) == 2
    assert "new is no folder that can be written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_parts_come_in_the_order_of_worth_and_all_can_be_run():
    names = [part.name for part in PARTS]
    assert names[:5] == ["tests", "kernels", "pixels", "resume", "precision"] and names[-1] == "race"
    assert set(names) - {"tests"} == set(gpu_parts.PARTS)
    assert sum(part.limit for part in PARTS) <= 50


def test_pixels_far_from_those_of_the_cpu_are_wrong_and_a_proof_without_words_is_told():
    rows = [
        ["crop", "0.165", "1", "0.2", "2"],
        ["hue", "41.0", "255", "0.2", "2"],
        ["blur", "nan", "0", "0", "0"],
    ]
    assert gpu_parts.far_off(rows) == ["hue", "blur"]

    def silent():
        raise AssertionError

    assert gpu_parts.verdict(silent) == "WRONG: AssertionError: "


def test_what_a_part_found_wrong_is_in_the_section_and_silence_is_not(tmp_path):
    report = suite([GOOD], 2, "cpu", True, tmp_path / "suite")
    report["parts"][0] |= {
        "found": table("x", ["", ""], []) | {"wrong": ["lars.cu", "norm.cu"]},
        "said": "\n",
    }
    text = gpu_suite.markdown(report)
    assert "**Wrong in good:** lars.cu, norm.cu." in text and "said last" not in text


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


ROOT = Path(__file__).resolve().parents[2]
# What the tests of this repository use, and a machine with torch, torchvision, timm, PyYAML and pytest need not have.
NOT_THERE = (
    "hypothesis",
    "sklearn",
    "scipy",
    "matplotlib",
    "pytest_timeout",
    "lightly",
    "pytorch_metric_learning",
)


def test_every_file_with_a_test_for_a_gpu_is_among_those_the_suite_runs():
    mark = "mark.gpu"  # as it stands in those files, but not in this one: "pytest" comes before it
    holding = {
        str(p.relative_to(ROOT)) for p in ROOT.glob("tests/test_*.py") if f"pytest.{mark}" in p.read_text()
    }
    assert holding <= set(GPU_TESTS) and all((ROOT / name).is_file() for name in GPU_TESTS)


def test_on_a_bare_machine_the_suite_finds_its_tests_and_its_parts(tmp_path):
    blocked = f"import sys; sys.modules.update(dict.fromkeys({NOT_THERE!r}))"  # None there is an ImportError
    (tmp_path / "sitecustomize.py").write_text(blocked)
    bare = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    (tests,) = (part for part in PARTS if part.name == "tests")
    command = f"import sys, pytest, tools.gpu.parts; sys.exit(pytest.main({[*tests.command[2:], '--collect-only']}))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_every_kernel_agrees_with_its_twin" in done.stdout


def test_without_scikit_learn_the_small_runs_learn_from_drawn_digits(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "sklearn" else find(name, *rest)
    )
    torch.set_num_threads(1)
    found = gpu_parts.precision(Options("cpu", True, tmp_path / "pictures", tmp_path))
    assert found["tables"][0]["title"] == "the loss on drawn digits (no scikit-learn here) in two precisions"
    assert len(found["curves"]["bf16"]) == 12 and (tmp_path / "digits" / "train").is_dir()


def test_drawn_digits_are_the_same_again_and_each_class_is_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(drawn_digits, "COUNTS", {"train": 24, "test": 6})
    (tmp_path / "a.part" / "train").mkdir(parents=True)  # of somebody whose time ran out
    pixels = []
    for folder in [draw_digits(tmp_path / "a"), draw_digits(tmp_path / "b"), draw_digits(tmp_path / "a")]:
        files = sorted(folder.glob("*/*/*.png"))
        pixels.append(np.stack([np.asarray(Image.open(file)) for file in files]).astype(np.float64))
    assert pixels[0].shape == (300, 32, 32, 3) and np.array_equal(pixels[0], pixels[1])
    classes = np.array([file.parent.name for file in files])
    means = {name: pixels[0][classes == name].mean(0) for name in set(classes)}
    nearest = [min(means, key=lambda name, one=one: ((means[name] - one) ** 2).sum()) for one in pixels[0]]
    assert (
        np.mean(nearest == classes) > 0.3
    )  # 0.1 by chance, by a mean of pixels 0.4: there is something to learn


def test_what_a_part_had_found_when_its_time_ran_out_is_kept(tmp_path, monkeypatch):
    first = table("so far", ["", ""], [["a", 1]])

    def cut_short(options):
        options.keep(first)
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_parts.PARTS, "ladder", cut_short)
    file = tmp_path / "ladder.json"
    try:
        gpu_parts.main(["ladder", "--device", "cpu", "--json", str(file)])
    except KeyboardInterrupt:
        assert json.loads(file.read_text()) == first
    else:
        raise AssertionError("the part was not cut short")
