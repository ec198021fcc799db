"""Measure how long training waits for pixels, without making it wait.

On a GPU the host runs ahead, so the time it spends in the loader says nothing: it can wait for pixels while the GPU is
busy with earlier steps, which costs nothing. So two events on the training stream enclose the hand-over of a batch. The
GPU reaches the first one when all earlier work is done, and the second one when the pixels are there (DALI and copies
order themselves on this stream). In the time between it does nothing but wait, for a slow loader or a slow host.

Events are read when a metrics line is written, which waits for the device anyway. On a CPU the host's clock is enough.
"""

import time
from collections.abc import Callable
from functools import partial

import torch


class DataTimer:
    """Call `begin()` before a batch is requested and `end()` when it is there; `seconds()` sums the waits.

    Call begin and end on the training stream, outside of a CUDA graph's capture. Neither waits.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        new_event: Callable[[], torch.cuda.Event] | None = None,  # a fake one, for tests
        clock: Callable[[], float] = time.perf_counter,
    ):
        if new_event is None and device.type == "cuda":
            new_event = partial(torch.cuda.Event, enable_timing=True)
        self._new_event, self._clock = new_event, clock
        self._events: list[
            tuple[torch.cuda.Event, torch.cuda.Event]
        ] = []  # two a step, used again after a restart
        self.restart()

    def restart(self) -> None:
        """Begin a new sum: after a metrics line, or after anything that is not training."""
        self._steps, self._began, self._waited = 0, 0.0, 0.0

    def begin(self) -> None:
        """Mark where the work of earlier steps ends."""
        if self._new_event is None:
            self._began = self._clock()
            return
        if self._steps == len(self._events):
            self._events.append((self._new_event(), self._new_event()))
        self._events[self._steps][0].record()

    def end(self) -> None:
        """Mark that the pixels are there."""
        if self._new_event is None:
            self._waited += self._clock() - self._began
        else:
            self._events[self._steps][1].record()
        self._steps += 1

    def seconds(self) -> float:
        """Return the wait since `restart()` in seconds. On a GPU this waits until the last batch's pixels are there."""
        if self._new_event is None or self._steps == 0:
            return self._waited
        used = self._events[: self._steps]
        used[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in used) / 1e3
