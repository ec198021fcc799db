"""The bytes of the scaling model are those that real ranks exchange; its times behave as networks do."""

import functools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.config import load_config
from fastsuncet.distributed.place import Place
from fastsuncet.training.step import build, train_step
from tests.support.methods import METHODS
from tests.support.ranks import run_ranks
from tests.support.runs import small_config
from tests.support.steps import batch_of
from tools.bench.dispatch_counter import tensors
from tools.scaling import scaling_model
from tools.scaling.scaling_model import Network, predict
from tools.scaling.step_messages import Message, messages

ROOT = Path(__file__).resolve().parents[2]
IMAGENET = ROOT / "configs" / "in1k_10pct.yaml"
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
    "paws": (METHODS["PAWS"], 6),
    "paws_suncet": (METHODS["PAWS + SuNCEt"], 6),
}
FEW = ("suncet", "swav_suncet")  # over four ranks, which are slow on two cores


class Recorder(TorchDispatchMode):
    """Records (collective, bytes of its largest tensor) of each collective, DDP's buckets included."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = function._schema.name.split("::")[1]
            self.seen.append((NAMES[name], max(x.nbytes for x in tensors((args, kwargs)))))
        return function(*args, **(kwargs or {}))


def record_a_step(rank: int, world_size: int, folder: str, cases: tuple[str, ...]) -> dict[str, list]:
    """Return the collectives of a rank's second step: in the first one ranks also exchange their shapes."""
    return {case: _record(rank, world_size, Path(folder), *CASES[case]) for case in cases}


def _record(rank: int, world_size: int, folder: Path, overrides: tuple[str, ...], labeled: int) -> list:
    config = small_config(folder, *overrides)
    place = Place(rank, world_size, torch.device("cpu"))
    _, network, optimizer, method = build(config, place, CLASSES, range(1, CLASSES + 1))
    batch = batch_of(config, labeled, IMAGES, seed=rank)
    for _ in range(2):
        with Recorder() as recorder:
            train_step(network, optimizer, batch, 0.1, method)
    return recorder.seen


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """recorded(ranks): the collectives of all cases over so many ranks, which are started once."""
    cases = {2: tuple(CASES), 4: FEW}
    return functools.cache(
        lambda ranks: run_ranks(record_a_step, ranks, str(tmp_path_factory.mktemp("runs")), cases[ranks])
    )


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case"), [*((2, case) for case in CASES), *((4, case) for case in FEW)])
def test_messages_are_the_collectives_of_a_real_step(tmp_path, recorded, ranks, case):
    overrides, labeled = CASES[case]
    config = small_config(tmp_path, *overrides)
    modelled = messages(config, ranks, IMAGES, labeled, device="cpu", classes=CLASSES)
    weights = modelled[-1]
    for each in recorded(ranks):
        left = Counter(each[case])
        for message in modelled[:-1]:
            left[message.collective, message.bytes] -= message.calls
        rest = {key: calls for key, calls in left.items() if calls}
        # The rest are DDP's buckets.
        assert all(calls > 0 and collective == "all_reduce" for (collective, _), calls in rest.items()), rest
        assert sum(size * calls for (_, size), calls in rest.items()) == weights.bytes


def test_messages_on_a_gpu_have_no_shapes_and_scatter_what_gloo_reduces():
    config = load_config(IMAGENET)
    cpu, gpu = (messages(config, 8, 44, 40, device=device) for device in ("cpu", "cuda"))
    assert not any("shape" in x.what for x in gpu) and sum("shape" in x.what for x in cpu) == 2
    scattered = [x.bytes for x in gpu if x.collective == "reduce_scatter"]
    assert scattered == [8 * 4 * 128 * 40, 8 * 4 * 128 * 88]
    assert [x.bytes for x in cpu if "as keys" in x.what] == scattered


@pytest.mark.parametrize(("fused", "count"), [("auto", 49), ("false", 53)])
def test_messages_of_resnet50_have_53_norms_and_28_million_gradients(fused, count):
    """Fused, each of four shortcuts shares its messages with its block's last layer."""
    config = load_config(IMAGENET, [f"model.fused_batchnorm={fused}"])
    for ranks in (2, 4096):  # two numbers a channel and a count, in float64, whatever the number of ranks
        norms = [x.bytes for x in messages(config, ranks, 44, 40) if x.what == "BatchNorm, statistics"]
        assert len(norms) == count and sum(norms) == 8 * (53 + 2 * 26_560)
    gradients = Message("gradients of the weights", "all_reduce", 4 * 27_966_656)
    assert messages(config, 8, 44, 40)[-1] == gradients


def test_ring_sends_what_arithmetic_gives():
    assert Message("x", "all_gather", 800).sent(8) == 700  # its own 100 to each of seven
    assert Message("x", "reduce_scatter", 800).sent(8) == 700
    assert Message("x", "all_reduce", 800, calls=3).sent(8) == 4200


def test_gradients_hide_under_the_backward_pass_until_it_is_too_short():
    config = load_config(IMAGENET)
    long, short = (predict(config, 64, 44, 40, ms, Network(), 67.0)["gradients left"] for ms in (100.0, 0.1))
    assert 0 < long < short


def documented_commands() -> list[tuple[str, str]]:
    """Return each command of docs/scaling.md with the table of results below it."""
    pattern = r"^    python tools/scaling/scaling_model.py (.+)\n\n((?:\|.*\n)+)"
    return re.findall(pattern, DOCUMENT.read_text(), re.M)


@pytest.mark.slow
def test_tables_of_the_document_are_what_the_commands_print_and_write(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    path = tmp_path / "model.json"
    assert len(documented_commands()) == 4
    for words, table in documented_commands():
        assert scaling_model.main([*words.split(), f"--json={path}"]) == 0
        printed = capsys.readouterr().out
        assert table in printed and ("rows of the views" in printed) != ("swav" in words), words
        points = json.loads(path.read_text())["points"]
        assert [p["GPUs"] for p in points] == [1, 8, 64, 512, 4096]
        assert f"--step-ms {points[0]['step']:g} " in words
        efficiencies = [p["efficiency"] for p in points]
        assert efficiencies == sorted(efficiencies, reverse=True)


@pytest.mark.parametrize(
    "wrong", ["--step-ms=0", "--images=0", "--labeled=-1", "--gpus-a-node=0", "--card-gbs=0", "--teraflops=0"]
)
def test_impossible_step_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        scaling_model.main([str(IMAGENET), "--step-ms=100", "--images=176", wrong])
    assert stop.value.code == 2 and "must be above 0" in capsys.readouterr().err
