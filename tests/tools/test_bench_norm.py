"""bench_norm compares equals: every contender has the values of float32."""

import json

import pytest
import torch

from fastsuncet.distributed.launch import Place
from fastsuncet.models import norm_kernel
from tests.support.host_kernels import on_the_host
from tests.support.ranks import run_ranks
from tools.bench import bench_norm, harness
from tools.bench.bench_norm import COMPILED, OPERATORS, OURS, WORDS, LayerShape, NormLayer, resnet50_shapes

HERE = Place(0, 1, 0, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch):
    """torch.compile takes half a minute for three shapes."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)


def test_resnet50_has_53_layers_of_11_million_activations():
    shapes = resnet50_shapes()
    assert sum(shape.layers for shape in shapes) == 53 and len(shapes) == 16
    assert sum(shape.layers for shape in shapes if shape.kind == "add") == 16
    assert sum(shape.layers * shape.channels * shape.size**2 for shape in shapes) == 11_113_984
    assert shapes[0].layers * shapes[0].moved(1) == max(shape.layers * shape.moved(1) for shape in shapes)
    # 16 bits: forward 2 + 2 + 2 bytes, backward 4 + 4 + 2; the residual is read once and its gradient written once.
    assert LayerShape("relu", 8, 2).moved(3) == 16 * 3 * 8 * 4
    assert LayerShape("add", 8, 2).moved(3) == 20 * 3 * 8 * 4


@pytest.mark.parametrize("kind", ["plain", "relu", "add"])
@pytest.mark.parametrize("name", bench_norm.CONTENDERS)
def test_every_contender_has_the_values_and_gradients_of_float32(name, kind):
    shape = LayerShape(kind, 16, 5)
    with on_the_host(norm_kernel):
        found = bench_norm.CONTENDERS[name](NormLayer(shape, 3, HERE))()
    expected = bench_norm.operators(NormLayer(shape, 3, HERE, torch.float32))()
    assert len(found) == len(expected) == 4 + (kind == "add")
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert bench_norm.difference(found, expected) < bench_norm.TOLERANCE


def test_contender_that_is_wrong_or_fails_is_reported_and_not_timed(monkeypatch):
    doubled = lambda layer: lambda: [2 * t for t in bench_norm.operators(layer)()]  # noqa: E731
    monkeypatch.setitem(bench_norm.CONTENDERS, "doubled", doubled)
    monkeypatch.setitem(bench_norm.CONTENDERS, "failing", lambda layer: lambda: 1 / 0)
    found = bench_norm.measure(LayerShape("relu", 8, 3), 2, HERE, 2, 1)
    assert found["notes"]["doubled"] == "WRONG: 100.0 % off float32"
    assert found["notes"]["failing"] == "failed: ZeroDivisionError: division by zero"
    assert found["notes"][OURS] == "it needs a CUDA device"
    assert set(found["seconds"]) == {OPERATORS, COMPILED, bench_norm.LIMIT}
    rows = {row["name"]: row for row in bench_norm.totals([found])}
    assert "seconds" not in rows["doubled"] and rows["doubled"]["note"].startswith("WRONG: ")


def test_totals_count_each_layer_as_often_as_the_network_has_it():
    def layer(layers, seconds):
        both = {OPERATORS: seconds, bench_norm.LIMIT: [1.0, 1.0]}
        return {"layer": "x", "layers": layers, "seconds": both, "notes": {}}

    rows = {row["name"]: row for row in bench_norm.totals([layer(3, [2.0, 4.0]), layer(1, [5.0, 7.0])])}
    assert rows[OPERATORS]["seconds"] == [11.0, 19.0] and rows[bench_norm.LIMIT]["seconds"] == [4.0, 4.0]
    assert rows[OPERATORS]["time_to_limit"] == [11 / 4, 19 / 4]


def test_bench_norm_reports_each_contender_and_returns_1_if_our_kernels_are_wrong(
    tmp_path, capsys, monkeypatch
):
    def doubled(layer):
        return lambda: [2 * t for t in bench_norm.operators(layer)()]

    monkeypatch.setitem(bench_norm.CONTENDERS, OURS, doubled)
    monkeypatch.setattr(harness, "kernel_problem", lambda *_: "")
    path = tmp_path / "norm.json"
    assert bench_norm.main(["--quick", "--device", "cpu", "--json", str(path)]) == 1
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    rows = {row["name"]: row for row in report["points"]}
    assert set(rows) == {*bench_norm.CONTENDERS, bench_norm.LIMIT}
    for name, row in rows.items():
        assert name in printed and (name == OURS or min(row["seconds"]) > 0)
    assert "seconds" not in rows[OURS] and "WRONG: 100.0 % off float32" in printed
    assert {each["layer"].partition(": ")[2] for each in report["layers"]} == set(WORDS.values())
    assert rows[COMPILED]["time_to_ours"] != rows[OPERATORS]["time_to_ours"] == [1, 1]


def _measure_on_a_rank(rank, world_size):
    bench_norm.CONTENDERS.pop(COMPILED)
    place = Place(rank, world_size, rank, torch.device("cpu"))
    harness.kernel_problem = lambda *_: ""
    with on_the_host(norm_kernel):
        found = bench_norm.measure(LayerShape("add", 8, 2), 2, place, 2, 1)
    return sorted(found["seconds"]), found["notes"]


@pytest.mark.slow
def test_bench_norm_on_ranks_uses_the_statistics_of_all():
    names, notes = run_ranks(_measure_on_a_rank, 2)[1]
    assert names == sorted([OPERATORS, OURS, bench_norm.LIMIT])
    assert not notes
