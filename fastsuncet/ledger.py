"""The ledger: what a run has cost so far. Every checkpoint and every metrics line carries it.

A FLOP here is the paper's: 6 x MAC for a training sample (2 forward, 4 backward) of the encoder and the head. What
that leaves out (losses, BatchNorm, optimizer, pixels) is under 2 % for a ResNet-50 at 224.
"""

import time
from dataclasses import dataclass, field

from fastsuncet.compute import petaflops


@dataclass
class Ledger:
    """Cumulative cost over all ranks and all restarts.

    `images` counts samples through the network (both views of an unlabeled image, and labeled images), `updates`
    optimizer steps, `petaflops` 6 x MAC x images / 1e15, `seconds` wall-clock time while a process was training.
    """

    macs: int  # multiply-adds of one sample's forward pass
    images: int = 0
    updates: int = 0
    seconds: float = 0.0
    _ticked: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def petaflops(self) -> float:
        """Compute spent so far, in 1e15 floating-point operations."""
        return petaflops(self.macs, self.images)

    def add(self, samples: int) -> None:
        """Books one update on `samples` images, over all ranks."""
        self.images += samples
        self.updates += 1

    def start_clock(self) -> None:
        """Begins to count: what a process does before its first step (imports, a scan of the data) is no training."""
        self._ticked = time.perf_counter()

    def tick(self) -> None:
        """Books the time since the last tick."""
        now = time.perf_counter()
        self.seconds, self._ticked = self.seconds + now - self._ticked, now

    def record(self) -> dict[str, int | float]:
        """The columns of a metrics line and of a checkpoint's meta.json."""
        return {
            "images": self.images,
            "updates": self.updates,
            "petaflops": self.petaflops,
            "seconds": round(self.seconds, 3),
        }

    def restore(self, record: dict) -> None:
        """Continues from a checkpoint's record; petaFLOPs follow from the images."""
        self.images, self.updates, self.seconds = record["images"], record["updates"], record["seconds"]
