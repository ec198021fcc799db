"""The scaling model's bytes are those that real ranks exchange, and its times behave as networks do."""

import functools
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import Batch, views
from fastsuncet.distributed.launch import Place
from fastsuncet.training.step import build, train_step
from tests.support.ranks import run_ranks
from tests.support.runs import small_config
from tools.bench.common import tensors
from tools.scaling import scaling_model
from tools.scaling.scaling_model import Network, predict
from tools.scaling.step_messages import Message, messages

ROOT = Path(__file__).resolve().parents[2]
IMAGENET = ROOT / "configs" / "in1k_10pct.yaml"
SWAV_CONFIG = ROOT / "configs" / "paper" / "in1k_swav.yaml"
DOCUMENT = ROOT / "docs" / "scaling.md"
IMAGES, CLASSES = 4, 10  # images of a rank
NAMES = {
    "_allgather_base_": "all_gather",
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
}
SWAV = ("criterion.instance=swav", "swav.prototypes=12", "swav.small_crops=3", "swav.small_size=8")
NOT_CONTRASTED = "criterion.supervision=cross_entropy"
# name: (overrides, labeled images of a rank)
CASES = {
    "suncet": ((), 6),
    "switched_off": ((), 0),
    "detached": (("criterion.keys=detached",), 6),
    "sup_con": (("criterion.supervision=sup_con",), 6),
    "head_batchnorm": (("model.head_batchnorm=true",), 6),
    "own_statistics": (("model.sync_batchnorm=false",), 6),
    "fused": (("model.fused_batchnorm=true",), 6),
    "cross_entropy": ((NOT_CONTRASTED,), 6),
    "simclr": (("criterion.supervised_epochs=0",), 0),
    "swav": ((*SWAV, "criterion.supervised_epochs=0", "model.head_batchnorm=true"), 0),
    "swav_without_small_crops": ((*SWAV[:2], "swav.small_crops=0", "swav.iterations=2"), 6),
    "swav_suncet": (SWAV, 6),
    "swav_cross_entropy": ((*SWAV, NOT_CONTRASTED), 6),
}
FEW = ("suncet", "swav_suncet")  # over more than two ranks, of which eight take their time on two cores


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


def heard_in_a_step(rank: int, world_size: int, folder: str, cases: tuple[str, ...]) -> dict[str, list]:
    """What a rank says in the last of some steps: the first ones are when ranks get to know each other."""
    return {case: _heard(rank, world_size, Path(folder), *CASES[case]) for case in cases}


