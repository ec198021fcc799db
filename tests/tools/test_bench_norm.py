"""bench_norm compares equals: every contender, a stand-in for apex included, has the values of float32."""

import json
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fastsuncet.distributed.launch import Place
from fastsuncet.models import norm_kernel as norm_kernels
from tests.support.host_kernels import on_the_host
from tests.support.ranks import run_ranks
from tools.bench import bench_norm, norm_contenders
from tools.bench.norm_contenders import COMPILED, CUDNN, GROUPBN, OPERATORS, OURS, Unavailable
from tools.bench.norm_layers import WORDS, LayerShape, NormLayer, resnet50_shapes

HERE = Place(0, 1, 0, torch.device("cpu"))


class NHWC(nn.BatchNorm2d):
    """A stand-in for apex.contrib.groupbn.BatchNorm2d_NHWC, by torch."""

    def __init__(self, num_features, fuse_relu=False, bn_group=1):
        super().__init__(num_features)
        self.fuse_relu = fuse_relu
        assert bn_group == 1

    def forward(self, x, z=None):
        assert x.dtype == torch.float16 and x.is_contiguous() and x.shape[3] == self.num_features
        y = super().forward(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if z is not None:
            assert self.fuse_relu and z.is_contiguous() and z.shape == x.shape
            y = y + z
        return F.relu(y) if self.fuse_relu else y


class Grouped(nn.BatchNorm2d):
    """A stand-in for apex.contrib.cudnn_gbn.GroupBatchNorm2d, by torch."""

    def __init__(self, num_features, group_size, eps=1e-5, momentum=0.1):
        super().__init__(num_features, eps, momentum)
        assert dist.get_rank() == 0 and group_size == 1  # apex too needs a process group

    def forward(self, x):
        assert x.dtype == torch.float16 and x.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x)


@pytest.fixture
def apex(monkeypatch):
    """Make stand-ins importable as apex."""
    made = {
        name: ModuleType(name)
        for name in ("apex", "apex.contrib", "apex.contrib.groupbn", "apex.contrib.cudnn_gbn")
    }
    made["apex.contrib.groupbn"].BatchNorm2d_NHWC = NHWC
    made["apex.contrib.cudnn_gbn"].GroupBatchNorm2d = Grouped
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


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
@pytest.mark.parametrize("name", [OPERATORS, COMPILED, OURS, GROUPBN, CUDNN])
def test_every_contender_has_the_values_and_gradients_of_float32(name, kind, apex):
    layer = NormLayer(LayerShape(kind, 16, 5), 3, HERE)
    make = norm_contenders.kernels if name == OURS else norm_contenders.CONTENDERS[name]
    with on_the_host(norm_kernels):
        found = make(layer)()
    expected = bench_norm.reference(layer)
    assert len(found) == len(expected) == 4 + (kind == "add")
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert bench_norm.difference(found, expected) < bench_norm.TOLERANCE
    assert not dist.is_initialized()


def test_contenders_without_apex_or_a_gpu_say_why():
    layer = NormLayer(LayerShape("relu", 8, 3), 2, HERE)
    for name, reason in ((GROUPBN, "not installed"), (CUDNN, "not installed"), (OURS, "needs a CUDA device")):
        with pytest.raises(Unavailable, match=reason):
            norm_contenders.CONTENDERS[name](layer)


def test_apex_built_without_the_kernels_counts_as_not_installed(apex):
    del apex["apex.contrib.groupbn"].BatchNorm2d_NHWC
    with pytest.raises(Unavailable, match="not installed"):
        norm_contenders.groupbn(NormLayer(LayerShape("relu", 8, 3), 2, HERE))


def test_contender_that_is_wrong_or_fails_is_reported_and_not_timed(apex, monkeypatch):
    monkeypatch.setattr(
        NHWC, "forward", lambda self, x, z=None: x + 0 * (self.weight.sum() + self.bias.sum())
    )
    monkeypatch.setattr(Grouped, "forward", lambda self, x: 1 / 0)
    found = bench_norm.measure(LayerShape("relu", 8, 3), 2, HERE, 2, 1)
    assert found["notes"][GROUPBN].startswith("WRONG: ")
    assert found["notes"][CUDNN] == "failed: ZeroDivisionError: division by zero"
    assert set(found["seconds"]) == {OPERATORS, COMPILED, bench_norm.LIMIT}
    rows = {row["name"]: row for row in bench_norm.totals([found])}
    assert "seconds" not in rows[GROUPBN] and rows[GROUPBN]["note"].startswith("WRONG: ")


def test_totals_count_each_layer_as_often_as_the_network_has_it():
    def layer(layers, seconds):
        both = {OPERATORS: seconds, bench_norm.LIMIT: [1.0, 1.0]}
        return {"layer": "x", "layers": layers, "seconds": both, "notes": {}, "compile_seconds": None}

    rows = {row["name"]: row for row in bench_norm.totals([layer(3, [2.0, 4.0]), layer(1, [5.0, 7.0])])}
    assert rows[OPERATORS]["seconds"] == [11.0, 19.0] and rows[bench_norm.LIMIT]["seconds"] == [4.0, 4.0]
    assert rows[OPERATORS]["time_to_limit"]["max"] == 19 / 4


def test_bench_norm_reports_each_contender_or_why_it_is_missing(tmp_path, capsys, apex):
    path = tmp_path / "norm.json"
    assert bench_norm.main(["--quick", "--device", "cpu", "--json", str(path)]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    rows = {row["name"]: row for row in report["points"]}
    assert set(rows) == {*norm_contenders.CONTENDERS, bench_norm.LIMIT}
    for name, row in rows.items():
        assert name in printed and (name == OURS or min(row["seconds"]) > 0)
    assert rows[OURS]["note"] == "needs a CUDA device" and rows[OURS]["note"] in printed
    assert "s to compile 3 shapes" in rows[COMPILED]["note"]
    assert {each["layer"].partition(": ")[2] for each in report["layers"]} == set(WORDS.values())
    assert printed.rstrip().rpartition("fastest: ")[2] in norm_contenders.CONTENDERS


def test_bench_norm_returns_1_if_our_kernels_are_wrong(monkeypatch, capsys):
    def doubled(layer):
        return lambda: [2 * t for t in norm_contenders.operators(layer)()]

    monkeypatch.setitem(norm_contenders.CONTENDERS, OURS, doubled)
    assert bench_norm.main(["--quick", "--device", "cpu"]) == 1
    assert "WRONG: 100.0 % off float32" in capsys.readouterr().out


def _measure_on_a_rank(rank, world_size):
    norm_contenders.CONTENDERS.pop(COMPILED)
    place = Place(rank, world_size, rank, torch.device("cpu"))
    norm_contenders.CONTENDERS[OURS] = norm_contenders.kernels
    with on_the_host(norm_kernels):
        found = bench_norm.measure(LayerShape("add", 8, 2), 2, place, 2, 1)
    return sorted(found["seconds"]), found["notes"]


def test_bench_norm_on_ranks_uses_the_statistics_of_all():
    names, notes = run_ranks(_measure_on_a_rank, 2)[1]
    assert names == sorted([OPERATORS, OURS, bench_norm.LIMIT])
    assert notes == {GROUPBN: "not installed", CUDNN: "not installed"}
