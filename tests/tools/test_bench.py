"""The bench tools compare equals: every peer computes what ours does. Each tool reports what it measured."""

import json
import sys

import pytest
import torch

from fastsuncet.errors import FastSuncetError
from fastsuncet.losses import nt_xent
from fastsuncet.optim import LARS, LARSSettings, lars_kernel
from tests.support.host_kernels import on_the_host
from tests.support.pictures import write_pictures
from tools.bench import (
    bench_host,
    bench_lars,
    bench_loss,
    bench_micro_batch,
    bench_pipeline,
    bench_step,
    peers,
)
from tools.bench.bench_loss import OURS, contenders, forward_backward, inputs
from tools.bench.dispatch_counter import Counter

pytestmark = pytest.mark.slow


@pytest.fixture
def report_of(tmp_path, capsys):
    """Run a tool with --quick and return its JSON, after comparing it with what was printed."""

    def run(tool, *more):
        path = tmp_path / "report.json"
        assert tool.main(["--quick", "--json", str(path), *more]) == 0
        report, printed = json.loads(path.read_text()), capsys.readouterr().out
        assert report["tool"] == tool.__name__.rpartition(".")[2] and report["points"]
        for text in [point["name"] for point in report["points"]] + report["notes"]:
            assert text in printed
        return report

    return run


# Losses


@pytest.mark.parametrize(
    ("loss", "name"),
    [(loss, name) for loss in ("suncet", "nt_xent") for name in contenders(loss) if name != OURS],
)
def test_bench_loss_peers_have_our_value_and_gradient(loss, name):
    results = {}
    for contender in (OURS, name):
        z, ids = inputs(loss, 64)
        value = forward_backward(contenders(loss)[contender](ids), z)
        results[contender] = value, z.grad
    torch.testing.assert_close(results[name], results[OURS], rtol=1e-5, atol=1e-5)
    assert results[OURS][1].norm() > 0.01


def test_bench_loss_reports_time_memory_operators_and_waits(report_of):
    rows = {(row["loss"], row["name"]): row for row in report_of(bench_loss)["points"]}
    for loss in ("suncet", "nt_xent"):
        for name in contenders(loss):
            row = rows[loss, name]
            assert min(row["seconds"]) > 0 and min(row["time_to_ours"]) > 0
            assert row["operators"] > 10 and min(row["bytes"]) > 0
        assert rows[loss, OURS]["host_waits"] == 0


# LARS


@pytest.mark.parametrize(
    "name",
    [bench_lars.OURS, bench_lars.TIMM, "timm Lars foreach", "loop + SGD, as the authors", bench_lars.KERNEL],
)
def test_bench_lars_contenders_take_the_steps_of_our_reference(name):
    def after_three_steps(contender):
        params = bench_lars.parameters("resnet_tiny")[:9]
        with torch.no_grad():
            params[1].zero_()  # a norm of 0 is a case of its own in every implementation
        steps = bench_lars.contenders(params, kernel=contender == bench_lars.KERNEL)
        for _ in range(3):
            steps[contender]()
        return [p.detach() for p in params]

    start = bench_lars.parameters("resnet_tiny")
    with on_the_host(lars_kernel):  # the kernel's own source, thread for thread on the CPU
        reference, peer = after_three_steps(bench_lars.REFERENCE), after_three_steps(name)
    assert max((a - b).norm() / b.norm() for a, b in zip(reference, start) if b.norm() > 0) > 1e-4
    torch.testing.assert_close(peer, reference, rtol=1e-5, atol=1e-6)


def test_bench_lars_contenders_leave_the_shared_gradients_as_they_were():
    params = bench_lars.parameters("resnet_tiny")
    before = [p.grad.clone() for p in params]
    for step in bench_lars.contenders(params).values():
        step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before))


def test_bench_lars_counts_the_bytes_that_arithmetic_gives():
    params = [p for p in bench_lars.parameters("resnet_tiny") if p.numel() > 1000]
    step = bench_lars.contenders(params)["no LARS: torch SGD foreach"]
    step()  # the first step creates the momentum
    with Counter() as counter:
        step()
    # g + decay w: 12, momentum: 8, momentum + d: 12, w - lr momentum: 12
    assert counter.moved == 44 * sum(p.numel() for p in params)


def test_lars_foreach_step_allocates_no_copy_of_the_network():
    params = bench_lars.parameters("resnet_tiny")
    optimizer = LARS(params, 0.1, LARSSettings(weight_decay=1e-6))
    with Counter() as counter:
        optimizer.step()
    assert counter.peak < 0.2 * sum(p.nbytes for p in params)


