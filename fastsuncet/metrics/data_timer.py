"""How long training waits for pixels, told without making it wait.

On a GPU the host runs ahead, so the time it spends in the loader says nothing: it may wait for pixels while the GPU is
busy with earlier steps, which costs nothing, or hurry on while the GPU idles until a decoder is through. So two events
stand around the hand-over on the training stream. The first one is passed when the GPU has done all earlier work, the
second when the pixels are there (DALI and copies order themselves on this stream) and the host has come to say so: the
time between is what the GPU did nothing but wait, for a slow loader or for a slow host in it.

Events are read at log time, when everybody waits for the device anyway. On a CPU all work is the host's: its clock.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

CAPACITY = 256  # steps whose events are kept: more than a host is ever ahead


class DataTimer:
    """`begin()` before a batch is asked for, `end()` once it is handed over; `seconds()` since the last `restart()`.

    begin and end must be called on the stream that trains, outside of a CUDA graph's capture. Neither waits.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        capacity: int = CAPACITY,
        new_event: Callable[[], Any] | None = None,  # a fake one, for tests
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._clock, self._began = clock, 0.0
        self._pairs: list[tuple[Any, Any]] = []  # a ring: step k's pair is number k % capacity
        if device.type == "cuda" or new_event is not None:
            new_event = new_event or (lambda: torch.cuda.Event(enable_timing=True))
            self._pairs = [(new_event(), new_event()) for _ in range(capacity)]
        self.restart()

    def restart(self) -> None:
        """Forgets what was waited: after a metrics line, or whatever else is no training."""
        self._seconds = 0.0  # of the steps that were read
        self._steps = self._read = self._lost = 0

    def begin(self) -> None:
        """Marks where the work of earlier steps ends."""
        if not self._pairs:
            self._began = self._clock()
            return
        if self._steps - self._read == len(self._pairs):
            self._take(self._pairs[self._read % len(self._pairs)], wait=False)
        self._pairs[self._steps % len(self._pairs)][0].record()

    def end(self) -> None:
        """Marks that the pixels are there."""
        if not self._pairs:
            self._seconds += self._clock() - self._began
        else:
            self._pairs[self._steps % len(self._pairs)][1].record()
        self._steps += 1

    def seconds(self) -> float:
        """What was waited since `restart()`, in seconds. On a GPU this waits until it has the last batch's pixels."""
        if not self._pairs:
            return self._seconds
        while self._read < self._steps:
            self._take(self._pairs[self._read % len(self._pairs)], wait=True)
        counted = self._steps - self._lost
        # A step whose events had to be given to another before the GPU came to them is taken for an average one.
        return self._seconds * (self._steps / counted) if counted else 0.0

    def _take(self, pair: tuple[Any, Any], *, wait: bool) -> None:
        begin, end = pair
        if wait:
            end.synchronize()
        if wait or end.query():
            self._seconds += begin.elapsed_time(end) / 1e3
        else:
            self._lost += 1
        self._read += 1
