"""The suite for a bare GPU machine keeps to its time, survives its parts, and leaves what it found."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.ranks import is_alive
from tools.bench import harness
from tools.gpu import suite as gpu_suite
from tools.gpu import workloads
from tools.gpu.suite import PARTS, Options, Part, suite

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, what: str, code: str, limit: float = 1) -> Part:
    return Part(name, limit, what, lambda options: ["-c", code], reports=False)


GOOD = script("good", "succeeds", "print('hello')")
# A library can print what is no UTF-8, and a part that is killed half a character.
BROKEN = script(
    "broken", "fails", r"import sys; sys.stdout.buffer.write(b'\xff why it failed\n'); sys.exit(3)"
)
HANGING = script(
    "hanging",
    "never ends, nor does its child",
    "import subprocess, sys, time; c = [sys.executable, '-c', 'import time; time.sleep(99)'];"
    "print(subprocess.Popen(c).pid, flush=True); time.sleep(99)",
    limit=0.05,
)


@pytest.fixture
def no_images(monkeypatch):
    monkeypatch.setattr(gpu_suite, "generate_images", lambda folder, small: None)


def test_suite_continues_after_a_part_that_fails_or_hangs(tmp_path, no_images):
    began = time.perf_counter()
    records = suite([BROKEN, HANGING, GOOD], 2, "cpu", False, tmp_path / "suite", "a CPU")
    assert [record["status"] for record in records] == ["failed (3)", "out of time", "done"]
    assert time.perf_counter() - began < 60
    assert json.loads((tmp_path / "suite.json").read_text())["parts"] == records
    text = (tmp_path / "suite.md").read_text()
    assert "why it failed" in text and "hello" in text
    assert "| hanging: never ends, nor does its child | out of time |" in text
    assert not is_alive(int(records[1]["output"]))


def test_part_ends_with_a_suite_that_is_killed(tmp_path):
    """A command that reaches its time limit is killed, and the next one measures on the same GPU."""
    path = tmp_path / "pid"
    words = ["-c", f"import os, time; os.symlink(str(os.getpid()), {str(path)!r}); time.sleep(99)"]
    context, arguments = multiprocessing.get_context("fork"), (GOOD, words, 99, tmp_path / "found")
    process = context.Process(target=gpu_suite.run_part, args=arguments)
    process.start()
    while not path.is_symlink():
        time.sleep(0.1)
    process.kill()
    process.join()
    assert not is_alive(int(os.readlink(path)))


def test_suite_names_the_parts_that_it_has_no_time_for(tmp_path, no_images):
    records = suite([GOOD, BROKEN], 0.1, "cpu", True, tmp_path / "suite", "a CPU")
    assert [record["status"] for record in records] == ["left out: no time"] * 2
    assert "left out: no time" in (tmp_path / "suite.md").read_text()


def test_suite_runs_a_tool_and_publishes_no_folder_of_the_machine(tmp_path, monkeypatch, capsys, no_images):
    words = ["--minutes=5", "--device=cpu", "--small", "--only", "lars", "--output", f"{tmp_path}/suite"]
    monkeypatch.setattr(gpu_suite, "PIXELS", GOOD)
    monkeypatch.setattr(sys, "argv", ["/home/me/fastsuncet/tools/gpu/suite.py", *words])
    assert gpu_suite.main(words) == 0, capsys.readouterr().out
    text = (tmp_path / "suite.md").read_text()
    assert (
        "### lars: a LARS step\n\none step, " in text
        and "no 'fastsuncet kernel': it needs a CUDA device" in text
    )
    assert "none of its figures is a measurement" in text and "lowest and highest" in text
    assert f"{os.cpu_count()} cores, load " in text and f"torch {torch.__version__}" in text
    assert "`python tools/gpu/suite.py --minutes=5 --device=cpu --small --only lars`" in text
    assert str(tmp_path) not in text and "/home" not in text


def test_suite_reads_images_by_torchvision_where_dali_fails(tmp_path, no_images, monkeypatch):
    """DALI is tried by the first part; the others see the result in the folder of their images."""
    asks = Part("asks", 1, "", lambda o: ["-c", f"print({workloads.backend(o.folder)!r})"], reports=False)
    for first, expected in ((BROKEN, "torchvision"), (GOOD, "dali")):
        monkeypatch.setattr(gpu_suite, "PIXELS", first)
        records = suite([first, asks], 2, "cpu", True, tmp_path / "suite", "a CPU")
        assert records[1]["output"] == f"data.backend={expected}\n"


def test_section_names_what_is_wrong():
    report = {"environment": harness.environment(), "card": "x", "parts": [], "tables": []}
    found = {"tables": [harness.table("t", [{"a": 1}], [("", "a", str)])], "wrong": ["y", "z"]}
    report["parts"] = [{"name": "p", "what": "w", "status": "failed (1)", "seconds": 1.0, "found": found}]
    text = gpu_suite.section(report)
    assert "### p: w\n\nt\n\n|  |\n| --- |\n| 1 |\n\nWRONG: y\n\nWRONG: z\n" in text


def test_suite_without_a_gpu_or_a_folder_starts_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_suite.main(["--minutes", "2", "--output", f"{tmp_path}/suite"]) == 2
    error = capsys.readouterr().err
    assert "no GPU can be used here (RuntimeError: " in error and "); --device cpu --small runs" in error
    assert gpu_suite.main(["--minutes", "2", "--device", "cpu", "--output", f"{tmp_path}/new/suite"]) == 2
    assert "new is not a writable folder: create it first" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_cards_are_named_with_the_driver(monkeypatch):
    """The cards come from another process, the driver from this one."""
    monkeypatch.setattr(gpu_suite, "CARDS", "print('H100 81559 MiB')")
    monkeypatch.setattr(gpu_suite, "driver_version", lambda: 13000)
    assert gpu_suite.cards() == "H100 81559 MiB; driver for CUDA 13000"


def test_parts_are_ordered_by_worth_and_fit_into_45_minutes_and_calls_of_ten():
    names = [part.name for part in PARTS]
    assert names[:4] == ["pixels", "imagenet", "profile", "feed"]
    assert sum(part.limit for part in PARTS) <= 45 and max(part.limit for part in PARTS) <= 8
    assert workloads.PARTS.keys() <= set(names)
    command = PARTS[1].command(Options("cuda", False, Path("folder")))
    settings = command.index("--against") + 1
    assert tuple(command[settings : settings + 2]) == gpu_suite.FAST


@pytest.mark.parametrize("part", ["pixels", "feed", "profile"])
def test_workload_rehearsal_on_a_cpu_reports_its_table(part, tmp_path, images):
    torch.set_num_threads(1)
    path = tmp_path / "found.json"
    words = [part, "--folder", str(images), "--device", "cpu", "--quick", "--json", str(path)]
    assert workloads.main(words) == 0
    tables = json.loads(path.read_text())["tables"]
    assert tables and all(table["rows"] for table in tables)


def made_up_trace(steps):
    """Steps of 100 us: two kernels of training, the second launched late, and DALI's kernel, copy and allocation."""

    def event(cat, name, ts, dur, tid=1, **args):
        return {"ph": "X", "cat": cat, "name": name, "ts": float(ts), "dur": dur, "tid": tid, "args": args}

    events = [event("cuda_runtime", "cudaDeviceSynchronize", 100 * steps - 10, 50), {"ph": "M", "name": "x"}]
    for i in range(steps):
        t = 100 * i
        events += [
            event("kernel", "second", t + 60, 30, stream=7, correlation=3 * i + 1),
            event("kernel", "first", t, 40, stream=7, correlation=3 * i),
            event("kernel", "nchwToNhwcKernel", t + 30, 20, stream=20, correlation=3 * i + 2),
            event("gpu_memcpy", "Memcpy HtoD", t + 95, 10, stream=20, bytes=2_000_000),
            event("cuda_runtime", "cudaLaunchKernel", t - 20, 2, correlation=3 * i),
            event("cuda_runtime", "cudaLaunchKernel", t + 45, 10, correlation=3 * i + 1),
            event("cuda_runtime", "cudaLaunchKernel", t + 20, 1, tid=2, correlation=3 * i + 2),
            event("cuda_runtime", "cudaMalloc", t + 50, 40, tid=2, correlation=9999),
        ]
    return events


