"""The energy that the ranks' GPUs take, from the counter that NVIDIA's driver keeps of each: board and memory, not the
host, the network or the cooling.

The counter is read on the host (NVML, package nvidia-ml-py); nothing is asked of the device's stream. A run without
it, on a CPU, an older or partitioned GPU, or without that package, has no joules at all rather than some of them.
"""

import importlib
from typing import Any

import torch

from fastsuncet.distributed.collectives import gather_json


class EnergyMeter:
    """`spent()` is the energy since it was last asked, over all ranks; `open_energy_meter` makes one where all have a counter.

    The counter belongs to the GPU, so what else runs on it is counted as well, and ranks that share one GPU count it
    once.
    """

    def __init__(self, nvml: Any, uuid: str):
        self._nvml, self._uuid = nvml, uuid
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._last = self._read()

    def start(self) -> None:
        """Counts from now on: what was spent before the run's first step is not the run's."""
        self._last = self._read()

    def spent(self) -> float | None:
        """Joules of all ranks' GPUs since the last call; None where any of them could not be read. A collective."""
        before, self._last = self._last, self._read()
        mine = None
        if before is not None and self._last is not None:
            # A driver that was reloaded counts from 0 again: the little that it lost is less than a wrong minus.
            mine = max(0, self._last - before) / 1000
        every = gather_json([self._uuid, mine])
        return None if any(joules is None for _, joules in every) else sum(dict(every).values())

    def readable(self) -> bool:
        """Whether this GPU has given a value."""
        return self._last is not None

    def _read(self) -> int | None:
        """Millijoules since the driver was loaded, None where this GPU does not say."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None


def open_energy_meter(device: torch.device, nvml: Any = None) -> EnergyMeter | None:
    """A meter for the GPUs of all ranks, or None on every rank if one of them has no counter. A collective.

    `nvml` is the module pynvml, by default the one that is installed.
    """
    meter = _of_gpu(device, nvml) if device.type == "cuda" else None
    return meter if all(gather_json(meter is not None)) else None


def _of_gpu(device: torch.device, nvml: Any) -> EnergyMeter | None:
    if nvml is None:
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
    return meter if meter.readable() else None
