"""Waiting for pixels is measured on the device's own time line, and measuring it does not wait."""

import time

import pytest
import torch

from fastsuncet.metrics.interval import DataTimer

CPU = torch.device("cpu")


class Gpu:
    """A device with one stream that does work and events in order; it counts how often the host waited for it."""

    def __init__(self):
        self.queue, self.now, self.waits = [], 0.0, 0

    def event(self):
        return Event(self)

    def advance(self, until):
        """Do what is queued, up to and including one event."""
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
        self.gpu.queue.append(self)

    def synchronize(self):
        self.gpu.waits += 1
        self.gpu.advance(self)

    def elapsed_time(self, end):
        assert self.passed is not None and end.passed is not None, "read before the device reached it"
        return 1e3 * (end.passed - self.passed)


def test_data_timer_counts_the_gap_on_the_device_until_a_restart():
    gpu = Gpu()
    timer = DataTimer(CPU, new_event=gpu.event)
    for waits in ((0.25, 0.0, 0.5), (5.0,), (0.125, 0.125)):
        timer.restart()
        assert timer.seconds() == 0
        seen = gpu.waits, gpu.now
        for pixels in waits:
            timer.begin()
            gpu.queue.append(pixels)  # the stream waits for the loader's
            timer.end()
            gpu.queue.append(2.0)  # the step
        assert (gpu.waits, gpu.now) == seen, "the host has waited for nothing"
        for _ in range(2):  # reading changes nothing
            assert timer.seconds() == pytest.approx(sum(waits))


def test_data_timer_on_a_cpu_is_the_hosts_clock(monkeypatch):
    times = iter([10.0, 10.5, 20.0, 20.25])
    timer = DataTimer(CPU)
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    for _ in range(2):
        timer.begin()
        timer.end()
    assert timer.seconds() == pytest.approx(0.75)
    timer.restart()
    assert timer.seconds() == 0


@pytest.mark.gpu
def test_data_timer_on_a_gpu_sees_a_slow_loader_and_no_fast_one():
    device = torch.device("cuda")
    timer, loader = DataTimer(device), torch.cuda.Stream()
    x = torch.ones(4096, 4096, device=device)

    def interval(cycles):
        timer.restart()
        for _ in range(3):
            with torch.cuda.stream(loader):
                torch.cuda._sleep(cycles)  # a slow decoder on a stream of its own
            timer.begin()
            torch.cuda.current_stream().wait_stream(loader)
            timer.end()
            x @ x
        return timer.seconds()

    interval(0)
    assert interval(200_000_000) > 10 * interval(0) and interval(0) < 0.05
