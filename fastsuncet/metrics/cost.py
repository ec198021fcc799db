"""The ledger: what a run has cost so far, in views, updates, petaFLOPs, seconds and joules. Checkpoints keep it.

Counted is 6 x MAC for a view in training (2 forward, 4 backward) of the encoder and the head (models/flops.py). Losses
with their classifier or prototypes, BatchNorm, optimizer and pixels are not counted: under 2 % for a ResNet-50 at 224.

Joules are those of the ranks' GPUs, board and memory, not of the host: from the counter that NVIDIA's driver keeps,
read through NVML (package nvidia-ml-py) without the device's stream. If one rank has no counter (a CPU, an older or
partitioned GPU, no package), the run reports no joules at all instead of a part of them.
"""

import importlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from fastsuncet.distributed.collectives import gather_json
from fastsuncet.models.flops import petaflops


class EnergyMeter:
    """Reads the counter of one GPU; `open_energy_meter` makes one if every rank has a counter.

    The counter belongs to the GPU: it includes other programs, and a GPU that several ranks share counts once.
    """

    def __init__(self, nvml: Any, uuid: str):  # nvml: the module pynvml
        self._nvml, self._uuid = nvml, uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self.start()

    def start(self) -> None:
        """Count from now on: energy that was spent before the run's first step is not the run's."""
        self._last = self._read()

    def spent(self) -> float | None:
        """Return joules of all ranks' GPUs since the last call; None if one could not be read. A collective."""
        before, self._last = self._last, self._read()
        own = None
        if before is not None and self._last is not None:
            # After a driver is reloaded it counts from 0. Losing that little is better than a negative value.
            own = max(0, self._last - before) / 1000
        every = gather_json([self._uuid, own])
        return None if any(joules is None for _, joules in every) else sum(dict(every).values())

    def _read(self) -> int | None:
        """Return millijoules since the driver was loaded, None if this GPU does not report them."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None


def open_energy_meter(device: torch.device) -> EnergyMeter | None:
    """Return a meter for the GPUs of all ranks, None on every rank if one of them has no counter. A collective."""
    meter = _own_meter(device) if device.type == "cuda" else None
    return meter if all(gather_json(meter is not None)) else None


def _own_meter(device: torch.device) -> EnergyMeter | None:
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By identity: NVML numbers all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves, in any order.
        meter = EnergyMeter(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError:  # no driver, or a slice of a GPU, which has no counter of its own
        return None
    return meter if meter._last is not None else None


@dataclass
class Ledger:
    """Cumulative cost of the updates behind the weights, over all ranks: without those that a kill undid.

    `views` counts those of unlabeled and of labeled images. `seconds` is wall-clock time of training, without
    evaluations. `joules` is the energy of all ranks' GPUs in that time: None unless the run had a `meter` since its
    first step.
    """

    views: int = 0
    updates: int = 0  # optimizer steps
    macs: int = 0  # multiply-adds of all forward passes; an integer, so that no restart rounds it
    seconds: float = 0.0
    meter: EnergyMeter | None = None  # None on all ranks or on none: with a meter, `tick` is a collective
    joules: float | None = None
    _last_tick: float = field(default_factory=time.perf_counter, repr=False)

    def __post_init__(self) -> None:
        self.joules = 0.0 if self.meter else None

    @property
    def petaflops(self) -> float:
        """Compute spent so far, in 1e15 floating-point operations."""
        return petaflops(self.macs)

    def add(self, views: int, macs: int) -> None:
        """Count one update on `views` with `macs` multiply-adds in all, over all ranks."""
        self.views += views
        self.macs += macs
        self.updates += 1

    def start_clock(self) -> None:
        """Start to count time and energy: imports, scans of the data and evaluations are not training."""
        self._last_tick = time.perf_counter()
        if self.meter:
            self.meter.start()

    def tick(self) -> None:
        """Add the time, and the energy if it is metered, since the last tick. With a meter, a collective."""
        now = time.perf_counter()
        self.seconds, self._last_tick = self.seconds + now - self._last_tick, now
        if self.meter is not None and self.joules is not None:
            spent = self.meter.spent()
            self.joules = None if spent is None else self.joules + spent  # a sum with a gap would be wrong

    def record(self) -> dict[str, int | float]:
        """Return the columns of a metrics line."""
        columns = {"views": self.views, "updates": self.updates, "petaflops": self.petaflops}
        columns["seconds"] = round(self.seconds, 3)
        return columns if self.joules is None else {**columns, "joules": round(self.joules, 3)}

    def state(self) -> dict[str, int | float]:
        """Return what a checkpoint's meta.json holds: the columns and `macs`."""
        return {**self.record(), "macs": self.macs}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's `state`."""
        self.views, self.updates, self.seconds = state["views"], state["updates"], state["seconds"]
        self.macs = state["macs"]
        self.joules = state.get("joules") if self.meter else None
