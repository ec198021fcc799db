"""The scaling model's bytes are those that real ranks exchange, and its times behave as networks do."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.config import load_config
from fastsuncet.config.problems import ConfigErrors
from fastsuncet.data import Batch
from fastsuncet.launch import Place
from fastsuncet.step import build, train_step
from tests.ranks import run_ranks
from tests.runs import small_config
from tools import scaling_model
from tools.bench_common import tensors
from tools.scaling_model import Network, predict
from tools.step_messages import Message, messages

ROOT = Path(__file__).resolve().parents[1]
IMAGENET = ROOT / "configs" / "in1k_10pct.yaml"
IMAGES, LABELED = 4, 6  # of a rank
NAMES = {
    "_allgather_base_": "all_gather",
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
}
CASES = {
    "suncet": (),
    "detached": ("criterion.keys=detached",),
    "sup_con": ("criterion.supervision=sup_con",),
    "head_batchnorm": ("model.head_batchnorm=true",),
}


class Heard(TorchDispatchMode):
    """(collective, bytes of its largest tensor) of all that goes over the network, DDP's buckets included."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.split("::")[1]
            self.seen.append((NAMES[name], max(x.nbytes for x in tensors((args, kwargs)))))
        return function(*args, **(kwargs or {}))


def heard_in_a_step(rank: int, world_size: int, folder: str, overrides: list[str]) -> list:
    """What a rank says in the third of three steps: the first two are when ranks get to know each other."""
    config = small_config(Path(folder), *overrides)
    _, network, optimizer, setting = build(config, Place(rank, world_size, rank, torch.device("cpu")), 10)
    generator = torch.Generator().manual_seed(rank)
    views = tuple(torch.rand(IMAGES, 3, 16, 16, generator=generator) for _ in range(2))
    batch = Batch(0, views, torch.rand(LABELED, 3, 16, 16, generator=generator), torch.arange(LABELED) // 2)
    for _ in range(3):
        with Heard() as heard:
            train_step(network, optimizer, batch, 0.1, setting)
    return heard.seen


@pytest.mark.parametrize(
    ("ranks", "case"), [*((2, case) for case in CASES), (4, "suncet"), (8, "suncet")], ids=str
)
def test_every_byte_of_a_step_is_in_the_model(tmp_path, ranks, case):
    overrides = list(CASES[case])
    every = run_ranks(heard_in_a_step, ranks, str(tmp_path), overrides)
    modelled = messages(small_config(tmp_path, *overrides), ranks, IMAGES, LABELED, device="cpu")
    weights = modelled[-1]
    for heard in every:
        said = Counter(heard)
        for message in modelled[:-1]:
            said[message.collective, message.bytes] -= message.calls
        rest = {key: calls for key, calls in said.items() if calls}
        # What is left are DDP's buckets, however many it makes.
        assert all(calls > 0 and collective == "all_reduce" for (collective, _), calls in rest.items()), rest
        assert sum(size * calls for (_, size), calls in rest.items()) == weights.bytes


def test_a_gpu_compares_no_shapes_and_scatters_what_gloo_must_reduce_whole():
    config = load_config(IMAGENET)
    cpu, gpu = (messages(config, 8, 44, 40, device=device) for device in ("cpu", "cuda"))
    assert not any("shape" in x.what for x in gpu) and sum("shape" in x.what for x in cpu) == 2
    scattered = [x for x in gpu if x.collective == "reduce_scatter"]
    assert [x.bytes for x in scattered] == [8 * 4 * 128 * 40, 8 * 4 * 128 * 88]
    assert [x.bytes for x in cpu if "as keys" in x.what] == [x.bytes for x in scattered]


def test_resnet50_has_53_norms_and_28_million_gradients():
    said = messages(load_config(IMAGENET), 8, 44, 40)
    assert sum(x.what == "BatchNorm, statistics" for x in said) == 53
    assert said[-1] == Message("gradients of the weights", "all_reduce", 4 * 27_966_656)


def test_one_rank_says_nothing_and_loses_nothing():
    config = load_config(IMAGENET)
    assert messages(config, 1, 44, 40) == []
    alone = predict(config, 1, 44, 40, 50.0, Network(), 67.0)
    assert alone.step == 50.0 and alone.efficiency == 1.0 and alone.largest == ""


def test_what_is_not_modelled_is_said():
    swav = load_config(ROOT / "configs" / "paper" / "in1k_swav.yaml")
    own = load_config(IMAGENET, ["model.sync_batchnorm=false"])
    labels = load_config(IMAGENET, ["criterion.supervision=cross_entropy"])
    for config, words in ((swav, "swav"), (own, "DDP then sends"), (labels, "cross_entropy")):
        with pytest.raises(ConfigErrors, match=words):
            messages(config, 8, 44, 40)


def test_a_ring_sends_what_arithmetic_says():
    assert Message("x", "all_gather", 800).sent(8) == 700  # 100 of its own to each of seven
    assert Message("x", "reduce_scatter", 800).sent(8) == 700
    assert Message("x", "all_reduce", 800).sent(8) == 1400
    assert Message("x", "all_reduce", 800, calls=3).sent(8) == 4200


def test_large_messages_cost_their_bytes_and_small_ones_their_hops():
    network, gigabyte = Network(), 10**9
    for ranks, bandwidth in ((8, 450e9), (64, 400e9)):
        share = (ranks - 1) / ranks
        assert network.seconds("all_gather", gigabyte, ranks) == pytest.approx(
            share * gigabyte / bandwidth, rel=0.2
        )
    small = [network.seconds("all_gather", 8, ranks) for ranks in (64, 512, 4096)]
    assert small[1] / small[0] == pytest.approx(8, rel=0.1) and small[2] / small[1] == pytest.approx(
        8, rel=0.01
    )
    tree = [network.seconds("all_reduce", 8, ranks) for ranks in (64, 512, 4096)]
    assert tree[1] - tree[0] == pytest.approx(tree[2] - tree[1])  # a tree grows by the logarithm
    assert network.seconds("all_gather", 8, 1) == network.seconds("all_gather", 0, 8) == 0


def test_gradients_hide_under_the_backward_pass_until_it_is_too_short():
    config = load_config(IMAGENET)
    long, short = (predict(config, 64, 44, 40, ms, Network(), 67.0) for ms in (100.0, 0.1))
    assert 0 < long.gradients < short.gradients
    every = messages(config, 64, 44, 40)[-1].bytes
    assert (
        short.gradients > 1e3 * every * 2 * 63 / 64 / 400e9
    )  # their bytes at the cards' bandwidth, and hops


def test_the_command_tells_bytes_times_and_the_largest_term(tmp_path, capsys):
    path = tmp_path / "model.json"
    arguments = [
        str(IMAGENET),
        "--step-ms",
        "100",
        "--images",
        "176",
        "--labeled",
        "160",
        "--json",
        str(path),
    ]
    assert scaling_model.main(arguments) == 0
    points = json.loads(path.read_text())["points"]
    assert [p["ranks"] for p in points] == [1, 8, 64, 512, 4096]
    efficiencies = [p["efficiency"] for p in points]
    assert efficiencies == sorted(efficiencies, reverse=True)
    printed = capsys.readouterr().out
    assert "rows of the views" in printed and points[-1]["largest"] in printed
    assert math.isclose(points[0]["step"], 100)
    assert scaling_model.main(["none.yaml", "--step-ms", "1", "--images", "1"]) == 2
