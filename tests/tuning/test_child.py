"""A contender must compute what plain computes, and a child reports what is wrong with one that does not."""

import contextlib
import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fastsuncet.config import Config
from fastsuncet.distributed.place import Place
from fastsuncet.errors import FastSuncetError
from fastsuncet.models import norm_kernel
from fastsuncet.training import cuda_graph
from fastsuncet.tuning import child
from fastsuncet.tuning.child import Bench
from fastsuncet.tuning.verdicts import Verdict
from tests.support.emulated_norm import emulated
from tests.support.networks import narrow_resnet50
from tests.support.pretended import paper
from tests.support.runs import small_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("runs")
    return small_config(folder, "criterion.unsupervised_batch_size=40", "optimization.warmup=0")


@pytest.fixture(scope="module")
def arithmetic(config):
    return config.resolve(1, 1442, 10, 150)


@pytest.fixture(scope="module")
def bench(arithmetic) -> Bench:
    return Bench(Place(0, 1, torch.device("cpu")), arithmetic, [15] * 10)


@pytest.mark.parametrize(
    ("values", "exact", "problem"),
    [
        ({"criterion.chunk_size": 7}, False, None),  # another order of the same sums
        ({"criterion.chunk_size": 7}, True, "6 steps gave other bits than without it"),
        ({"criterion.temperature": 0.201}, False, "the losses differ by"),
        ({"criterion.keys": "detached"}, False, "the weights differ by"),
        ({"optimization.momentum": 0.5}, False, None),  # of the second step
        ({"data.decode_threads": 1, "data.prefetch": 3}, True, None),
        ({"data.augmentation.strength": 0.4}, True, "other pixels than without it, at step 0"),
        ({"data.augmentation.strength": 0.4}, False, "the pixels differ by"),
        ({"data.augmentation.strength": 0.4999}, False, None),
    ],
)
def test_problem_is_a_difference_beyond_rounding(bench, config, monkeypatch, values, exact, problem):
    monkeypatch.setattr(child, "EXACT_STEPS", 3)
    found = bench.problem(config, config.with_values(values), exact=exact)
    assert found == problem if problem is None else problem in found


@pytest.mark.parametrize(
    ("precision", "images", "classes", "fault", "problem"),
    [
        ("fp32", 6, 4, None, None),
        ("fp32", 6, 4, "channel", "the losses differ by"),
        ("bf16", 3, 2, None, None),
        ("bf16", 3, 2, "block of rows", "the BatchNorm statistics differ by"),
    ],
)
def test_problem_of_a_resnet50_is_more_than_its_own_rounding(
    monkeypatch, precision, images, classes, fault, problem
):
    """The arithmetic of norm.cu, right and wrong, in all layers; 24 channels, because bf16 takes long on a CPU."""
    narrow_resnet50(monkeypatch, 24)
    words = ["data.augmentation.size=32", f"meta.precision={precision}", "meta.deterministic=false"]
    config, sizes = paper(1, *words, "meta.device=cpu", "model.fused_batchnorm=false")
    sizes = replace(sizes, local_unlabeled=images, classes_per_batch=classes, global_images_per_class=2)
    monkeypatch.setattr(norm_kernel, "usable", lambda *_: True)
    monkeypatch.setattr(norm_kernel, "fused_norm", emulated(fault))
    bench = Bench(Place(0, 1, torch.device("cpu")), sizes, [128] * 1000)
    found = bench.problem(config, config.with_values({"model.fused_batchnorm": True}), exact=False)
    assert found == problem if problem is None else problem in found


def test_problem_of_a_network_without_batchnorm(bench, config):
    plain = config.with_values({"model.name": "timm/test_vit"})
    assert bench.problem(plain, plain.with_values({"criterion.chunk_size": 7}), exact=False) is None


@pytest.mark.parametrize("short", [False, True])
def test_problem_of_a_graph_that_is_not_captured_ends_the_child(bench, config, monkeypatch, short):
    """A run would go on without it, so the contender would be plain. A lack of memory is no verdict for good."""
    kind, reason = FastSuncetError, r"meta\.cuda_graph: .*the step is on cpu, not on a"
    if short:
        kind, reason = torch.OutOfMemoryError, "CUBLAS_STATUS_ALLOC_FAILED"
        full = mock.Mock(side_effect=RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))
        monkeypatch.setattr(cuda_graph, "capture_on_device", full)
    with pytest.raises(kind, match=reason):
        bench.problem(config, config.with_values({"meta.cuda_graph": True}), exact=True)


def test_problem_of_a_step_with_other_bits_the_second_time(bench, config, monkeypatch):
    real, count = bench.train, iter(range(9))
    other = lambda *a: {**real(*a), "losses": {"losses": torch.full((1,), next(count))}}  # noqa: E731
    monkeypatch.setattr(bench, "train", other)
    assert bench.problem(config, config, exact=False) == "1 steps gave other bits the second time"


def test_problem_of_pixels_that_are_not_the_same_when_read_twice(bench, config, monkeypatch):
    monkeypatch.setattr(bench, "pixels", lambda config: [torch.rand(2) for _ in range(4)])
    found = bench.problem(config, config.with_values({"data.prefetch": 3}), exact=False)
    assert found == "other pixels the second time, at step 0"


