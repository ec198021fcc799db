"""The cost of a run against an independent count: torch's FLOP counter on the very batches a run learns from."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import run_macs, update_macs, views
from fastsuncet.metrics.cost import RunCost
from fastsuncet.models.flops import FLOP_PER_MAC
from fastsuncet.models.resnet import build_model
from fastsuncet.training.multi_view_model import MultiViewModel
from tests.support.runs import CONFIGS, small_config, train
from tests.training.test_methods import small


def counted(config, arithmetic, supervised: bool) -> int:
    """Return the multiply-adds of a forward pass on one update's views, as torch counts them on the meta device."""
    m, a = config.model, arithmetic
    swav = config.criterion.instance == "swav"
    model = build_model(m.name, m.library, m.stem, m.hidden, m.output, m.head_batchnorm, device="meta",
                        prototypes=config.swav.prototypes if swav else None)  # fmt: skip
    shown = [torch.empty(a.local_unlabeled, 3, v.size, v.size, device="meta") for v in views(config)]
    size = config.data.augmentation.size
    labeled_images = a.global_labeled // a.world_size if supervised else 0
    labeled = torch.empty(labeled_images, 3, size, size, device="meta")
    with FlopCounterMode(display=False) as counter:
        MultiViewModel(model)(shown, labeled)
    # Products with prototypes are part of the loss, which the cost leaves out.
    prototypes = a.views * a.local_unlabeled * m.output * config.swav.prototypes if swav else 0
    return counter.get_total_flops() // 2 - prototypes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "overrides", "ranks", "images"),
    [
        ("cifar10_simclr.yaml", [], 1, 50_000),
        ("in1k_10pct.yaml", ["criterion.instance=swav"], 64, 1_281_167),  # and SuNCEt: 2 x 224 + 6 x 96
    ],
)
def test_cost_of_an_update_is_torchs_count(config, overrides, ranks, images):
    config = load_config(CONFIGS / config, overrides)
    arithmetic = config.resolve(ranks, images)
    for supervised in {False, arithmetic.supervised_steps > 0}:
        assert update_macs(config, arithmetic, supervised) == ranks * counted(config, arithmetic, supervised)


def test_cost_of_simclr_on_cifar10_is_390_petaflops():
    config = load_config(CONFIGS / "cifar10_simclr.yaml")
    arithmetic = config.resolve(1, 50_000)
    assert FLOP_PER_MAC * update_macs(config, arithmetic, False) / 1e12 == pytest.approx(4.00, abs=0.005)
    assert FLOP_PER_MAC * run_macs(config, arithmetic) / 1e15 == pytest.approx(390, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["SimCLR + SuNCEt", "SwAV + SuNCEt"])
def test_cost_in_the_metrics_is_that_of_all_updates_across_a_stop(tmp_path, method):
    config = small(tmp_path, method, "criterion.supervised_epochs=1")
    train(config, stop_at=5)
    train(config)
    arithmetic = config.resolve(1, 1442)
    last = json.loads((config.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["petaflops"] == FLOP_PER_MAC * run_macs(config, arithmetic) / 1e15
    assert last["images"] == arithmetic.total_samples()
    assert last["images"] == 4 * arithmetic.update_samples(True) + 6 * arithmetic.update_samples(False)


def test_cost_of_a_checkpoint_without_macs_continues_its_petaflops():
    cost, again = RunCost(), RunCost()
    cost.add(100, 123_456_789_012)
    again.restore({key: value for key, value in cost.state().items() if key != "macs"})
    assert again.macs == cost.macs


@pytest.mark.slow
def test_cost_leaves_out_the_seconds_of_evaluations(tmp_path, monkeypatch):
    """k-NN searches all images for SimCLR and the labeled ones for SuNCEt: that is no cost of the method."""
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
