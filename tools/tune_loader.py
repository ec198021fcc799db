"""Find the fastest loader settings for a config on this machine, and print the lines to write.

    python tools/tune_loader.py CONFIG [section.key=value ...] [--minutes M] [--processes N] [--device cpu|cuda]
        [--steps K] [--rounds R] [--json FILE]

One setting after the other is tried at several values while the others stay (coordinate descent), in passes until
nothing changes or the time is up: `data.decode_threads`, `data.prefetch` and, on a GPU, `data.hw_decoder_share` and
`data.decoder_buffers`. Values take turns of K steps over the same images; the cheapest one within 3 % of the fastest is
kept, so that noise changes nothing. A step is the batch of one of the run's N processes, both streams. No network
trains at the same time: this measures how fast the pixels can be made, not how fast a run is.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tools` can be imported

from fastsuncet.config import Config, load_config
from fastsuncet.config.rules import FILES
from fastsuncet.data.cpu_count import cores, decode_threads
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.launch import join
from tools.bench import harness

CLOSE = 1.03  # times the fastest: as good
PASSES = 3
Values = dict[str, Any]  # key -> value
Measure = Callable[[Values], float]  # values -> seconds per step


def candidates(config: Config, device: str, available: int) -> dict[str, tuple]:
    """Return the values to try for each key, the cheapest first: in threads, in memory, in pixels that stay equal."""
    threads = tuple(n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if n <= available + 1)
    found: dict[str, tuple] = {"data.decode_threads": threads}
    decodes_files = config.data.kind in FILES and config.data.backend != "torchvision"
    if device == "cuda" and decodes_files:
        found["data.hw_decoder_share"] = (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 1.0)
    found["data.prefetch"] = (1, 2, 3, 5) if device == "cuda" else (1, 2, 3)
    if device == "cuda" and decodes_files:
        found["data.decoder_buffers"] = ("grown", "largest")
    return found


def descend(
    tried: Mapping[str, Sequence], start: Values, measure: Measure, rounds: int, in_time: Callable[[], bool]
) -> tuple[Values, list[dict[str, Any]]]:
    """Return the values to write, and one point for each value of each setting that was measured.

    A setting keeps its value if there was not enough time to try all of its values.
    """
    best, points = dict(start), []
    for number in range(1, PASSES + 1):
        before = dict(best)
        for key, values in tried.items():
            seconds = measure_values(key, values, best, measure, rounds, in_time)
            if not seconds:
                return best, points
            medians = {value: median(each) for value, each in seconds.items()}
            limit = CLOSE * min(medians.values())
            best[key] = next(value for value in seconds if medians[value] <= limit)
            for value, each in seconds.items():
                point = {"pass": number, "key": key, "value": value, "seconds": each}
                points.append(point | {"kept": value == best[key]})
        if best == before:
            break
    return best, points


def measure_values(
    key: str, tried: Sequence, best: Values, measure: Measure, rounds: int, in_time: Callable[[], bool]
) -> dict[Any, list[float]]:
    """Return the seconds per step of each value in each round; nothing if the time ends within the first round.

    A value that fails, because of memory or because a decoder refuses it, is reported and left out.
    """
    values = list(dict.fromkeys([*tried, best[key]]))
    seconds: dict[Any, list[float]] = {value: [] for value in values}
    for turn in range(rounds):
        found = {}
        for value in harness.rotated(values, turn):
            if not in_time():
                return seconds if turn else {}
            try:
                found[value] = measure({**best, key: value})
            except (RuntimeError, MemoryError) as error:
                print(f"left out: {key}={value} fails: {error}", flush=True)
                values.remove(value)
                del seconds[value]
        # Only whole rounds count, in which all values met the same load.
        for value in values:
            seconds[value].append(found[value])
    return seconds


@contextlib.contextmanager
def measuring(
    path: str, overrides: list[str], processes: int, device: str | None, steps: int
) -> Iterator[tuple[Config, str, Measure]]:
    """Yield (the config, its device, a Measure over its images); the images are opened once."""
    config = load_config(path, [*overrides, f"meta.device={device}"] if device else overrides)
    with join(config.meta.device) as place:
        images = open_images(config, place, validation=False)
        # The first of so many processes, which exchange nothing while they make pixels.
        first_of_many = replace(place, world_size=processes)
        arithmetic = config.resolve(processes, *images.counts())

        def measure(values: Values) -> float:
            written = [f"{key}={json.dumps(value)}" for key, value in values.items()]
            tried = load_config(path, [*overrides, f"meta.device={config.meta.device}", *written])
            stream = PairedStream(tried, images.train, images.split.indices, arithmetic, first_of_many)
            try:
                # The first steps contain the start-up and what was read ahead.
                first = tried.data.prefetch + 2
                for step in range(first):
                    stream(step)
                began = harness.wall_clock(place.device.type)
                for step in range(first, first + steps):
                    stream(step)
                return (harness.wall_clock(place.device.type) - began) / steps
            finally:
                stream.close()

        yield config, place.device.type, measure


def recommendation(values: Values) -> str:
    """Return the lines for the config."""
    lines = [f"  {key.removeprefix('data.')}: {value}" for key, value in values.items()]
    if values.get("data.hw_decoder_share"):
        note = "  # above 0: another number of GPUs gives other pixels, and so another run"
        lines[list(values).index("data.hw_decoder_share")] += note
    return "\n".join(["data:", *lines])


def main(arguments: list[str] | None = None) -> int:
    """Print the table and the lines, write the JSON."""
    parser = harness.parser(__doc__, rounds=3, devices=())
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="start no turn after this (default: %(default)s)"
    )
    parser.add_argument("--processes", type=int, help="of the run (default: one per GPU, or 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the config's")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    report, end = harness.Report("tune_loader", options.json), time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    # Processes that share this machine's cores.
    here = max(1, torch.cuda.device_count())
    processes = options.processes or here
    with measuring(options.config, options.overrides, processes, options.device, options.steps) as opened:
        config, device, measure = opened
        tried = candidates(config, device, max(1, cores() // here))
        threads = decode_threads(config.data.decode_threads, here, streams=2 if device == "cuda" else 1)
        data = {**dict(config.data), "decode_threads": threads}
        start = {key: data[key.removeprefix("data.")] for key in tried}
        values, points = descend(tried, start, measure, options.rounds, lambda: time.monotonic() < end)
    columns = [
        ("key", "key", str),
        ("value", "value", str),
        ("pass", "pass", str),
        ("ms a step", "seconds", harness.scaled(1e3)),
        ("", "kept", lambda kept: "kept" if kept else ""),
    ]
    notes = []
    if left := [key for key in tried if key not in {point["key"] for point in points}]:
        more = "; they keep the config's values. --minutes gives more time"
        notes.append(f"not measured, because the time was up: {', '.join(left)}{more}\n")
    title = f"pixels of one step of one of {processes} processes, {device}"
    found = {
        "device": device,
        "processes": processes,
        "points": points,
        "not_tried": left,
        "recommended": values,
    }
    report.finish([harness.table(title, points, columns)], notes=[*notes, recommendation(values)], **found)
    return 0


if __name__ == "__main__":
    harness.run(main)