def test_where_time_goes_of_a_made_up_trace():
    found = workloads.where_time_goes(made_up_trace(5), 3, 1)
    assert found["figures"] == pytest.approx(
        {
            "ms a step, median": 0.1,
            "ms a step, longest": 0.1,
            "% of the time without a kernel": 20,
            "% of the time without a kernel of training": 30,
            # From the end of the first kernel to that of the second one's launch, which is 5 us before its start.
            "ms a step that training's stream waits for the host's launch": 0.015,
            "ms a step that a launched kernel of training waits on an idle stream": 0.015,
            "ms from a launch to its kernel, median": 0.02,
        }
    )
    assert found["work"] == {
        "kernels of training": pytest.approx([2, 0.07, 0]),
        "kernels of stream 20": pytest.approx([1, 0.02, 0]),
        "Memcpy HtoD": pytest.approx([1, 0.01, 2]),
        "layout conversions, among the kernels": pytest.approx([1, 0.02, 0]),
    }
    # Without the synchronization that ends the profile.
    assert found["calls"] == {
        "cudaLaunchKernel, training threads": pytest.approx([2, 0.012, 0]),
        "cudaLaunchKernel, other threads": pytest.approx([1, 0.001, 0]),
        "cudaMalloc, other threads": pytest.approx([1, 0.04, 0]),
    }
    assert found["kernels"]["second"] == pytest.approx([1, 0.03, 0])


