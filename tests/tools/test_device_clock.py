"""The clock of the bench tools on a GPU, as far as it can be shown without one."""

import pytest
import torch

from tools.bench import device_clock
from tools.bench.common import Counter
from tools.bench.device_clock import captured, copying, seconds_of, turns


@pytest.fixture
def events(monkeypatch):
    """CUDA events on a clock that only work moves forward, by milliseconds."""
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at, self.waited = clock[0], False

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited, "asked before the device came to the second event"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return clock


def test_a_time_on_a_gpu_is_that_between_two_events_shared_by_the_calls_between_them(events):
    def work():
        events[0] += 3.0

    assert seconds_of(work, "cuda", 20) == pytest.approx(3e-3)


def test_turns_are_taken_by_all_and_the_first_two_calls_are_not_counted(events):
    calls = []

    def work(name):
        calls.append(name)
        events[0] += 100.0 if calls.count(name) <= 2 else 1.0

    found = turns({name: lambda name=name: work(name) for name in "abc"}, "cuda", rounds=3, repeats=1)
    assert "".join(calls) == "aabbcc" + "abc" + "bca" + "cab"
    assert found == {name: pytest.approx([1e-3] * 3) for name in "abc"}


def test_the_copy_reads_half_of_the_bytes_and_writes_the_other_half():
    copy = copying(1_000_000, "cpu")
    with Counter() as counter:
        copy()
    assert counter.moved == 1_000_000 and counter.peak == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there a graph can be had")
def test_what_cannot_be_a_graph_runs_as_it_is_and_says_why():
    call, why = captured(device_clock.captured)
    assert call is device_clock.captured and why
