"""The bench tools compare equals: every peer computes what ours does. Each tool reports what it measured."""

import json
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.errors import FastSuncetError
from fastsuncet.losses import nt_xent
from fastsuncet.optim import LARS, lars_kernel
from tests.support.host_kernels import on_the_host
from tests.support.pictures import write_pictures
from tools.bench import (
    bench_feed,
    bench_lars,
    bench_loss,
    bench_pipeline,
    bench_start,
    bench_step,
    peers,
    slow_files,
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
    [(loss, name) for loss in bench_loss.LOSSES for name in contenders(loss) if name != OURS],
)
def test_bench_loss_peers_have_our_value_and_gradient(loss, name):
    results = {}
    for contender in (OURS, name):
        z, ids = inputs(loss, 512 if loss == "paws" else 64)
        value = forward_backward(contenders(loss)[contender](ids), z)
        results[contender] = value, z.grad
    for theirs, ours in zip(results[name], results[OURS], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * ours.abs().max().item())
    assert results[OURS][1].norm() > 0.001


def test_bench_loss_reports_time_memory_operators_and_waits(report_of):
    rows = {(row["loss"], row["name"]): row for row in report_of(bench_loss)["points"]}
    for loss in bench_loss.LOSSES:
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


@pytest.mark.parametrize("trust", [1, 1.01])
def test_bench_lars_compares_our_steps_with_apexs(monkeypatch, trust):
    """By a stand-in of apex's LARC, which scales the gradients and keeps the weight decay from SGD meanwhile."""

    class LARC:
        def __init__(self, optimizer, trust_coefficient, clip, eps):
            self.optimizer, self.trust, self.eps = optimizer, trust * trust_coefficient, eps
            assert clip is False

        def step(self):
            (group,) = self.optimizer.param_groups
            decay, group["weight_decay"] = group["weight_decay"], 0
            for p in group["params"]:
                w, g = p.detach().norm(), p.grad.norm()
                if w and g:
                    p.grad.add_(p.detach(), alpha=decay).mul_(self.trust * w / (g + decay * w + self.eps))
            self.optimizer.step()
            group["weight_decay"] = decay

    monkeypatch.setitem(sys.modules, "apex.parallel.LARC", SimpleNamespace(LARC=LARC))
    found = re.search(r"is (\S+) of the momentum from apex's LARC", bench_lars.apex_problem() or "")
    assert found is None if trust == 1 else 0.005 < float(found[1]) < 0.02


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
    optimizer = LARS(params, 0.1, weight_decay=1e-6)
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


def test_bench_pipeline_reports_speed_and_cpu_time_against_peers(report_of):
    report = report_of(bench_pipeline)
    ours, peer, *parts = report["points"]
    assert [part["engine"] for part in parts] == ["decode", "crops", "colors"]
    assert ours["peer"] == peer["name"] and "speed_to_peer" not in peer
    for row in report["points"]:
        assert min(row["per_second"]) > 0 and min(row["cpu_ms"]) > 0
    assert "8 files" in report["tables"][0]["title"]


@pytest.mark.skipif(slow_files.COMPILER is None, reason="no C compiler")
def test_bench_feed_compares_ways_to_read_files_and_packs(report_of):
    points = report_of(bench_feed)["points"]
    compared = [point["name"] for point in points if min(point.get("speed_to_before", [0])) > 0]
    assert compared == ["files, read", "pack, read ahead, 2 ms a read", "pack, read ahead, warm"]
    assert all(min(point["thread_ms"]) > 0 for point in points[2:]) and len(points) == 7
    assert "LD_PRELOAD" not in os.environ


@pytest.mark.skipif(slow_files.COMPILER is None, reason="no C compiler")
def test_bench_start_compares_with_another_checkout_and_with_image_folder(report_of, tmp_path, monkeypatch):
    """What opens images runs; commands, of seconds each, do not."""
    write_pictures(tmp_path / "tree" / "train", 4, 2)
    seconds = bench_start.Contender.seconds
    monkeypatch.setattr(
        bench_start.Contender, "seconds", lambda own: seconds(own) if "us a stat" in own.name else (2.0, 2.0)
    )
    checkouts = ("--before", str(bench_start.ROOT), "--tree", str(tmp_path / "tree"))
    report = report_of(bench_start, *checkouts)
    points = {point["name"]: point for point in report["points"]}
    for case in ("first index", "import", "start", "first step, digits_demo", "first step, in1k_10pct"):
        assert points[f"{case}, now"]["cpu_to_before"] == [1] and f"{case}, before" in points
    assert points["start, now"]["cpu_to_listing"] == [1] and len(points) == 12
    assert points["start, 400 us a stat, now"]["wall"][0] > 0.002 and len(report["notes"]) == 3


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
