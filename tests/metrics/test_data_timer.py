"""Waiting for pixels is measured on the device's own time line, and measuring it holds nothing up."""

import pytest
import torch

from fastsuncet.metrics.data_timer import DataTimer

CPU = torch.device("cpu")


class Gpu:
    """A device with one stream: work and events in order, done when it gets to them; it counts who waited for it."""

    def __init__(self):
        self.queue, self.now, self.waits = [], 0.0, 0

    def work(self, seconds):
        self.queue.append(seconds)

    def event(self):
        return Event(self)

    def advance(self, until=None):
        """Does what is queued, up to and with one event."""
        while self.queue:
            item = self.queue.pop(0)
            if not isinstance(item, Event):
                self.now += item
                continue
            item.passed = self.now
            if item is until:
                break


class Event:
    def __init__(self, gpu):
        self.gpu, self.passed = gpu, None

    def record(self):
        self.passed = None
        self.gpu.queue = [
            item for item in self.gpu.queue if item is not self
        ]  # as CUDA's: the last one counts
        self.gpu.queue.append(self)

    def query(self):
        return self.passed is not None

    def synchronize(self):
        self.gpu.waits += 1
        if self.passed is None:
            self.gpu.advance(self)

    def elapsed_time(self, end):
        assert self.passed is not None and end.passed is not None, "asked before the device came to it"
        return 1e3 * (end.passed - self.passed)


def step(gpu, wait, pixels, compute):
    wait.begin()
    gpu.work(pixels)  # the stream waits for the loader's
    wait.end()
    gpu.work(compute)


def test_the_gap_on_the_device_is_what_counts():
    gpu = Gpu()
    wait = DataTimer(CPU, new_event=gpu.event)
    for pixels in (0.25, 0.0, 0.5):
        step(gpu, wait, pixels, compute=2.0)
    assert gpu.waits == 0 and gpu.now == 0  # a host ahead of the device has waited for nothing
    assert wait.seconds() == pytest.approx(0.75)
    assert wait.seconds() == pytest.approx(0.75)  # reading changes nothing


def test_steps_before_a_restart_do_not_count():
    gpu = Gpu()
    wait = DataTimer(CPU, new_event=gpu.event)
    step(gpu, wait, 5.0, 1.0)
    wait.restart()
    assert wait.seconds() == 0
    step(gpu, wait, 0.125, 1.0)
    assert wait.seconds() == pytest.approx(0.125)


def test_an_interval_longer_than_the_ring_is_read_as_it_comes_round():
    gpu = Gpu()
    wait = DataTimer(CPU, capacity=4, new_event=gpu.event)
    for i in range(20):
        step(gpu, wait, 0.01 * i, 1.0)
        gpu.advance()
    assert gpu.waits == 0
    assert wait.seconds() == pytest.approx(0.01 * sum(range(20)))
    assert gpu.waits <= 4


def test_a_host_further_ahead_than_the_ring_loses_steps_and_does_not_wait():
    gpu = Gpu()
    wait = DataTimer(CPU, capacity=4, new_event=gpu.event)
    for _ in range(10):
        step(gpu, wait, 0.5, 1.0)
    assert gpu.waits == 0
    assert wait.seconds() == pytest.approx(5.0)  # six steps taken for average ones


def test_on_a_cpu_it_is_the_hosts_own_time():
    times = iter([10.0, 10.5, 20.0, 20.25])
    wait = DataTimer(CPU, clock=lambda: next(times))
    for _ in range(2):
        wait.begin()
        wait.end()
    assert wait.seconds() == pytest.approx(0.75)
    wait.restart()
    assert wait.seconds() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
def test_a_stream_that_is_held_up_for_pixels_says_so_and_one_that_is_not_does_not():
    device = torch.device("cuda")
    wait, loader = DataTimer(device), torch.cuda.Stream()
    x = torch.ones(4096, 4096, device=device)

    def interval(cycles):
        wait.restart()
        for _ in range(3):
            with torch.cuda.stream(loader):
                torch.cuda._sleep(cycles)  # a slow decoder on a stream of its own
            wait.begin()
            torch.cuda.current_stream().wait_stream(loader)
            wait.end()
            x @ x
        return wait.seconds()

    interval(0)
    assert interval(200_000_000) > 10 * interval(0) and interval(0) < 0.05
