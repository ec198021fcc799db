"""Waiting for pixels is measured on the device's own time line, and measuring it does not wait."""

import time

import pytest
import torch

from fastsuncet.metrics import interval
from fastsuncet.metrics.interval import DataTimer

CPU = torch.device("cpu")


class Event:
    """An event of a GPU at work since 0 s; the host sees its time line up to the last event that it waited for."""

    now, seen, waits = 0.0, -1.0, 0

    def record(self):
        self.at = Event.now

    def synchronize(self):
        Event.seen, Event.waits = self.at, Event.waits + 1

    def elapsed_time(self, end):
        assert self.at <= end.at <= Event.seen, "read before the device reached it"
        return 1e3 * (end.at - self.at)


def test_data_timer_counts_the_gap_on_the_device_until_a_restart(monkeypatch):
    monkeypatch.setattr(interval, "HostEvent", Event)
    timer = DataTimer(CPU)
    for waits in ((0.25, 0.0, 0.5), (5.0,), (0.125, 0.125)):
        timer.restart()
        assert timer.seconds() == 0
        waited = Event.waits
        for pixels in waits:
            timer.begin()
            Event.now += pixels  # the stream waits for the loader's
            timer.end()
            Event.now += 2.0  # the step
        assert Event.waits == waited, "the host has waited for nothing"
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


@pytest.mark.gpu
def test_data_timer_on_a_gpu_sees_a_slow_loader_and_no_fast_one():
    device = torch.device("cuda")
    timer, loader = DataTimer(device), torch.cuda.Stream()
    x = torch.ones(4096, 4096, device=device)

    def waited(cycles):
        timer.restart()
        for _ in range(3):
            with torch.cuda.stream(loader):
                torch.cuda._sleep(cycles)  # a slow decoder on a stream of its own
            timer.begin()
            torch.cuda.current_stream().wait_stream(loader)
            timer.end()
            x @ x
        return timer.seconds()

    waited(0)
    assert waited(200_000_000) > 10 * waited(0) and waited(0) < 0.05