def test_problem_of_pixels_has_one_pair_of_streams_open_at_a_time(bench, config, monkeypatch):
    """A pair can take tens of GB of a GPU."""
    alive, most, begin = [], [], bench.stream

    def opened(config):
        stream = begin(config)
        alive.append(stream)
        most.append(len(alive))
        monkeypatch.setattr(stream, "close", alive.pop)
        return stream

    monkeypatch.setattr(bench, "stream", opened)
    assert bench.problem(config, config.with_values({"data.prefetch": 3}), exact=True) is None
    assert most == [1, 1, 1] and not alive


def test_proof_takes_a_part_of_a_large_batch_with_whole_classes(bench, config, arithmetic):
    sizes = {"criterion.unsupervised_batch_size": 400, "criterion.supervised_imgs_per_class": 8}
    many = config.with_values(sizes)
    larger = Bench(bench.place, many.resolve(1, 1442, 10, 150), [15] * 10)
    part, whole = (larger.batch(many, whole=each) for each in (False, True))
    assert [len(view) for view in part.views] == [32, 32] and len(whole.views[0]) == 400
    assert part.labels.bincount().tolist() == [8] * 8 and whole.labels.bincount().tolist() == [8] * 10
    assert part.views[0].is_contiguous(memory_format=torch.channels_last)


def test_exact_proof_by_adamw_moves_weights_by_a_part_of_their_size(bench, config):
    """At a rate of 0.1 outputs overflowed in fp16, and a graph that was right was refused for good."""
    adamw = config.with_values({"optimization.optimizer": "adamw", "optimization.lr": 0.001})
    moved = bench.train(adamw, bench.batch(adamw, whole=True), 6)["weights"]
    assert 0 < max(x.abs().max() for x in moved.values()) < 0.01


@pytest.mark.parametrize("reads", [False, True])
def test_time_measures_the_base_before_and_after(bench, config, monkeypatch, reads):
    monkeypatch.setattr(child, "SECONDS", 0.01)
    turns, begin = [], bench.step
    seen = lambda config: turns.append(config.criterion.chunk_size) or begin(config)  # noqa: E731
    monkeypatch.setattr(bench, "step", seen)
    found = bench.time(config, config.with_values({"criterion.chunk_size": 64}), reads)
    assert found.memory_left == 1 and turns == [config.criterion.chunk_size, 64, config.criterion.chunk_size]
    assert (len(found.base), len(found.contender)) == (2 * child.WINDOWS, child.WINDOWS)
    assert min(*found.base, *found.contender) > 0


@pytest.mark.parametrize(
    ("values", "exact", "reads"),
    [
        ({"meta.cuda_graph": True}, True, False),
        ({"meta.compile": True, "model.fused_batchnorm": False}, False, False),
        ({"data.decode_threads": 9, "data.prefetch": 5}, True, True),
        ({"data.augmentation.strength": 0.4}, False, True),
        ({"meta.threads": 9}, False, True),
    ],
)
def test_contender_that_only_replays_or_reads_must_give_the_bits(config, values, exact, reads):
    assert child.what_is_asked(config, config.with_values(values)) == (exact, reads)


def asked(config, arithmetic, **more) -> dict:
    run = {"config": config.canonical(), "arithmetic": vars(arithmetic), "per_class": [15] * 10}
    return {**run, "base": {}, "contender": {}, "paths": {"lars.cu": False}, **more}


@pytest.mark.parametrize(
    ("error", "problem", "final"),
    [
        (RuntimeError("CUDA error: no access\nmore"), "RuntimeError: CUDA error: no access", False),
        (FastSuncetError("this step cannot be captured"), "this step cannot be captured", True),
    ],
)
def test_main_reports_an_error_of_any_kind(tmp_path, config, arithmetic, monkeypatch, error, problem, final):
    def lost(*_):
        raise error

    monkeypatch.setattr(child, "build", lost)
    monkeypatch.setattr(child.os, "_exit", sys.exit)
    monkeypatch.setattr(child, "end_with_parent", lambda by: None)
    (tmp_path / "request").write_text(json.dumps(asked(config, arithmetic)))
    with pytest.raises(SystemExit, match="1"):
        child.main(str(tmp_path / "request"), str(tmp_path / "report"))
    found = json.loads((tmp_path / "report").read_text())
    assert (found["problem"], found["final"]) == (problem, final)


def test_kernels_are_named_before_they_are_tried(config, arithmetic, monkeypatch):
    """What kills the process is then known."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(child, "work_stream", lambda device: device)

    def tried(path, trial, device):
        if path == "contrast.cu":
            raise SystemExit
        return Verdict()

    monkeypatch.setattr(child, "try_kernel", tried)
    said: list[dict] = []
    request = asked(config, arithmetic) | {"try": ["lars.cu", "contrast.cu"], "device": 0}
    with pytest.raises(SystemExit):
        child.try_kernels(request, said.append)
    assert said == [{"path": "lars.cu"}, {"path": "lars.cu", **vars(Verdict())}, {"path": "contrast.cu"}]
