"""The suite for a bare GPU machine keeps to its time, survives its parts, and leaves what it found."""

import gzip
import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from pipelines.sampling.augmentation import Augmentation
from tests.support.ranks import is_alive
from tools.gpu import suite as gpu_suite
from tools.gpu import workloads
from tools.gpu.suite import PARTS, Part, suite

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, what: str, code: str, limit: float = 1) -> Part:
    return Part(name, limit, what, f"-c {shlex.quote(code)}")


GOOD = script("good", "succeeds", "print('hello')")
# A library can print what is no UTF-8, and a part that is killed half a character.
FAILS = r"import sys; sys.stdout.buffer.write(b'\xff why it failed\n'); sys.exit(3)"
BROKEN = script("broken", "fails", FAILS)
HANGING = script("hanging", "never ends", "import time; print('begun'); time.sleep(99)", limit=0.05)


@pytest.fixture
def no_images(monkeypatch):
    monkeypatch.setattr(gpu_suite, "generate_images", lambda folder, small: None)


def test_suite_continues_after_a_part_that_fails_or_hangs_or_has_no_time(tmp_path, no_images):
    began = time.perf_counter()
    statuses = suite([BROKEN, HANGING, GOOD], 2, "cpu", False, tmp_path / "suite", "a CPU")
    assert statuses == ["failed (3)", "out of time", "done"]
    assert time.perf_counter() - began < 60
    text = (tmp_path / "suite.md").read_text()
    assert re.search(r"### broken: fails\n\nfailed \(3\), [\d.]+ s\n\n~~~\n\ufffd why it failed\n~~~\n", text)
    assert re.search(r"### good: succeeds\n\ndone, [\d.]+ s\n\n~~~\nhello\n~~~\n", text)
    assert re.search(r"### hanging: .*\n\nout of time, [\d.]+ s\n\n~~~\nbegun\n~~~\n", text)
    assert suite([GOOD, BROKEN], 0.1, "cpu", True, tmp_path / "suite", "a CPU") == ["left out: no time"] * 2
    assert "### broken: fails\n\nleft out: no time" in (tmp_path / "suite.md").read_text()


def test_part_ends_with_a_suite_that_is_killed(tmp_path):
    """A command that reaches its time limit is killed, and the next one measures on the same GPU."""
    path = tmp_path / "pid"
    words = ["-c", f"import os, time; os.symlink(str(os.getpid()), {str(path)!r}); time.sleep(99)"]
    process = multiprocessing.get_context("fork").Process(target=gpu_suite.run_part, args=(words, 99))
    process.start()
    while not path.is_symlink():
        time.sleep(0.1)
    process.kill()
    process.join()
    assert not is_alive(int(os.readlink(path)))


def test_suite_runs_a_tool_and_publishes_no_folder_of_the_machine(tmp_path, monkeypatch, capsys, no_images):
    words = ["--minutes=5", "--device=cpu", "--small", "--only", "losses", "--output", f"{tmp_path}/suite"]
    monkeypatch.setattr(sys, "argv", ["/home/me/fastsuncet/tools/gpu/suite.py", *words])
    assert gpu_suite.main(words) == 0, capsys.readouterr().out
    text = (tmp_path / "suite.md").read_text()
    assert re.search(
        r"### losses: SuNCEt, .*\n\ndone, [\d.]+ s\n\n.*\n\nsuncet, N = 512, .*\n\n\|", text, re.S
    )
    assert "none of its figures is a measurement" in text and "lowest and highest" in text
    assert f"{os.cpu_count()} cores, load " in text and f"torch {torch.__version__}" in text
    assert "`python tools/gpu/suite.py --minutes=5 --device=cpu --small --only losses`" in text
    assert str(tmp_path) not in text and "/home" not in text


def test_suite_without_a_gpu_or_a_folder_starts_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_suite.main(["--minutes", "2", "--output", f"{tmp_path}/suite"]) == 2
    error = capsys.readouterr().err
    assert "no GPU can be used here (RuntimeError: " in error and "); --device cpu --small runs" in error
    assert gpu_suite.main(["--minutes", "2", "--device", "cpu", "--output", f"{tmp_path}/new/suite"]) == 2
    assert "new is not a writable folder: create it first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_parts_are_ordered_by_worth_and_fit_into_45_minutes_and_calls_of_ten():
    names = [part.name for part in PARTS]
    assert names[:3] == ["imagenet", "profile", "feed"]
    assert sum(part.limit for part in PARTS) <= 45 and max(part.limit for part in PARTS) <= 8
    assert workloads.PARTS.keys() <= set(names)
    command = gpu_suite.command(PARTS[0], "cuda", False, Path("folder"), Path("found"), 8)
    assert command[-3:] == ["--against", *gpu_suite.FAST.split()] and "optimization.warmup=0" in command


@pytest.mark.parametrize("part", ["feed", "profile", "start"])
def test_workload_rehearsal_on_a_cpu_reports_its_table(part, tmp_path, images, monkeypatch, capsys):
    """Without jitter, DALI's graph is built in a third of the time."""
    monkeypatch.setattr(workloads, "Augmentation", partial(Augmentation, jitter=0))
    torch.set_num_threads(1)
    words = [part, "--folder", str(images), "--device", "cpu", "--quick", "--output", f"{tmp_path}/found"]
    assert workloads.main(words) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^\| --- .*\n\| |^ +[\d.]+ s  the end\n```\n\nexit code 0$", printed, re.M)
    # cProfile ends with 0 whatever the run ends with.
    assert part != "start" or (images / "runs" / "second" / "export").exists()
    traces = [json.loads(gzip.decompress(path.read_bytes())) for path in tmp_path.glob("found_*.json.gz")]
    assert len(traces) == printed.count("Self CPU time total") == 2 * (part == "profile")
    assert all("aten::convolution" in {e.get("name") for e in trace["traceEvents"]} for trace in traces)


def test_seconds_until_launched_begin_behind_an_empty_queue(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("empty"))
    monkeypatch.setattr(workloads.time, "perf_counter", lambda: len(seen))
    assert workloads.seconds_until_launched(lambda: seen.append("launched"), "cuda", 2) == 1
    assert seen == ["empty", "launched"] * 2


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    workloads.generate_images(folder, small=True)
    return folder


def test_suite_collects_its_tests_and_imports_its_parts_on_a_bare_machine(tmp_path):
    """Packages that the tests of this repository use, and that a machine with torch and pytest need not have."""
    absent = "hypothesis sklearn scipy matplotlib pytest_timeout lightly".split()  # noqa: SIM905
    # None in sys.modules is an ImportError.
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({absent!r}))")
    bare = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = gpu_suite.gpu_tests()
    code = f"import sys, pytest, tools.gpu.workloads; sys.exit(pytest.main({[*words[2:], '--collect-only']}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_every_kernel_agrees" in done.stdout
