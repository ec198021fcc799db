"""The ledger: what a run has cost so far. Every checkpoint and every metrics line carries it.

A FLOP here is the paper's: 6 x MAC for a training sample (2 forward, 4 backward) of the encoder and the head. What
that leaves out (losses with their classifier or prototypes, BatchNorm, optimizer, pixels) is under 2 % for a ResNet-50
at 224.
"""

import time
from dataclasses import dataclass, field

from fastsuncet.metrics.energy import EnergyMeter
from fastsuncet.models.flops import FLOP_PER_MAC


@dataclass
class RunCost:
    """Cumulative cost over all ranks and all restarts.

    `images` counts samples through the network (both views of an unlabeled image, and labeled images), `updates`
    optimizer steps, `petaflops` 6 x MAC / 1e15 over all samples, `seconds` wall-clock time while a process trained
    (an evaluation is none of it), `joules` the energy of all ranks' GPUs meanwhile: None unless every life of the run
    had a `meter`.
    """

    images: int = 0
    updates: int = 0
    # Multiply-adds of all forward passes: a whole number, so that no restart rounds it.
    macs: int = 0
    seconds: float = 0.0
    meter: EnergyMeter | None = (
        None  # the same answer on every rank, None or not: with one, a tick is a collective
    )
    joules: float | None = None
    _ticked: float = field(default_factory=time.perf_counter, repr=False)

    def __post_init__(self) -> None:
        self.joules = 0.0 if self.meter else None

    @property
    def petaflops(self) -> float:
        """Compute spent so far, in 1e15 floating-point operations."""
        return FLOP_PER_MAC * self.macs / 1e15

    def add(self, samples: int, macs: int) -> None:
        """Books one update on `samples` images of `macs` multiply-adds in all, over all ranks."""
        self.images += samples
        self.macs += macs
        self.updates += 1

    def start_clock(self) -> None:
        """Begins to count: what a process does before its first step (imports, a scan of the data) is no training."""
        self._ticked = time.perf_counter()
        if self.meter:
            self.meter.start()

    def tick(self) -> None:
        """Books the time, and the energy where it is metered, since the last tick. All ranks together."""
        now = time.perf_counter()
        self.seconds, self._ticked = self.seconds + now - self._ticked, now
        if self.joules is not None:
            spent = self.meter.spent()
            self.joules = None if spent is None else self.joules + spent  # a sum with a gap would be no sum

    def record(self) -> dict[str, int | float]:
        """The columns of a metrics line."""
        columns = {
            "images": self.images,
            "updates": self.updates,
            "petaflops": self.petaflops,
            "seconds": round(self.seconds, 3),
        }
        return columns if self.joules is None else {**columns, "joules": round(self.joules, 3)}

    def state(self) -> dict[str, int | float]:
        """What a checkpoint's meta.json holds: the columns, and what petaFLOPs are counted from."""
        return {**self.record(), "macs": self.macs}

    def restore(self, state: dict) -> None:
        """Continues from a checkpoint's `state`."""
        self.images, self.updates, self.seconds = state["images"], state["updates"], state["seconds"]
        # The first checkpoints kept the petaFLOPs alone.
        self.macs = state.get("macs", round(state["petaflops"] * 1e15 / FLOP_PER_MAC))
        self.joules = state.get("joules") if self.meter else None
