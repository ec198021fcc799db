"""The ledger against an independent count: torch's own FLOP counter on the very batches a run learns from."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import run_macs, update_macs, views
from fastsuncet.models.flops import FLOP_PER_MAC, equivalent_epochs
from fastsuncet.models.resnet import build_model
from fastsuncet.training.multi_view_model import MultiViewModel
from tests.support.runs import CONFIGS, small_config, train
from tests.training.test_methods import METHODS, small

IMAGENET = 1_281_167


def counted(config, arithmetic, supervised: bool) -> int:
    """Multiply-adds of the network's forward pass on one update's views, seen by torch on the meta device."""
    m, a = config.model, arithmetic
    swav = config.criterion.instance == "swav"
    model = build_model(m.name, m.library, m.stem, m.hidden, m.output, m.head_batchnorm, device="meta",
                        prototypes=config.swav.prototypes if swav else None)  # fmt: skip
    shown = [torch.empty(a.local_unlabeled, 3, v.size, v.size, device="meta") for v in views(config)]
    size = config.data.augmentation.size
    labeled = torch.empty(a.local_labeled if supervised else 0, 3, size, size, device="meta")
    with FlopCounterMode(display=False) as counter:
        MultiViewModel(model)(shown, labeled)
    # Not the ledger's: products with prototypes, which are part of the loss.
    rows = a.views * a.local_unlabeled
    beside = rows * m.output * config.swav.prototypes if swav else 0
    return counter.get_total_flops() // 2 - beside


@pytest.mark.parametrize(
    "config",
    [
        load_config(CONFIGS / "in1k_10pct.yaml"),
        load_config(CONFIGS / "cifar10_simclr.yaml"),
        load_config(CONFIGS / "in1k_10pct.yaml", ["criterion.instance=swav"]),
    ],
    ids=["SimCLR + SuNCEt at 224", "SimCLR on CIFAR-10", "SwAV + SuNCEt, 2 x 224 + 6 x 96"],
)
def test_the_ledger_agrees_with_torchs_own_counter(config):
    world_size = 64 if config.data.kind == "image_folder" else 1
    images = IMAGENET if config.data.kind == "image_folder" else 50_000
    arithmetic = config.resolve(world_size, images)
    for supervised in {False, arithmetic.supervised_steps > 0}:
        assert update_macs(config, arithmetic, supervised) == world_size * counted(
            config, arithmetic, supervised
        )


def test_a_simclr_update_on_cifar10_is_four_teraflops_and_its_run_390_petaflops():
    config = load_config(CONFIGS / "cifar10_simclr.yaml")
    arithmetic = config.resolve(1, 50_000)
    assert FLOP_PER_MAC * update_macs(config, arithmetic, False) / 1e12 == pytest.approx(4.00, abs=0.005)
    assert FLOP_PER_MAC * run_macs(config, arithmetic) / 1e15 == pytest.approx(390, abs=0.5)


def test_a_hundred_epochs_of_suncet_cost_145_and_a_half_of_simclr():
    config = load_config(CONFIGS / "in1k_10pct.yaml", ["optimization.epochs=100"])
    samples = config.resolve(64, IMAGENET).total_samples()
    assert equivalent_epochs(samples, IMAGENET, 4096) == pytest.approx(145.5, abs=0.05)


@pytest.mark.parametrize("method", ["SimCLR + SuNCEt", "SwAV + SuNCEt"])
def test_what_a_run_wrote_down_is_what_its_updates_cost_also_across_a_stop(tmp_path, method):
    assert method in METHODS
    config = small(tmp_path, method, "criterion.supervised_epochs=1")
    train(config, stop_at=5)
    train(config)
    arithmetic = config.resolve(1, 1442)
    last = json.loads((config.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["petaflops"] == FLOP_PER_MAC * run_macs(config, arithmetic) / 1e15
    assert last["images"] == arithmetic.total_samples()
    assert last["images"] == 4 * arithmetic.update_samples(True) + 6 * arithmetic.update_samples(False)


def test_a_checkpoint_from_before_the_macs_were_kept_continues_its_petaflops(tmp_path):
    from fastsuncet.metrics.cost import RunCost

    config = small_config(tmp_path)
    cost = update_macs(config, config.resolve(1, 1442), True)
    ledger = RunCost()
    ledger.add(100, cost)
    old = {key: value for key, value in ledger.state().items() if key != "macs"}
    again = RunCost()
    again.restore(old)
    assert again.macs == cost


def test_the_hours_of_an_evaluation_are_not_those_of_training(tmp_path, monkeypatch):
    """SimCLR's neighbours are sought among all images and SuNCEt's among the labeled: not what a comparison is of."""
    later = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + later[0])

    def slow(*_, **__) -> float:
        later[0] += 5000
        return 0.5

    monkeypatch.setattr("fastsuncet.metrics.cost.time", clock)
    monkeypatch.setattr("fastsuncet.commands.train.online_knn", slow)
    config = small_config(tmp_path, "evaluation.knn_every_epochs=1")
    train(config)
    records = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
    assert later[0] == 15_000  # two whole epochs, and the end
    assert 0 < records[-1]["seconds"] < 5000