def _heard(rank: int, world_size: int, folder: Path, overrides: tuple[str, ...], labeled: int) -> list:
    config = small_config(folder, *overrides)
    place = Place(rank, world_size, rank, torch.device("cpu"))
    _, network, optimizer, setting = build(config, place, CLASSES)
    draw = torch.Generator().manual_seed(rank)
    shown = tuple(torch.rand(IMAGES, 3, v.size, v.size, generator=draw) for v in views(config))
    images = torch.rand(labeled, 3, 16, 16, generator=draw)
    batch = Batch(0, shown, images, torch.arange(labeled) // 2)
    for _ in range(2):
        with Heard() as heard:
            train_step(network, optimizer, batch, 0.1, setting)
    return heard.seen


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """heard(ranks): the cases over so many ranks, which are started once."""
    cases = {2: tuple(CASES), 4: FEW, 8: FEW[:1]}
    return functools.cache(
        lambda ranks: run_ranks(heard_in_a_step, ranks, str(tmp_path_factory.mktemp("runs")), cases[ranks])
    )


@pytest.mark.parametrize(
    ("ranks", "case"), [*((2, case) for case in CASES), *((4, case) for case in FEW), (8, FEW[0])]
)
def test_every_byte_of_a_step_is_in_the_model(tmp_path, heard, ranks, case):
    overrides, labeled = CASES[case]
    config = small_config(tmp_path, *overrides)
    modelled = messages(config, ranks, IMAGES, labeled, device="cpu", classes=CLASSES)
    weights = modelled[-1]
    for each in heard(ranks):
        said = Counter(each[case])
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


def test_swavs_small_crops_are_a_second_pass_of_every_norm_of_the_encoder():
    said = messages(load_config(SWAV_CONFIG), 8, 64, 0)
    norms = [x for x in said if x.what == "BatchNorm, statistics"]
    assert len(norms) == 2 * 53 + 1  # and the head's own
    codes = next(x for x in said if x.what.startswith("codes"))
    assert (codes.bytes, codes.calls) == (8 * 4 * 2 * 3000, 3)
    assert not any(x.what.startswith(("rows", "labels", "gradient of the")) for x in said)
    assert said[-1].bytes - 4 * 128 * 3000 == 4 * (27_966_656 + 2 * 2048)


def test_a_classifier_has_a_gradient_and_gathers_nothing():
    config = load_config(IMAGENET, ["criterion.supervision=cross_entropy"])
    said = messages(config, 8, 44, 40, classes=100)
    assert said[-1].bytes == 4 * (27_966_656 + 2049 * 100)
    assert not any("label" in x.what for x in said)


def test_a_norm_says_the_same_whatever_the_number_of_ranks():
    """Two numbers a channel and a count, in float64; the gather before it joined those of every rank."""
    config = load_config(IMAGENET)
    sizes = [
        sum(x.bytes for x in messages(config, ranks, 44, 40) if x.what == "BatchNorm, statistics")
        for ranks in (2, 4096)
    ]
    assert sizes == [8 * (53 + 2 * 26_560)] * 2


def test_statistics_that_are_gathered_cost_less_on_a_node_and_many_times_as_much_on_many():
    config = load_config(IMAGENET)

    def forward(ranks: int, gathered: bool) -> float:
        return predict(config, ranks, 44, 40, 100.0, Network(), 67.0, gathered_norm=gathered).norm_forward

    assert forward(8, True) < forward(8, False) < 2 * forward(8, True)
    assert forward(64, True) > 1.4 * forward(64, False)
    assert forward(4096, True) > 40 * forward(4096, False)


def test_a_queue_is_there_only_where_batchnorm_and_gradients_share_one():
    def predicted(*overrides: str):
        return predict(load_config(IMAGENET, overrides), 64, 44, 40, 100.0, Network(), 67.0)

    shared = predicted()
    assert shared.queue > 0
    apart = predicted("model.sync_batchnorm=false")
    assert apart.queue == 0 and apart.gradients == shared.gradients and apart.step < shared.step
    # Together they are all of the buckets' time: nothing waits twice for one.
    size = messages(load_config(IMAGENET), 64, 44, 40)[-1].bytes
    buckets = [min(25 << 20, size - start) for start in range(0, size, 25 << 20)]
    every = 1e3 * sum(Network().seconds("all_reduce", bucket, 64) for bucket in buckets)
    assert shared.queue + shared.gradients == pytest.approx(every)


def commands_and_tables() -> list[tuple[str, list[str]]]:
    """Every command of docs/scaling.md that a table of results stands under, and that table."""
    found, command = [], ""
    for block in DOCUMENT.read_text().split("\n\n"):
        lines = block.strip("\n").splitlines()
        if lines[0].startswith("    python tools/scaling/scaling_model.py"):
            command = lines[0].strip()
        elif lines[0].startswith("| cards") and command:
            found.append((command, lines))
    return found


def test_every_table_of_the_document_is_what_its_command_prints(capsys):
    pairs = commands_and_tables()
    assert len(pairs) >= 5
    for command, table in pairs:
        words = [str(ROOT / word) if word.endswith(".yaml") else word for word in command.split()[2:]]
        assert scaling_model.main(words) == 0
        printed = capsys.readouterr().out
        assert "\n".join(table) in printed, f"{command}\n{printed}"


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


@pytest.mark.parametrize("wrong", ["--step-ms=0", "--images=0", "--labeled=-1", "--gpus-a-node=0"])
def test_a_step_that_cannot_be_is_refused(wrong, capsys):
    sound = [str(IMAGENET), "--step-ms=100", "--images=176"]
    with pytest.raises(SystemExit) as stop:
        scaling_model.main([*sound, wrong])
    assert stop.value.code == 2 and "above 0" in capsys.readouterr().err
