"""How a config's pixels are made fastest on this machine: measures its settings, prints the lines to write.

    python tools/tune_loader.py CONFIG [section.key=value ...] [--minutes M] [--processes N] [--device cpu|cuda]
        [--steps K] [--rounds R] [--json FILE]

One setting after the other is tried at several values while the others stay (coordinate descent), pass after pass until
nothing changes or the time is up: `data.decode_threads`, `data.prefetch` and, on a GPU, `data.hw_decoder_share` and
`data.decoder_buffers`. Values take turns of K steps over the same images; the cheapest one within 3 % of the fastest is
kept, so that noise buys nothing. A step is one process's batch of the N that the run will have, both streams. No
network learns beside it: this tells how fast the pixels can be made, not how fast a run is.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, `tools` is not importable yet

from fastsuncet.config import Config, load_config
from fastsuncet.data.cpu_count import cores, decode_threads
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.launch import join
from tools.bench.common import end, environment, print_table, spread, told, write_json
from tools.bench.device_clock import settled

CLOSE = 1.03  # times the fastest: as good
PASSES = 3
Values = dict[str, Any]  # key -> value
Measure = Callable[[Values], float]  # seconds a step


@dataclass(frozen=True)
class Knob:
    """A setting and what to try, the cheapest first: in threads, in memory, in pixels that stay the same."""

    key: str
    values: tuple


def knobs(config: Config, device: str, available: int) -> list[Knob]:
    """What there is to turn for these images on this device."""
    threads = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    found = [
        Knob("data.decode_threads", tuple(n for n in threads if n <= available + 1)),
        Knob("data.prefetch", (1, 2, 3, 5) if device == "cuda" else (1, 2, 3)),
    ]
    if (
        device == "cuda"
        and config.data.kind in ("image_folder", "csv")
        and config.data.backend != "torchvision"
    ):
        found.insert(1, Knob("data.hw_decoder_share", (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 1.0)))
        found.append(Knob("data.decoder_buffers", ("grown", "largest")))
    return found


def descend(
    todo: Sequence[Knob], start: Values, measure: Measure, rounds: int, in_time: Callable[[], bool]
) -> tuple[Values, list[dict[str, Any]]]:
    """The values to write, and what was found on the way: a row for each value of each setting that was measured.

    A setting that there was no time to try at all of its values keeps the value it had.
    """
    best, rows = dict(start), []
    for number in range(1, PASSES + 1):
        before = dict(best)
        for knob in todo:
            seconds = turns(knob, best, measure, rounds, in_time)
            if not seconds:
                return best, rows
            medians = {value: median(each) for value, each in seconds.items()}
            limit = CLOSE * min(medians.values())
            best = {**best, knob.key: next(value for value in seconds if medians[value] <= limit)}
            rows += [
                {
                    "pass": number,
                    "key": knob.key,
                    "value": value,
                    "seconds_a_step": each,
                    "kept": value == best[knob.key],
                }
                for value, each in seconds.items()
            ]
        if best == before:
            break
    return best, rows


def turns(
    knob: Knob, others: Values, measure: Measure, rounds: int, in_time: Callable[[], bool]
) -> dict[Any, list[float]]:
    """Seconds a step of each value by turn; nothing where the time ended before each had its first turn.

    A value that fails, for want of memory or because a decoder refuses it, is said and left out: what was measured so
    far was paid for.
    """
    values = list(dict.fromkeys([*knob.values, others[knob.key]]))
    seconds: dict[Any, list[float]] = {value: [] for value in values}
    for turn in range(rounds):
        start = turn % max(1, len(values))
        found = {}
        for value in values[start:] + values[:start]:
            if not in_time():
                return seconds if turn else {}
            try:
                found[value] = measure({**others, knob.key: value})
            except (RuntimeError, MemoryError) as error:
                print(f"{knob.key}: {value} fails and is left out: {error}", flush=True)
                values.remove(value)
                del seconds[value]
        for value in values:  # whole rounds only: all values met the same neighbours
            seconds[value].append(found[value])
    return seconds


@contextlib.contextmanager
def measuring(
    path: str, overrides: list[str], processes: int, device: str | None, steps: int
) -> Iterator[tuple[Config, str, Measure]]:
    """(the config, its device, a Measure over its images); the images are opened once."""
    config = load_config(path, [*overrides, f"meta.device={device}"] if device else overrides)
    with join(config.meta.device) as place:
        images = open_images(config, place, validation=False)
        share = replace(place, world_size=processes)  # the first of so many; nothing is said between them
        arithmetic = config.resolve(processes, *images.counts())

        def measure(values: Values) -> float:
            written = [f"{key}={json.dumps(value)}" for key, value in values.items()]
            tried = load_config(path, [*overrides, f"meta.device={config.meta.device}", *written])
            stream = PairedStream(tried, images.train, images.split.indices, arithmetic, share)
            try:
                first = (
                    tried.data.prefetch + 2
                )  # the first ones hold the building, and what it had read ahead
                for step in range(first):
                    stream(step)
                began = settled(place.device.type)
                for step in range(first, first + steps):
                    stream(step)
                return (settled(place.device.type) - began) / steps
            finally:
                stream.close()

        yield config, place.device.type, measure


def recommendation(values: Values) -> str:
    """The lines for the config."""
    lines = [f"  {key.removeprefix('data.')}: {value}" for key, value in values.items()]
    if values.get("data.hw_decoder_share"):
        lines[list(values).index("data.hw_decoder_share")] += (
            "  # above 0: another run, in its bits, on another number of GPUs"
        )
    return "\n".join(["data:", *lines])


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and the lines, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--minutes", type=float, default=10.0, help="to begin no other turn after")
    parser.add_argument("--processes", type=int, help="the run's (default: one a GPU, or 1)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: the config's")
    parser.add_argument("--steps", type=int, default=8, help="in a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each value")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    options = parser.parse_intermixed_args(arguments)
    where, end = environment(), time.monotonic() + 60 * options.minutes
    torch.set_num_threads(1)
    here = max(1, torch.cuda.device_count())  # processes that share this machine's cores
    processes = options.processes or here
    asked = (options.config, options.overrides, processes, options.device, options.steps)
    with measuring(*asked) as (config, device, measure):
        todo = knobs(config, device, max(1, cores() // here))
        data = {**dict(config.data), "decode_threads": decode_threads(config.data.decode_threads, here)}
        start = {knob.key: data[knob.key.removeprefix("data.")] for knob in todo}
        values, rows = descend(todo, start, measure, options.rounds, lambda: time.monotonic() < end)
    print_table(
        ["", "pass", "ms a step", ""],
        [
            [
                f"{row['key']}: {row['value']}",
                str(row["pass"]),
                told(spread([1e3 * each for each in row["seconds_a_step"]])),
                "kept" if row["kept"] else "",
            ]
            for row in rows
        ],
    )
    tried = {row["key"] for row in rows}
    if left := [knob.key for knob in todo if knob.key not in tried]:
        print(f"not measured, for want of time: {', '.join(left)}; as in the config. --minutes gives more\n")
    print(recommendation(values))
    report = {"tool": "tune_loader", "environment": where, "device": device, "processes": processes}
    write_json(options.json, {**report, "points": rows, "not_tried": left, "recommended": values})
    return 0


if __name__ == "__main__":
    end(main)
