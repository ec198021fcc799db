"""Joules are what the GPUs' counters say, over all ranks and restarts, or absent."""

import sys
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.metrics import energy
from fastsuncet.metrics.cost import RunCost
from fastsuncet.metrics.energy import EnergyMeter, open_energy_meter
from tests.support.ranks import run_ranks

CUDA = torch.device("cuda", 0)


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
def gpu(monkeypatch):
    """Name the one GPU that torch sees "a"."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a"))


def test_energy_is_the_counters_differences_from_the_first_step(gpu):
    # Read when opened, at the start of the clock, and at two ticks.
    cost = RunCost(meter=open_energy_meter(CUDA, FakeNvml(a=[1_000, 5_000, 7_500, 7_750])))
    assert cost.record()["joules"] == 0
    cost.start_clock()
    cost.tick()
    assert cost.record()["joules"] == pytest.approx(2.5)
    cost.tick()
    assert cost.record()["joules"] == cost.state()["joules"] == pytest.approx(2.75)


def test_energy_continues_after_a_restart_without_the_time_between(gpu):
    cost = RunCost(meter=open_energy_meter(CUDA, FakeNvml(a=[90_000, 91_000, 93_000])))
    cost.restore({"images": 8, "updates": 2, "petaflops": 1e-9, "seconds": 3.0, "joules": 40.0, "macs": 7})
    cost.start_clock()
    cost.tick()
    assert cost.record()["joules"] == pytest.approx(42)


def test_energy_never_falls_when_the_counter_begins_again(gpu):
    cost = RunCost(meter=open_energy_meter(CUDA, FakeNvml(a=[5_000, 5_000, 6_000, 200, 1_200])))
    cost.start_clock()
    seen = []
    for _ in range(3):
        cost.tick()
        seen.append(cost.record()["joules"])
    assert seen == pytest.approx([1, 1, 2])


def test_energy_of_a_run_with_an_unmetered_part_is_absent(gpu):
    state = {"images": 8, "updates": 2, "petaflops": 1e-9, "seconds": 3.0, "macs": 7}
    begun_without = RunCost(meter=open_energy_meter(CUDA, FakeNvml(a=[1, 2, 3])))
    begun_without.restore(state)
    continued_without = RunCost()
    continued_without.restore({**state, "joules": 40.0})
    lost = RunCost(meter=open_energy_meter(CUDA, FakeNvml(a=[1, 2, None, 4])))
    for cost in (begun_without, continued_without, lost):
        cost.start_clock()
        cost.tick()
        cost.tick()
        assert "joules" not in cost.record() and "joules" not in cost.state()


def test_energy_meter_needs_a_gpu_its_package_and_its_counter(gpu, monkeypatch):
    assert open_energy_meter(torch.device("cpu"), FakeNvml(a=[1])) is None
    assert (
        open_energy_meter(CUDA, FakeNvml(b=[1])) is None
    )  # a slice of a GPU is not found by the GPU's identity
    assert open_energy_meter(CUDA, FakeNvml(a=[None])) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_energy_meter(CUDA) is None


def _spent(rank: int, world_size: int) -> list[float | None]:
    shared = EnergyMeter(FakeNvml(x=[0, 3_000]), "GPU-x").spent()
    own = EnergyMeter(FakeNvml(**{f"own{rank}": [0, 1_000 * (rank + 1)]}), f"GPU-own{rank}").spent()
    broken = EnergyMeter(FakeNvml(**{f"own{rank}": [0, None if rank else 5]}), f"GPU-own{rank}").spent()
    energy._own_meter = lambda device, nvml: SimpleNamespace() if rank == 0 else None
    opened = open_energy_meter(CUDA)
    return [shared, own, broken, opened]


@pytest.mark.slow
def test_energy_adds_up_ranks_and_counts_a_shared_gpu_once():
    for shared, own, broken, opened in run_ranks(_spent, 2):
        assert shared == pytest.approx(3)
        assert own == pytest.approx(1 + 2)
        assert broken is None
        assert opened is None, "with one rank without a counter, no rank has a meter"
