"""The bench tools compare equals: every peer computes what ours does, and each tool says what it measured."""

import json
from pathlib import Path

import pytest
import torch

from fastsuncet.losses import nt_xent
from fastsuncet.optim import LARS, LARSSettings, lars_kernel
from pipelines.data_errors import DataError
from tests.support.host_kernels import on_the_host
from tools.bench import bench_lars, bench_loss, bench_pipeline, bench_step
from tools.bench.bench_loss import LISTING, OURS, contenders, forward_backward, inputs
from tools.bench.common import Counter, end, interleaved, ratios, resident_growth, spread, target

MB = 1e6


def spreads(figure):
    return figure["min"] <= figure["median"] <= figure["max"]


def peers(loss):
    return [name for name in contenders(loss, 64) if name != OURS]


@pytest.mark.parametrize(
    ("loss", "name"), [(loss, name) for loss in ("suncet", "nt_xent") for name in peers(loss)]
)
def test_every_peer_has_our_loss_and_our_gradient(loss, name):
    gradients = {}
    for who in (OURS, name):
        z, ids = inputs(loss, 64)
        value = forward_backward(contenders(loss, 64)[who](ids), z)
        gradients[who] = value, z.grad
    torch.testing.assert_close(gradients[name], gradients[OURS], rtol=1e-5, atol=1e-5)
    assert gradients[OURS][1].norm() > 0.01


def test_the_loop_over_classes_stays_out_where_it_takes_minutes():
    assert LISTING in contenders("suncet", 1024)
    assert LISTING not in contenders("suncet", 4096)


@pytest.mark.parametrize(
    "name",
    [
        bench_lars.OURS,
        bench_lars.TIMM,
        "timm Lars foreach",
        "loop + SGD, as the authors",
        bench_lars.KERNEL,
    ],
)
def test_every_lars_takes_the_steps_of_our_reference(name):
    def after_three_steps(who):
        params = bench_lars.parameters("resnet_tiny")[:9]
        with torch.no_grad():
            params[1].zero_()  # the case that every implementation has words for
        steps = bench_lars.contenders(params, kernel=who == bench_lars.KERNEL)
        for _ in range(3):
            steps[who]()
        return [p.detach() for p in params]

    start = bench_lars.parameters("resnet_tiny")
    with on_the_host(lars_kernel):  # the kernel's own source, thread for thread on the CPU
        reference, peer = after_three_steps(bench_lars.REFERENCE), after_three_steps(name)
    moved = max((a - b).norm() / b.norm() for a, b in zip(reference, start) if b.norm() > 0)
    assert moved > 1e-4  # where nobody moves, all agree
    torch.testing.assert_close(peer, reference, rtol=1e-5, atol=1e-6)


def test_the_contenders_share_gradients_and_leave_them_as_they_were():
    params = bench_lars.parameters("resnet_tiny")
    before = [p.grad.clone() for p in params]
    for step in bench_lars.contenders(params).values():
        step()
    assert all(torch.equal(p.grad, g) for p, g in zip(params, before))


def test_the_counter_knows_a_wait_a_view_and_a_byte():
    x, mask = torch.ones(1000), torch.ones(1000, dtype=torch.bool)
    with Counter() as counter:
        x.view(10, 100).add_(1)  # reads 4,000 bytes and writes 4,000; the view is free
    assert (counter.operators, counter.waits, counter.moved, counter.peak) == (1, 0, 8000, 0)
    with Counter() as counter:
        y = x + x  # 8,000 read, 4,000 written and kept
        del y
    assert (counter.operators, counter.moved, counter.peak, counter.now) == (1, 12000, 4000, 0)
    for question in (lambda: x.sum().item(), lambda: x[mask], lambda: bool(x[0] > 0), lambda: x.nonzero()):
        with Counter() as counter:
            question()
        assert counter.waits == 1


def test_the_plain_foreach_chain_of_sgd_moves_the_bytes_that_arithmetic_says():
    params = bench_lars.parameters("resnet_tiny")
    params = [p for p in params if p.numel() > 1000]
    step = bench_lars.contenders(params)["no LARS: torch SGD foreach"]
    step()  # the first step makes the momentum
    with Counter() as counter:
        step()
    # g + decay w: 12, momentum: 8, momentum + d: 12, w - lr momentum: 12
    assert counter.moved == 44 * sum(p.numel() for p in params)


