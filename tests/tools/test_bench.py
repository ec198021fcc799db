"""Every case of the benchmarks compares equals, and reports what it measured."""

import json
import sys
from pathlib import Path

import pytest
import torch

from fastsuncet import nt_xent
from fastsuncet.errors import FastSuncetError
from fastsuncet.optim import lars_kernel
from tests.support.host_kernels import on_the_host
from tests.support.pictures import write_pictures
from tools.bench import contrast, data_loader, lars, peers, pixels, run, step, step_bench
from tools.bench.step_bench import dense_nt_xent

pytestmark = pytest.mark.slow


@pytest.fixture
def report_of(tmp_path, capsys, monkeypatch):
    """Run a case with --quick and return its JSON, after comparing it with what was printed."""

    def report(case, *more, code=0):
        path = tmp_path / "report.json"
        assert run.main([case, *more, "--quick", "--json", str(path)]) == code
        found, printed = json.loads(path.read_text()), capsys.readouterr().out
        assert found["tool"] == case and found["points"]
        for text in [point["name"] for point in found["points"]] + found["notes"]:
            assert text in printed
        return found

    return report


@pytest.mark.parametrize("case", run.CASES)
def test_case_has_a_short_program_and_a_help(case, capsys):
    with pytest.raises(SystemExit, match="0"):
        run.main([case, "--help"])
    assert f" {case} [-h]" in (said := capsys.readouterr().out) and "--quick" in said
    assert len((Path(run.__file__).with_name(f"{case}.py")).read_text().splitlines()) <= 118


