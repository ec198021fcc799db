"""The energy of the ranks' GPUs, from the counter that NVIDIA's driver keeps for each: board and memory, not the host.

The host reads the counter through NVML (package nvidia-ml-py), without the device's stream. If one rank has no counter
(a CPU, an older or partitioned GPU, no package), the run reports no joules at all instead of a part of them.
"""

import importlib
from typing import Any

import torch

from fastsuncet.distributed.collectives import gather_json


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

    def readable(self) -> bool:
        """Return whether the GPU has given a value."""
        return self._last is not None

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


def open_energy_meter(device: torch.device, nvml: Any = None) -> EnergyMeter | None:
    """Return a meter for the GPUs of all ranks, None on every rank if one of them has no counter. A collective.

    `nvml` is the module pynvml, by default the installed one.
    """
    meter = _own_meter(device, nvml) if device.type == "cuda" else None
    return meter if all(gather_json(meter is not None)) else None


def _own_meter(device: torch.device, nvml: Any) -> EnergyMeter | None:
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By identity: NVML numbers all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves, in any order.
        meter = EnergyMeter(nvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except nvml.NVMLError:  # no driver, or a slice of a GPU, which has no counter of its own
        return None
    return meter if meter.readable() else None