def test_resident_growth_is_what_the_work_touches():
    grown = resident_growth(lambda: torch.ones(int(10 * MB)).sum())
    assert 38 * MB < grown < 60 * MB


def test_turns_are_taken_by_all_and_ratios_round_by_round():
    calls = []
    found = interleaved({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(seconds) for name, seconds in found.items()} == {"a": 3, "b": 3, "c": 3}
    assert ratios([2, 9, 4], [1, 3, 4]) == {"median": 2, "min": 1, "max": 3}


def test_a_target_is_met_by_the_median_in_the_direction_asked():
    fast = spread([4, 6, 7])
    assert target("x", fast, 5, at_least=True)["met"]
    assert not target("x", fast, 5, at_least=False)["met"]


def test_our_lars_step_makes_no_list_of_the_size_of_the_network_on_a_cpu():
    params = bench_lars.parameters("resnet_tiny")
    optimizer = LARS(params, 0.1, LARSSettings(weight_decay=1e-6))
    with Counter() as counter:
        optimizer.step()
    assert counter.peak < 0.2 * sum(p.nbytes for p in params)


def run(tool, tmp_path, capsys, *more):
    path = tmp_path / "report.json"
    assert tool.main(["--quick", "--json", str(path), *more]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert report["tool"] == tool.__name__.removeprefix("tools.")
    assert report["environment"].keys() >= {"date", "commit", "cpu", "cores", "load", "versions", "command"}
    assert report["environment"]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert report["points"]
    for row in report["points"]:
        assert row["name"] in printed
    for asked in report["targets"]:
        assert spreads(asked["measured"]) and asked["what"] in printed
        met = asked["measured"]["median"] >= asked["limit"]
        assert asked["met"] == (met if asked["at_least"] else asked["measured"]["median"] <= asked["limit"])
    return report


def test_bench_loss_tells_time_memory_operators_and_waits(tmp_path, capsys):
    report = run(bench_loss, tmp_path, capsys)
    rows = {(row["loss"], row["name"]): row for row in report["points"]}
    for loss in ("suncet", "nt_xent"):
        limit = rows[loss, bench_loss.LIMIT]
        assert min(limit["cpu_seconds"]) > 0 and limit["time_to_ours"]["median"] < 1
        for name in contenders(loss, 256):
            row = rows[loss, name]
            assert min(row["cpu_seconds"]) > 0 and spreads(row["time_to_ours"])
            assert row["live_bytes"] > 256 * 256 * 4 and row["operators"] > 10
            assert row["resident_bytes"]["median"] > 0
        assert rows[loss, OURS]["host_waits"] == 0
    assert rows["suncet", LISTING]["host_waits"] > 32  # 32 classes


def test_bench_lars_tells_time_operators_waits_and_bytes(tmp_path, capsys):
    report = run(bench_lars, tmp_path, capsys, "--device", "cpu")
    rows = {row["name"]: row for row in report["points"]}
    assert report["tensors"] > 60 and report["parameters"] > 11e6
    ours, loop = rows[bench_lars.OURS], rows["loop + SGD, as the authors"]
    assert ours["operators"] <= 30 and ours["host_waits"] == 0
    assert loop["host_waits"] == 2 * report["tensors"]
    assert ours["bytes_per_parameter"] < rows[bench_lars.TIMM]["bytes_per_parameter"]
    assert {asked["what"]: asked["met"] for asked in report["targets"]}["host waits"]
    # On a CPU there is no kernel, and one line says so.
    assert report["device"] == "cpu" and bench_lars.KERNEL not in rows
    assert report["said"] == ["no 'fastsuncet kernel': it runs on CUDA devices, and this is a CPU"]


def test_bench_step_tells_speed_beside_a_plain_step_and_counts_what_a_step_asks(tmp_path, capsys):
    report = run(bench_step, tmp_path, capsys, "--device", "cpu")
    rows = {row["name"]: row for row in report["points"]}
    assert rows[bench_step.FIXED]["views"] == 256 and rows[bench_step.PLAIN]["views"] == 256
    for row in rows.values():
        assert min(row["views_per_second"]) > 0 and spreads(row["speed_to_fixed"])
    assert rows[bench_step.FIXED]["host_waits"] == rows[bench_step.SIMCLR]["host_waits"] == 0
    assert 100 < rows[bench_step.FIXED]["operators"] <= 320 and "operators" not in rows[bench_step.END_TO_END]
    assert report["device"] == "cpu" and report["cuda_says_of_waits"] is None


def test_bench_step_compiles_ours_where_it_is_asked_to_and_goes_on_without(tmp_path, capsys, monkeypatch):
    asked = []

    def compiled(network, dynamic):  # the real one takes a minute
        asked.append(dynamic)
        return network

    def broken(network, dynamic):
        raise RuntimeError("no compiler here\nat all")

    monkeypatch.setattr(torch, "compile", compiled)
    report = run(bench_step, tmp_path, capsys, "--device", "cpu", "--compile")
    rows = {row["name"]: row for row in report["points"]}
    assert asked == [False] and min(rows[bench_step.COMPILED]["seconds"]) > 0
    assert rows[bench_step.COMPILED]["views"] == 256 and report["compile_seconds"] > 0
    monkeypatch.setattr(torch, "compile", broken)
    report = run(bench_step, tmp_path, capsys, "--device", "cpu", "--compile")
    assert bench_step.COMPILED not in {row["name"] for row in report["points"]}
    assert report["said"] == ["no 'one fixed batch, compiled': RuntimeError: no compiler here"]


def test_the_plain_step_has_the_loss_of_ours_and_of_its_library():
    z = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    ours = nt_xent(z, 0.2)
    torch.testing.assert_close(bench_step.dense_nt_xent(*z.chunk(2), 0.2), ours)
    lightly = pytest.importorskip("lightly.loss", reason="lightly is not installed (extra bench)")
    torch.testing.assert_close(lightly.NTXentLoss(0.2)(*z.chunk(2)), ours)


def test_bench_pipeline_tells_speed_and_cpu_beside_a_data_loader(tmp_path, capsys):
    report = run(bench_pipeline, tmp_path, capsys)
    ours, peer, files, pack = report["points"]
    assert ours["peer"] == peer["name"] and "speed_to_peer" not in peer
    assert pack["peer"] == files["name"] and spreads(pack["speed_to_peer"]) and "peer" not in files
    for row in report["points"]:
        assert min(row["images_per_second"]) > 0 and min(row["cpu_ms_per_image"]) > 0
    assert report["files"] == 8 and report["made_up"]


@pytest.mark.parametrize(
    "contender", [c for c in bench_pipeline.CONTENDERS if c.engine in ("tensors", "PIL")]
)
def test_every_data_loader_gives_two_different_views_in_zero_to_one(contender, tmp_path):
    bench_pipeline.write_pictures(tmp_path, 1)
    data = bench_pipeline.TwoViews(list(tmp_path.iterdir()), contender.engine, contender.blur)
    one, other = data[0]
    for view in (one, other):
        assert view.shape == (3, 224, 224) and view.dtype == torch.float32
        assert 0 <= view.min() < view.max() <= 1
    assert not torch.equal(one, other)


def test_a_wrong_folder_or_device_is_told_in_a_line_and_with_the_command_s_code(capsys):
    def wrong() -> int:
        raise DataError("no data folder nowhere")

    with pytest.raises(SystemExit) as stop:
        end(wrong)
    assert stop.value.code == 3 and capsys.readouterr().err == "error: no data folder nowhere\n"
    with pytest.raises(SystemExit) as stop:
        end(lambda: 1)
    assert stop.value.code == 1
    tools = Path(__file__).parents[2] / "tools"
    for name in ("bench_lars", "bench_norm", "bench_pipeline", "bench_step", "bench_streams", "tune_loader"):
        assert (tools / f"{name}.py").read_text().endswith('if __name__ == "__main__":\n    end(main)\n')
