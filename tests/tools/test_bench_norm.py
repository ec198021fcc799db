"""bench_norm times equals: every contender, an apex of our making among them, has the values of float32."""

import json
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fastsuncet.distributed.launch import Place
from fastsuncet.models import fused_batchnorm as norm_kernels
from tests.support.host_kernels import on_the_host
from tests.support.ranks import run_ranks
from tools.bench import bench_norm, norm_contenders
from tools.bench.norm_contenders import COMPILED, CUDNN, GROUPBN, OPERATORS, OURS, Absent
from tools.bench.norm_layers import Case, Layer, cases

HERE = Place(0, 1, 0, torch.device("cpu"))
KINDS = ("plain", "relu", "add")


class NHWC(nn.BatchNorm2d):
    """What apex.contrib.groupbn.BatchNorm2d_NHWC takes and gives, by torch."""

    def __init__(
        self,
        num_features,
        fuse_relu=False,
        bn_group=1,
        max_cta_per_sm=2,
        cta_launch_margin=12,
        multi_stream=False,
    ):
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
    """What apex.contrib.cudnn_gbn.GroupBatchNorm2d takes and gives, by torch."""

    def __init__(
        self, num_features, group_size, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        assert dist.get_rank() == 0 and group_size == 1  # as there, only with a process group

    def forward(self, x):
        assert x.dtype == torch.float16 and x.is_contiguous(memory_format=torch.channels_last)
        return super().forward(x)


@pytest.fixture
def apex(monkeypatch):
    """An apex to import, of our making."""
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
def _nothing_is_compiled(monkeypatch):
    """torch.compile takes half a minute for three shapes; gpu_suite's rehearsal calls the real one."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)


def test_a_resnet50_has_53_such_layers_of_11_million_activations():
    every = cases()
    assert sum(case.layers for case in every) == 53 and len(every) == 16
    assert sum(case.layers for case in every if case.kind == "add") == 16
    assert sum(case.layers * case.channels * case.size**2 for case in every) == 11_113_984
    assert every[0].layers * every[0].moved(1) == max(case.layers * case.moved(1) for case in every)
    # 16 bits: forward 2 + 2 + 2 bytes, backward 4 + 4 + 2; the residual is read once and its gradient written once.
    assert Case("relu", 8, 2).moved(3) == 16 * 3 * 8 * 4 and Case("add", 8, 2).moved(3) == 20 * 3 * 8 * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [OPERATORS, COMPILED, OURS, GROUPBN, CUDNN])
def test_every_contender_has_the_values_and_gradients_of_float32(name, kind, apex):
    layer = Layer(Case(kind, 16, 5), 3, HERE)
    with on_the_host(norm_kernels):
        found = (
            norm_contenders.CONTENDERS[name](layer)() if name != OURS else norm_contenders.kernels(layer)()
        )
    expected = bench_norm.truth(layer)
    assert len(found) == len(expected) == 4 + (kind == "add")
    assert [t.shape for t in found] == [t.shape for t in expected]
    assert bench_norm.difference(found, expected) < bench_norm.TOLERANCE
    assert not dist.is_initialized()


def test_without_apex_or_a_gpu_a_contender_says_so():
    layer = Layer(Case("relu", 8, 3), 2, HERE)
    for name, reason in ((GROUPBN, "not installed"), (CUDNN, "not installed"), (OURS, "this is a CPU")):
        with pytest.raises(Absent, match=reason):
            norm_contenders.CONTENDERS[name](layer)


def test_an_apex_that_was_built_without_the_kernels_is_not_installed(apex):
    del apex["apex.contrib.groupbn"].BatchNorm2d_NHWC
    with pytest.raises(Absent, match="not installed"):
        norm_contenders.groupbn(Layer(Case("relu", 8, 3), 2, HERE))


def test_a_contender_that_is_wrong_or_fails_is_told_and_not_timed(apex, monkeypatch):
    monkeypatch.setattr(
        NHWC, "forward", lambda self, x, z=None: x + 0 * self.weight.sum() + 0 * self.bias.sum()
    )
    monkeypatch.setattr(Grouped, "forward", lambda self, x: 1 / 0)
    found = bench_norm.measure(Case("relu", 8, 3), 2, HERE, 2, 1)
    assert found["said"][GROUPBN].startswith("WRONG: ")
    assert found["said"][CUDNN] == "failed: ZeroDivisionError: division by zero"
    assert set(found["seconds"]) == {OPERATORS, COMPILED, bench_norm.LIMIT}
    rows = {row["name"]: row for row in bench_norm.totals([found])}
    assert "seconds" not in rows[GROUPBN] and rows[GROUPBN]["said"].startswith("WRONG: ")


def test_a_sum_over_layers_counts_each_as_often_as_the_network_has_it():
    def found(layers, seconds):
        both = {OPERATORS: seconds, bench_norm.LIMIT: [1.0, 1.0]}
        return {"layer": "x", "layers": layers, "seconds": both, "said": {}, "compile_seconds": None}

    rows = {row["name"]: row for row in bench_norm.totals([found(3, [2.0, 4.0]), found(1, [5.0, 7.0])])}
    assert rows[OPERATORS]["seconds"] == [11.0, 19.0] and rows[bench_norm.LIMIT]["seconds"] == [4.0, 4.0]
    assert rows[OPERATORS]["time_to_limit"]["max"] == 19 / 4


def test_bench_norm_tells_each_contender_or_why_it_is_not_here(tmp_path, capsys, apex):
    path = tmp_path / "norm.json"
    assert bench_norm.main(["--quick", "--device", "cpu", "--json", str(path)]) == 0
    report, printed = json.loads(path.read_text()), capsys.readouterr().out
    rows = {row["name"]: row for row in report["points"]}
    assert set(rows) == {*norm_contenders.CONTENDERS, bench_norm.LIMIT}
    for name, row in rows.items():
        assert name in printed
        assert name == OURS or min(row["seconds"]) > 0
    assert (
        rows[OURS]["said"] == "they run on CUDA devices, and this is a CPU" and rows[OURS]["said"] in printed
    )
    assert "s to compile 3 shapes" in rows[COMPILED]["said"]
    assert {each["layer"].partition(": ")[2] for each in report["layers"]} == {
        "BatchNorm",
        "BatchNorm, ReLU",
        "BatchNorm, residual, ReLU",
    }
    assert printed.rstrip().rpartition("fastest: ")[2] in norm_contenders.CONTENDERS


def test_a_kernel_of_ours_that_is_wrong_ends_the_command_with_1(monkeypatch, capsys):
    monkeypatch.setitem(
        norm_contenders.CONTENDERS,
        OURS,
        lambda layer: lambda: [2 * t for t in norm_contenders.operators(layer)()],
    )
    assert bench_norm.main(["--quick", "--device", "cpu"]) == 1
    assert "WRONG: 100.0 % off float32" in capsys.readouterr().out


def _on_a_rank(rank, world_size):
    norm_contenders.CONTENDERS.pop(COMPILED)
    place = Place(rank, world_size, rank, torch.device("cpu"))
    norm_contenders.CONTENDERS[OURS] = norm_contenders.kernels
    with on_the_host(norm_kernels):
        found = bench_norm.measure(Case("add", 8, 2), 2, place, 2, 1)
    return sorted(found["seconds"]), found["said"]


def test_over_ranks_all_take_the_same_turns_with_the_statistics_of_all():
    names, said = run_ranks(_on_a_rank, 2)[1]
    assert names == sorted([OPERATORS, OURS, bench_norm.LIMIT])
    assert said == {GROUPBN: "not installed", CUDNN: "not installed"}
