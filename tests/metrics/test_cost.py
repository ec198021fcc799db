"""The cost of a run: FLOPs by torch's counter on the very batches a run learns from, joules by the GPUs' counters."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import views
from fastsuncet.metrics import cost as module
from fastsuncet.metrics.cost import EnergyMeter, Ledger, open_energy_meter
from fastsuncet.models.flops import FLOP_PER_MAC, run_macs, update_macs
from fastsuncet.models.resnet import build_model
from fastsuncet.training.multi_view_model import MultiViewModel
from tests.support.methods import PAWS, PAWS_HEADS
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS, small_config, train


def counted(config, arithmetic, supervised: bool) -> int:
    """Return the multiply-adds of a forward pass on one update's views, as torch counts them on the meta device."""
    m, a = config.model, arithmetic
    swav = config.criterion.instance == "swav"
    model = build_model(m.name, m.stem, *m.head, device="meta",
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


SMALL = ["model.name=resnet18"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "overrides", "ranks", "images"),
    [
        ("cifar10_simclr.yaml", [], 1, 50_000),
        # And SuNCEt: 2 x 224 + 6 x 96.
        ("in1k_10pct.yaml", [*SMALL, "criterion.instance=swav"], 64, 1_281_167),
        ("in1k_10pct.yaml", [*SMALL, *PAWS, *PAWS_HEADS, "model.output=2048"], 64, 1_281_167),
    ],
)
def test_cost_of_an_update_is_torchs_count(config, overrides, ranks, images):
    config = load_config(CONFIGS / config, overrides)
    arithmetic = config.resolve(ranks, images)
    for supervised in {False, arithmetic.supervised_steps > 0}:
        assert update_macs(config, arithmetic, supervised) == ranks * counted(config, arithmetic, supervised)


@pytest.mark.slow
def test_cost_in_the_metrics_is_that_of_all_updates_across_a_stop(tmp_path, monkeypatch):
    """Without evaluations: k-NN searches all images for SimCLR, and the labeled ones for SuNCEt."""
    later = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + later[0])

    def slow(*_, **__) -> float:
        later[0] += 5000
        return {"knn_accuracy": 0.5}

    monkeypatch.setattr("fastsuncet.metrics.cost.time", clock)
    monkeypatch.setattr("fastsuncet.evaluation.knn.online_knn", slow)
    config = small_config(tmp_path, "criterion.supervised_epochs=1", "evaluation.knn_every_epochs=1")
    train(config, stop_at=5)
    train(config)
    arithmetic = config.resolve(1, 1442)
    last = json.loads((config.run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["petaflops"] == FLOP_PER_MAC * run_macs(config, arithmetic) / 1e15
    assert last["views"] == 4 * arithmetic.update_views(True) + 6 * arithmetic.update_views(False)
    assert later[0] == 15_000  # two whole epochs, and the end
    assert 0 < last["seconds"] < 5000


CUDA = torch.device("cuda", 0)
BEFORE = {"views": 8, "updates": 2, "petaflops": 1e-9, "seconds": 3.0, "macs": 7}


class FakeNvml:
    """The used part of pynvml: GPUs by identity, each with the millijoules of its next readings."""

    class NVMLError(Exception):
        pass

    def __init__(self, **readings: list[int | None]):
        self.readings = {f"GPU-{uuid}": list(values) for uuid, values in readings.items()}

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's name
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid not in self.readings:
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:  # noqa: N802
        value = self.readings[handle].pop(0)
        if value is None:
            raise self.NVMLError("not supported")
        return value


@pytest.fixture
def meter(monkeypatch):
    """Return a function that opens a meter where the one GPU that torch sees is "a", and NVML has these readings."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))

    def opened(device: torch.device = CUDA, **readings: list[int | None]) -> EnergyMeter | None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**readings) if readings else None)
        return open_energy_meter(device)

    return opened


ENERGY = {  # millijoules that are read, the ledger's state before, joules after each tick
    # Read when opened, at the start of the clock, and at each tick.
    "from the first step": ([1_000, 5_000, 7_500, 7_750], None, [2.5, 2.75]),
    "restart, without the time before it": ([90_000, 91_000, 93_000], {**BEFORE, "joules": 40.0}, [42]),
    "driver reloaded, which counts anew": ([5_000, 5_000, 6_000, 200, 1_200], None, [1, 1, 2]),
    "no meter before": ([1, 2, 3, 4], BEFORE, [None, None]),
    "no meter now": (None, {**BEFORE, "joules": 40.0}, [None, None]),
    "no meter for a while": ([1, 2, None, 4], None, [None, None]),
}


@pytest.mark.parametrize("case", ENERGY)
def test_energy_is_the_counters_differences_or_absent(meter, case):
    readings, state, joules = ENERGY[case]
    cost = Ledger(meter=meter(a=readings) if readings else None)
    if state is None:
        assert cost.record().get("joules") == (0 if readings else None)
    else:
        cost.restore(state)
    cost.start_clock()
    for expected in joules:
        cost.tick()
        assert cost.record().get("joules") == cost.state().get("joules") == pytest.approx(expected)


def test_energy_meter_needs_a_gpu_its_package_and_its_counter(meter):
    assert meter(torch.device("cpu"), a=[1]) is None
    assert meter(b=[1]) is None, "a slice of a GPU has another identity"
    assert meter(a=[None]) is None
    assert meter() is None, "no package"


def _spent(rank: int, world_size: int) -> list[float | None]:
    shared = EnergyMeter(FakeNvml(x=[0, 3_000]), "GPU-x").spent()
    own = EnergyMeter(FakeNvml(**{f"own{rank}": [0, 1_000 * (rank + 1)]}), f"GPU-own{rank}").spent()
    broken = EnergyMeter(FakeNvml(**{f"own{rank}": [0, None if rank else 5]}), f"GPU-own{rank}").spent()
    module._own_meter = lambda device: SimpleNamespace() if rank == 0 else None
    return [shared, own, broken, open_energy_meter(CUDA)]


@pytest.mark.slow
def test_energy_adds_up_ranks_and_counts_a_shared_gpu_once():
    # With one rank without a counter, no rank has a meter.
    assert run_ranks(_spent, 2) == [[3, 1 + 2, None, None]] * 2
