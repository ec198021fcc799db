"""Times on the clock that fits a device, contenders in turns; a copy as the limit of what must move as many bytes.

On a GPU a time is that between two events with many calls between them, so the host's own time shows only where it is
the longer one; `captured` leaves it out. Elsewhere it is this process's CPU time, because such machines are shared.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

CLOCK = {"cpu": "CPU time of this process", "cuda": "CUDA events"}


def settled(device: str) -> float:
    """The wall's clock in seconds, once a GPU has done what it was asked."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Seconds a call takes on the device's own clock ("cpu" or "cuda"), over `repeats` of them."""
    if device == "cpu":
        start = time.process_time()
        for _ in range(repeats):
            call()
        return (time.process_time() - start) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def turns(
    calls: Mapping[str, Callable[[], Any]], device: str, rounds: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds of each call, once a round, the order turned by one each time, so that nobody always follows the same.

    Two calls beforehand, which choose kernels and make state, are not counted.
    """
    names = list(calls)
    for call in calls.values():
        call()
        call()
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(seconds_of(calls[name], device, repeats))
    return found


def copying(moved: int, device: str) -> Callable[[], Any]:
    """A plain copy that reads half of `moved` bytes and writes the other half: what such traffic takes at best."""
    source = torch.ones(
        moved // 2, dtype=torch.uint8, device=device
    )  # ones: unwritten memory is one page read often
    target = torch.ones_like(source)
    return lambda: target.copy_(source)


def launches(call: Callable[[], Any]) -> int | None:
    """How many kernels, copies and fills a call starts on the GPU, by CUDA's own trace; None where it has none."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return sum(event.count for event in seen.key_averages() if event.device_type == on_device) or None


def captured(call: Callable[[], Any]) -> tuple[Callable[[], Any], str]:
    """`call` as a CUDA graph, which the host starts by one launch, and ""; itself, and why, where none can be had."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # libraries choose their kernels and take their memory outside of a capture
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # torch raises nothing narrower for what a graph cannot hold
        return call, str(error).splitlines()[0]
    return graph.replay, ""