@pytest.mark.parametrize("loss", contrast.LOSSES)
def test_contrast_authors_form_has_our_value_and_gradient(loss):
    results = []
    for prepare in contrast.contenders(loss).values():
        z, ids = contrast.inputs(loss, 512 if loss == "paws" else 64)
        results.append((contrast.forward_backward(prepare(ids), z), z.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * ours.abs().max().item())
    assert results[0][1].norm() > 0.001


@pytest.mark.parametrize("name", [lars.TIMM, lars.KERNEL])
def test_lars_contender_takes_the_steps_of_foreach(name):
    def after_three_steps(contender):
        params = lars.parameters("resnet_tiny")[:9]
        with torch.no_grad():
            params[1].zero_()  # a norm of 0 is a case of its own in every implementation
        step = lars.contenders(params, kernel=contender == lars.KERNEL)[contender]
        for _ in range(3):
            step()
        return [p.detach() for p in params]

    begin = lars.parameters("resnet_tiny")
    with on_the_host(lars_kernel):  # the kernel's own source, thread for thread on the CPU
        ours, peer = after_three_steps(lars.OURS), after_three_steps(name)
    assert max((a - b).norm() / b.norm() for a, b in zip(ours, begin) if b.norm() > 0) > 1e-4
    torch.testing.assert_close(peer, ours, rtol=1e-5, atol=1e-6)


def test_dense_nt_xent_is_our_loss():
    z = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(dense_nt_xent(*z.chunk(2), 0.2), nt_xent(z, 0.2))


@pytest.mark.parametrize("blur", pixels.TARGETS)
@pytest.mark.parametrize("engine", pixels.DATA_LOADERS)
def test_data_loader_gives_two_different_views_in_0_to_1(engine, blur, tmp_path):
    write_pictures(tmp_path, 1)
    files = data_loader.Files(list(tmp_path.rglob("*.jpg")), data_loader.two_views(engine, blur))
    one, other = files[0]
    for view in (one, other):
        assert view.shape == (3, 224, 224) and view.dtype == torch.float32
        assert 0 <= view.min() < view.max() <= 1
    assert not torch.equal(one, other)


def test_contrast_reports_time_memory_operators_and_waits(report_of):
    points = report_of("contrast")["points"]
    assert [(p["loss"], p["name"]) for p in points] == [
        (loss, name) for loss in contrast.LOSSES for name in (contrast.OURS, contrast.AUTHORS)
    ]
    for p in points:
        assert min(p["seconds"]) > 0 and min(p["time_to_ours"]) > 0
        assert p["operators"] > 10 and p["peak"] > 1e6 and p["host_waits"] == 0
    assert points[1]["peak"] > 4 * points[0]["peak"]


def test_lars_reports_time_operators_waits_and_bytes(report_of):
    report = report_of("lars", "--device", "cpu")
    rows = {row["name"]: row for row in report["points"]}
    assert rows.keys() == {lars.OURS, lars.TIMM, lars.SGD} and "64 tensors" in report["tables"][0]["title"]
    assert rows[lars.OURS]["operators"] <= 30 and rows[lars.OURS]["host_waits"] == 0
    assert rows[lars.OURS]["moved"] < rows[lars.TIMM]["moved"]
    first, *targets = report["notes"]
    assert first == "no 'fastsuncet kernel': it needs a CUDA device" and len(targets) == 3
    assert targets[1].startswith("met: dispatched operators: 2") and "target at most 30" in targets[1]


def test_step_reports_speed_operators_and_waits(report_of, monkeypatch):
    """Of one network and one stream for each settings: two graphs and the plain step would not fit a card."""
    build, built, read, steps = step_bench.build, [], step_bench.PairedStream.__call__, {}
    monkeypatch.setattr(step_bench, "build", lambda *given: built.append(given) or build(*given))

    def recorded(stream, number):
        steps.setdefault(stream, []).append(number)
        return read(stream, number)

    monkeypatch.setattr(step_bench.PairedStream, "__call__", recorded)
    more = "meta.deterministic=false"
    report = report_of("step", "digits_demo", "--against", more, "--device", "cpu")
    assert [config.meta.deterministic for config, *_ in built] == [True, False]
    assert len(steps) == 2 and all(each == list(range(len(each))) for each in steps.values())
    rows = {row["name"]: row for row in report["points"]}
    assert "a step of 256 views" in report["tables"][0]["title"]
    for row in rows.values():
        assert min(row["views_per_second"]) > 0 and min(row["speed_to_fixed"]) > 0
    assert rows[step.FIXED]["speed_to_fixed"] == [1, 1] and rows[step.FIXED]["host_waits"] == 0
    assert 100 < rows[step.FIXED]["operators"] <= 320 and "operators" not in rows[step.END_TO_END]
    assert rows.keys() - {step.PLAIN} == {
        f"{name}{suffix}" for name in (step.FIXED, step.END_TO_END) for suffix in ("", f", {more}")
    }
    assert rows[f"{step.FIXED}, {more}"]["host_waits"] == 0
    assert report["notes"] == ["met: host waits in a step: 0 (0-0), target at most 0"]


def test_pixels_reports_speed_and_cpu_time_against_the_peer(report_of):
    report = report_of("pixels")
    ours, peer = report["points"]
    assert ours["peer"] == peer["name"] and "speed_to_peer" not in peer
    for row in report["points"]:
        assert min(row["per_second"]) > 0 and min(row["cpu_ms"]) > 0
    assert "8 files" in report["tables"][0]["title"]


def test_peers_trains_ours_on_any_tree_and_needs_lightly_for_the_rest(tmp_path, monkeypatch):
    write_pictures(tmp_path, 8, side=40)
    asked = (str(tmp_path), 32, "resnet_tiny", 4)
    steps, config = peers.train_ours(*asked), peers.config_of(*asked)
    assert [next(steps) for _ in range(2)] == [None, None]
    assert config.data.augmentation.blur == 0 and config.criterion.supervised_epochs == 0
    monkeypatch.setitem(sys.modules, "lightly.transforms", None)
    with pytest.raises(FastSuncetError, match="lightly cannot be imported"):
        run.main(["peers", str(tmp_path)])
