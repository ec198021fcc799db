"""A contender must compute what plain computes, and a child reports what is wrong with one that does not."""

import json
import sys
import time

import pytest
import torch

from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import FastSuncetError
from fastsuncet.tuning import child
from fastsuncet.tuning.child import _Bench
from fastsuncet.tuning.chooser import CONTENDER, PLAIN
from tests.support.runs import small_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Config:
    return small_config(
        tmp_path_factory.mktemp("runs"), "criterion.unsupervised_batch_size=40", "optimization.warmup=0"
    )


@pytest.fixture(scope="module")
def bench(config) -> _Bench:
    place = Place(0, 1, 0, torch.device("cpu"))
    images = open_images(config, place, validation=False)
    return _Bench(place, images, config.resolve(1, *images.counts()))


@pytest.mark.parametrize(
    ("values", "exact", "problem"),
    [
        ({"criterion.chunk_size": 7}, False, None),  # another order of the same sums
        ({"criterion.chunk_size": 7}, True, "3 steps gave other bits than without it"),
        ({"meta.precision": "bf16"}, False, None),
        ({"criterion.temperature": 0.25}, False, "differ by"),
        ({"optimization.weight_decay": 0.1}, False, "differ by"),
    ],
)
def test_step_problem_is_a_difference_beyond_rounding(bench, config, values, exact, problem):
    found = bench.step_problem(config, config.with_values(values), exact=exact)
    assert found == problem if problem is None else problem in found


def test_step_problem_of_a_network_without_batchnorm(bench, config):
    plain = config.with_values({"model.name": "timm/test_vit"})
    assert bench.step_problem(plain, plain.with_values({"criterion.chunk_size": 7}), exact=False) is None


def test_step_problem_of_a_graph_that_is_not_captured_ends_the_child(bench, config):
    """A run would go on without it, so the contender would be plain."""
    with pytest.raises(FastSuncetError, match=r"meta\.cuda_graph: .*there is no CUDA device, this is cpu"):
        bench.step_problem(config, config.with_values({"meta.cuda_graph": True}), exact=True)


def test_step_problem_in_16_bits_is_looked_for_in_float32_too(bench, config):
    """A mistake of a few percent is within the rounding of bfloat16."""
    plain = config.with_values({"meta.precision": "bf16"})
    assert "differ" in bench.step_problem(
        plain, plain.with_values({"criterion.temperature": 0.21}), exact=False
    )


def test_step_problem_of_a_step_with_other_bits_the_second_time(bench, config, monkeypatch):
    real, count = bench._train, iter(range(9))
    monkeypatch.setattr(bench, "_train", lambda *a: {**real(*a), "losses": torch.full((1,), next(count))})
    assert bench.step_problem(config, config, exact=False) == "3 steps gave other bits the second time"


@pytest.mark.parametrize(
    ("values", "exact", "problem"),
    [
        ({"data.decode_threads": 1, "data.prefetch": 3}, True, None),
        ({"data.augmentation.strength": 0.4}, True, "other pixels than without it, at step 0"),
        ({"data.augmentation.strength": 0.4}, False, "the pixels differ by"),
        ({"data.augmentation.strength": 0.4999}, False, None),
    ],
)
def test_pixel_problem(bench, config, values, exact, problem):
    found = bench.pixel_problem(config, config.with_values(values), exact=exact)
    assert found == problem if problem is None else problem in found


@pytest.mark.parametrize("clock", ["step", "loop"])
def test_time_takes_turns_and_needs_three(bench, config, monkeypatch, clock):
    monkeypatch.setattr(child, "TURN", 0.01)
    sides = {PLAIN: config, CONTENDER: config.with_values({"criterion.chunk_size": 64})}
    found = bench.time(sides, clock, time.time() + 90)
    assert found.views == 2 * 40 + 10 * 4 and found.memory_left is None
    turns = {len(found.seconds[side]) for side in sides}
    assert turns <= set(range(3, 10)) and len(turns) == 1
    assert all(seconds > 0 for side in sides for seconds in found.seconds[side])
    assert bench.time(sides, clock, time.time()).problem.startswith("no time for 3 turns: a step takes ")


def test_main_reports_an_error_of_any_kind(tmp_path, config, monkeypatch):
    def lost(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(child, "build", lost)
    monkeypatch.setattr(child.os, "_exit", sys.exit)
    monkeypatch.setattr(child, "end_with_parent", lambda by: None)
    request = {
        "config": config.canonical(),
        "sides": {PLAIN: {}, CONTENDER: {}},
        "clock": "step",
        "exact": False,
    }
    (tmp_path / "request").write_text(json.dumps({**request, "ends": time.time() + 9}))
    with pytest.raises(SystemExit):
        child.main(str(tmp_path / "request"), str(tmp_path / "report"))
    problem = json.loads((tmp_path / "report").read_text())["problem"]
    assert problem == "RuntimeError: CUDA error: an illegal memory access was encountered"