def test_bench_lars_reports_time_operators_waits_and_bytes(report_of):
    report = report_of(bench_lars, "--device", "cpu")
    rows = {row["name"]: row for row in report["points"]}
    assert report["tensors"] > 60 and report["parameters"] > 11e6
    ours, loop = rows[bench_lars.OURS], rows["loop + SGD, as the authors"]
    assert ours["operators"] <= 30 and ours["host_waits"] == 0
    assert loop["host_waits"] == 2 * report["tensors"]
    assert ours["bytes_per_parameter"] < rows[bench_lars.TIMM]["bytes_per_parameter"]
    assert bench_lars.KERNEL not in rows and bench_lars.LIMIT not in rows
    first, *targets = report["notes"]
    assert first == "no 'fastsuncet kernel': it needs a CUDA device" and len(targets) == 3
    assert targets[1].startswith("met: dispatched operators: 2") and "target at most 30" in targets[1]


# The step


def test_bench_step_reports_speed_operators_and_waits(report_of):
    report = report_of(bench_step, "digits_demo", "--device", "cpu")
    rows = {row["name"]: row for row in report["points"]}
    assert rows[bench_step.FIXED]["views"] == 256 and rows[bench_step.PLAIN]["views"] == 256
    for row in rows.values():
        assert min(row["views_per_second"]) > 0 and min(row["speed_to_fixed"]) > 0
    assert rows[bench_step.FIXED]["speed_to_fixed"] == [1, 1]
    assert rows[bench_step.FIXED]["host_waits"] == rows[bench_step.SIMCLR]["host_waits"] == 0
    assert 100 < rows[bench_step.FIXED]["operators"] <= 320 and "operators" not in rows[bench_step.END_TO_END]
    assert report["notes"] == ["met: host waits in a step: 0 (0-0), target at most 0"]


def test_dense_nt_xent_is_our_loss_and_lightlys():
    z = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    ours = nt_xent(z, 0.2)
    torch.testing.assert_close(bench_step.dense_nt_xent(*z.chunk(2), 0.2), ours)
    lightly = pytest.importorskip("lightly.loss", reason="lightly is not installed (extra bench)")
    torch.testing.assert_close(lightly.NTXentLoss(0.2)(*z.chunk(2)), ours)


# The pixels


def test_bench_host_makes_as_many_calls_for_many_images_as_for_few(report_of):
    """A count and no time: it is the same on every machine. With a Python object for each image it was 5,943."""
    few, many = report_of(bench_host)["points"]
    assert few["calls"] < 2000 and many["calls"] < 1.2 * few["calls"]
    assert min(few["seconds"]) > 0


def test_bench_pipeline_reports_speed_and_cpu_time_against_peers(report_of):
    report = report_of(bench_pipeline)
    ours, peer, *parts, files, pack = report["points"]
    assert [part["engine"] for part in parts] == ["decode", "crops", "colors"]
    assert ours["peer"] == peer["name"] and "speed_to_peer" not in peer
    assert pack["peer"] == files["name"] and min(pack["speed_to_peer"]) > 0 and "peer" not in files
    for row in report["points"]:
        assert min(row["per_second"]) > 0 and min(row["cpu_ms"]) > 0
    assert "8 files" in report["tables"][0]["title"]


def test_bench_pipeline_data_loaders_give_two_different_views_in_0_to_1(tmp_path):
    write_pictures(tmp_path, 1)
    for engine, blur in bench_pipeline.CONTENDERS.values():
        if engine in bench_pipeline.DATA_LOADERS:
            views = bench_pipeline.two_views(engine, blur)
            one, other = bench_pipeline.Files(list(tmp_path.rglob("*.jpg")), views)[0]
            for view in (one, other):
                assert view.shape == (3, 224, 224) and view.dtype == torch.float32
                assert 0 <= view.min() < view.max() <= 1
            assert not torch.equal(one, other)


# The peers


def test_peers_trains_ours_on_any_tree_and_needs_lightly_for_the_rest(tmp_path, monkeypatch):
    write_pictures(tmp_path, 8, side=40)
    asked = (str(tmp_path), 32, "resnet_tiny", 4)
    steps, config = peers.train_ours(*asked), peers.config_of(*asked)
    assert [next(steps) for _ in range(2)] == [None, None]
    assert config.data.augmentation.blur == 0 and config.criterion.supervised_epochs == 0
    monkeypatch.setitem(sys.modules, "lightly.transforms", None)
    with pytest.raises(FastSuncetError, match="lightly cannot be imported"):
        peers.main([str(tmp_path)])


def test_peers_reports_speed_processor_time_and_memory_of_both(tmp_path, report_of):
    pytest.importorskip("lightly.transforms", reason="lightly is not installed (extra bench)")
    write_pictures(tmp_path / "pictures", 8, side=40)
    ours, lightly = report_of(peers, str(tmp_path / "pictures"), "--batch", "4")["points"]
    for row in (ours, lightly):
        assert min(row["per_second"]) > 0 and min(row["cpu_ms"]) > 0 and min(row["memory"]) > 5e7
    assert min(ours["cpu_ms_to_peer"]) > 0 and "cpu_ms_to_peer" not in lightly


def test_bench_micro_batch_reports_the_memory_of_a_step(report_of):
    points = report_of(bench_micro_batch)["points"]
    assert [point["name"] for point in points] == ["whole", "pieces of 4"]
    assert points[0]["to_whole"] == 1 and all(point["resident_bytes"] > 1e6 for point in points)
