"""Turns, ratios, counts and reports of the benchmarks; every case compares equals; every tool's --help."""

import multiprocessing
import re
import sys
import time
from datetime import date
from functools import partial
from pathlib import Path

import pytest
import torch

from fastsuncet import load_config, nt_xent
from fastsuncet.distributed.place import Place
from fastsuncet.errors import FastSuncetError
from fastsuncet.tuning.fast_paths import PATHS, VIEW
from pipelines import cuda_compiler
from tests.support.pictures import write_pictures
from tests.support.ranks import run_code
from tools.bench import contrast, harness, lars, peers, pixels, run, step
from tools.bench.dispatch_counter import Counter
from tools.bench.harness import ratios, show_target, time_in_turns

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [p for p in sorted(ROOT.glob("tools/**/*.py")) if "__main__" in p.read_text(encoding="utf-8")]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_every_tool_answers_help_in_any_folder(script, tmp_path):
    code = f"import runpy, sys; sys.argv = ['{script}', '--help']; runpy.run_path(sys.argv[0], run_name='__main__')"
    exit_code, printed = run_code(code, tmp_path, tmp_path)
    assert exit_code == 0 and "usage:" in printed, printed


def test_time_in_turns_rotates_and_does_not_count_the_warmup(monkeypatch):
    clock, calls = [0.0], []  # only work moves the clock forward, in milliseconds

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at, self.waited = clock[0], False

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited, "read before the device came to the second event"
            return end.at - self.at

    def work(name):
        calls.append(name)
        clock[0] += 100.0 if calls.count(name) <= 2 else 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(harness, "settle", lambda: calls.append("."))
    contenders = {name: partial(work, name) for name in "abc"}
    measure = partial(harness.seconds_of, device="cuda")
    found = time_in_turns(contenders, measure, rounds=3, discarded={"b": 1})
    assert "".join(calls) == "aabbcc" + ".a.bb.c" + ".bb.c.a" + ".c.a.bb"
    assert found == {name: pytest.approx([1e-3] * 3) for name in "abc"}
    assert harness.seconds_of(contenders["a"], "cuda", 20) == pytest.approx(1e-3)
    calls.clear()
    wall, cpu = harness.wall_and_cpu_in_turns({"d": contenders["a"]}, 12, rounds=3, discarded=6)
    assert "".join(calls) == "aa" + 3 * ("." + 18 * "a") and len(wall["d"]) == len(cpu["d"]) == 3


def test_target_is_met_by_the_median_of_the_rounds_in_the_direction_asked(capsys):
    assert ratios([2, 9, 4], [1, 3, 4]) == [2, 3, 1]
    show_target("x", [4, 6, 7], 5, at_least=True)
    show_target("x", [4, 6, 7], 5, at_least=False)
    first, second = capsys.readouterr().out.split("\n\n", 1)
    assert first == "met: x: 6 (4-7), target at least 5"
    assert second == "MISSED: x: 6 (4-7), target at most 5\n\n"


def test_counter_counts_waits_views_and_memory():
    x, mask = torch.ones(1000), torch.ones(1000, dtype=torch.bool)
    with Counter() as counter:
        x.view(10, 100).add_(1)  # the view is free
    assert (counter.operators, counter.waits, counter.peak) == (1, 0, 0)
    with Counter() as counter:
        y = x + x
        del y
    assert (counter.operators, counter.peak, counter.now) == (1, 4000, 0)
    for question in (lambda: x.sum().item(), lambda: x[mask], lambda: bool(x[0] > 0), lambda: x.nonzero()):
        with Counter() as counter:
            question()
        assert counter.waits == 1


def test_cpu_time_is_that_of_workers_too_and_a_turn_waits_until_they_rest():
    """A worker computes for half a second: that belongs to no turn."""
    worker = multiprocessing.get_context("fork").Process(target=_compute, daemon=True)
    before = harness.cpu_seconds()
    worker.start()
    (turn,) = time_in_turns({"a": lambda: None}, lambda _: harness.cpu_seconds(), 1, discarded={"a": 1})["a"]
    assert turn - before > 0.4
    worker.kill()


def _compute() -> None:
    while time.process_time() < 0.5:
        pass
    time.sleep(60)