def test_profile_tables_name_the_kernels_that_differ_most_first():
    fixed = [e for e in made_up_trace(5) if e.get("args", {}).get("stream") != 20]
    for e in fixed:
        e["dur"] = 5 if e["name"] == "second" else e.get("dur")
    traces = dict(zip(workloads.WAYS, (fixed, made_up_trace(5))))
    found = {way: workloads.where_time_goes(events, 3, 1) for way, events in traces.items()}
    tables = {table["title"]: table["rows"] for table in workloads.profile_tables(found)}
    assert tables["the kernels that differ most, a step"] == [
        ["second", "0.005 ms, 1.0 x", "0.030 ms, 1.0 x"],
        ["nchwToNhwcKernel", "", "0.020 ms, 1.0 x"],
        ["first", "0.040 ms, 1.0 x", "0.040 ms, 1.0 x"],
    ]
    assert ["Memcpy HtoD", "", "0.010 ms, 1.0 x, 2.0 MB"] in tables["the GPU's work, a step"]
    assert tables["the kernels that take longest, a step"][0][0] == "first"
    assert len(tables["where the time goes"]) == 7


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generated")
    workloads.generate_images(folder, small=True)
    return folder


def test_resume_compares_two_runs_and_returns_1_if_they_differ(images, monkeypatch, capsys):
    """Both runs in bf16 are equal; of the one in fp32 a weight is changed after it was continued."""
    real, calls = workloads.final_state, []

    def spoiled(config):
        calls.append(config)
        model, *rest = real(config)
        if len(calls) == 1:
            name = next(iter(model))
            model = {**model, name: model[name] + 1e-6}
        return model, *rest

    monkeypatch.setattr(workloads, "final_state", spoiled)
    torch.set_num_threads(1)
    assert workloads.main(["resume", "--folder", str(images), "--device", "cpu", "--quick"]) == 1
    printed = capsys.readouterr().out
    assert "| fp32 | DIFFERENT: state[0]." in printed and "| bf16 | equal to the bit |" in printed
    assert "WRONG: a continued run in fp32 does not end as the whole one\n" in printed
    assert "in bf16 does not" not in printed


def test_suite_collects_its_tests_and_imports_its_parts_on_a_bare_machine(tmp_path):
    """Packages that the tests of this repository use, and that a machine with torch and pytest need not have."""
    absent = "hypothesis sklearn scipy matplotlib pytest_timeout lightly".split()  # noqa: SIM905
    # None in sys.modules is an ImportError.
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({absent!r}))")
    bare = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = gpu_suite.gpu_tests(Options("cuda", False, tmp_path))
    code = f"import sys, pytest, tools.gpu.workloads; sys.exit(pytest.main({[*words[2:], '--collect-only']}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "test_every_kernel_agrees" in done.stdout