@pytest.fixture
def rows_of(capsys, monkeypatch):
    """Run a case with --quick; return its tables' rows as {name: {head: cell}}, in order, and what it printed."""
    monkeypatch.setattr(harness, "settle", lambda: None)  # the test of CPU time waits for workers

    def rows(case, *more):
        assert run.main([case, *more, "--quick"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{date.today()}, ") and f"torch {torch.__version__}" in text
        found, head = [], []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line[1:-1].split(" | ")] if line.startswith("| ") else []
            if cells and not cells[0]:
                head = cells
            elif cells and cells[0] != "---":
                found.append(dict(zip(head, cells, strict=True)))
        return found, text

    return rows


def median_of(cell: str) -> float:
    return float(cell.split(" (")[0].replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("loss", contrast.DENSE)
def test_contrast_authors_form_has_our_value_and_gradient(loss):
    results = []
    for prepare in contrast.contenders(loss).values():
        z, ids = contrast.inputs(loss, 512 if loss == "paws" else 64)
        results.append((contrast.forward_backward(prepare(ids), z), z.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * ours.abs().max().item())
    assert results[0][1].norm() > 0.001


@pytest.mark.slow
def test_lars_of_timm_takes_the_steps_of_ours():
    def after_three_steps(contender):
        params = lars.parameters("resnet_tiny")[:9]
        with torch.no_grad():
            params[1].zero_()  # a norm of 0 is a case of its own in every implementation
        step = lars.contenders(params)[contender]
        for _ in range(3):
            step()
        return [p.detach() for p in params]

    begin = lars.parameters("resnet_tiny")
    ours, peer = after_three_steps(lars.OURS), after_three_steps(lars.TIMM)
    assert max((a - b).norm() / b.norm() for a, b in zip(ours, begin) if b.norm() > 0) > 1e-4
    torch.testing.assert_close(peer, ours, rtol=1e-5, atol=1e-6)


def test_dense_nt_xent_is_our_loss():
    z = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(step.dense_nt_xent(*z.chunk(2), 0.2), nt_xent(z, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize("blur", pixels.TARGETS)
@pytest.mark.parametrize("engine", pixels.DATA_LOADERS)
def test_data_loader_gives_two_different_views_in_0_to_1(engine, blur, tmp_path):
    write_pictures(tmp_path, 1)
    loader = pixels.data_loader(str(tmp_path), pixels.two_views(engine, blur), 1)
    one, other = loader.collate_fn(loader.dataset)
    for view in (one, other):
        assert view.shape == (1, 3, 224, 224) and view.dtype == torch.float32
        assert 0 <= view.min() < view.max() <= 1
    assert not torch.equal(one, other)


@pytest.mark.slow
def test_contrast_reports_time_memory_operators_and_waits(rows_of):
    rows, _ = rows_of("contrast")
    assert [row[""] for row in rows] == [contrast.OURS, contrast.AUTHORS] * len(contrast.DENSE)
    for row in rows:
        assert median_of(row["CPU ms"]) > 0 and int(row["operators"]) > 10 and row["host waits"] == "0"
    assert float(rows[1]["memory, MB"]) > 4 * float(rows[0]["memory, MB"])


@pytest.mark.slow
def test_lars_reports_time_operators_and_waits(rows_of):
    found, text = rows_of("lars", "--device", "cpu")
    ours, timm, _ = found
    assert [row[""] for row in found] == [lars.OURS, lars.TIMM, lars.SGD] and "64 tensors" in text
    assert int(ours["operators"]) <= 30 and ours["host waits"] == "0"
    assert int(timm["operators"].replace(",", "")) > 1000
    assert "no 'fastsuncet kernel': it needs a CUDA device" in text
    assert re.search(r"^(met|MISSED): time of timm's Lars, times ours: .*, target at least 1$", text, re.M)


@pytest.mark.slow
def test_step_reports_speed_operators_and_waits(rows_of, monkeypatch):
    """Of one network and one stream for each settings: two graphs and the plain step would not fit a card."""
    build, built, read, steps = step.build, [], step.PairedStream.__call__, {}
    monkeypatch.setattr(step, "build", lambda *given: built.append(given) or build(*given))

    def recorded(stream, number):
        steps.setdefault(stream, []).append(number)
        return read(stream, number)

    monkeypatch.setattr(step.PairedStream, "__call__", recorded)
    more = "meta.deterministic=false"
    found, text = rows_of("step", "digits_demo", "--against", more, "--device", "cpu")
    assert [config.meta.deterministic for config, *_ in built] == [True, False]
    assert len(steps) == 2 and all(each == list(range(len(each))) for each in steps.values())
    rows = {row[""]: row for row in found}
    assert "a step of 256 views" in text
    assert all(median_of(row["views/s"]) > 0 for row in found)
    assert rows[step.FIXED]["x one fixed batch"] == "1 (1-1)" and rows[step.FIXED]["host waits"] == "0"
    assert 100 < int(rows[step.FIXED]["operators"]) <= 320 and not rows[step.END_TO_END]["operators"]
    names = {f"{name}{words}" for name in (step.FIXED, step.END_TO_END) for words in ("", f", {more}")}
    assert rows.keys() - {step.PLAIN} == names


@pytest.mark.slow
@pytest.mark.parametrize("missing", [None, "no compiler"])
def test_step_on_a_gpu_is_that_of_a_run_whose_trials_pass(monkeypatch, missing):
    monkeypatch.setitem(PATHS, VIEW, PATHS[VIEW]._replace(missing=lambda: missing))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_compiler, "unavailable", lambda: None)
    monkeypatch.setattr(step, "PairedStream", lambda config, *_: lambda step: config.data.view_operator)
    config = load_config("digits_demo", ["meta.precision=bf16"])
    bench, _ = step.StepBench.open(config, Place(0, 1, torch.device("cuda", 0)))
    assert bench.batch is (missing is None) and bench.config.model.fused_batchnorm is True


@pytest.mark.slow
def test_pixels_reports_speed_and_cpu_time_against_the_peer(rows_of):
    (peer, ours), text = rows_of("pixels")
    assert peer["x peer, wall"] == "" and median_of(ours["x peer, wall"]) > 0
    assert all(median_of(row[head]) > 0 for row in (peer, ours) for head in ("images/s", "CPU ms/image"))
    assert "8 files" in text and "images/s over DataLoader, v2 on tensors, blur 23" in text


@pytest.mark.slow
def test_peers_trains_ours_on_any_tree_and_needs_lightly_for_the_rest(tmp_path, monkeypatch):
    write_pictures(tmp_path, 8, side=40)
    config = peers.config_of(str(tmp_path), 32, "resnet_tiny", 4)
    assert config.data.augmentation.blur == 0 and config.criterion.supervised_epochs == 0
    bench, stream = step.StepBench.open(config, Place(0, 1, torch.device("cpu")))
    assert bench.ours(stream)().isfinite().all()
    stream.close()
    monkeypatch.setitem(sys.modules, "lightly.loss", None)
    with pytest.raises(FastSuncetError, match="lightly cannot be imported"):
        run.main(["peers", str(tmp_path)])
