"""`fastsuncet tune`: time what could make a run faster on its own hardware, and write a config with what won."""

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fastsuncet.commands.embed import check_output
from fastsuncet.commands.ranks import as_stoppable_rank
from fastsuncet.commands.train import check_before_images
from fastsuncet.config import Config, flat
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.shipped import shipped
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.ddp import require_compiler
from fastsuncet.errors import ConfigError, Preempted
from fastsuncet.training.summary import device_name
from fastsuncet.tuning import fast_paths, processes
from fastsuncet.tuning.verdicts import Verdict
from pipelines.backend import MOST, cores_of_process, decode_threads
from pipelines.output import say_line

CHILD = 900.0  # seconds for one contender at most: torch.compile takes minutes

Rung = tuple[str, dict[str, Any]]  # a contender: its name, and config values by dotted key
Tried = tuple[Rung, Verdict]


def tune(config: Config, arguments: list[str], minutes: float, output: Path) -> None:
    """Tune the run of `config`; `arguments` start the same command on further ranks.

    Writes `output`, a config whose base is the file of `config`. Raises ConfigError for a file that exists, or that is
    no name of a config.
    """
    check_output(output, (".yaml", ".yml"), None)
    if not 0 < minutes < 100_000:
        raise ConfigError(f"--minutes must be a number above 0 and below 100,000, not {minutes:g}")
    check_before_images(config)
    status = output.with_name(f".preempted-{output.stem}.json")
    with as_stoppable_rank(config, arguments, status) as (plain, place, signals):

        def stopped() -> bool:
            return signals.requested is not None

        images = open_images(config, place, validation=False)
        arithmetic = config.resolve(place.world_size, *images.counts())
        per_class = images.split.per_class.tolist()
        ends = time.monotonic() + 60 * minutes
        chosen = fast_paths.choose(plain, arithmetic, place, per_class, {}, stopped)
        plain = fast_paths.resolved(plain, chosen)
        request = processes.request_of(plain, arithmetic, per_class, chosen)
        rungs = candidates(config, plain, place.device.type)
        place.say(f"speed    {fast_paths.describe(plain, chosen)}")
        names = ", ".join(name for name, _ in rungs)
        place.say(f"contenders: {len(rungs)}, at most {minutes:g} minutes: {names}")
        found: list[Tried] = []
        base: dict[str, Any] = {}
        for name, values in rungs:  # each on top of what won before it
            outcome, word, contender = Verdict("no time left", final=False), "not tried", {**base, **values}
            left = broadcast_json(ends - time.monotonic())
            if left > 0 and not any_rank(stopped()):
                seconds = min(CHILD, max(60.0, left))
                outcome = processes.compare(request, base, contender, seconds, stopped)
                word = "won" if outcome.won else "not usable" if outcome.problem else "no gain"
            base = contender if outcome.won else base
            place.say(f"{name:<24} {word:<11} {outcome.problem or _times(outcome)}")
            found.append(((name, values), outcome))
        if any_rank(stopped()):
            raise Preempted(f"{signals.requested or 'another rank'}: stopped; nothing was written")
        if place.first:
            many = f", {place.world_size} processes" if place.world_size > 1 else ""
            write(output, config.file, found, f"{device_name(config, place)}{many}")
            winners = sum(outcome.won for _, outcome in found)
            say_line(
                f"wrote {output}: {winners} of {len(found)} contenders won. Train it: fastsuncet train {output}"
            )


def _times(outcome: Verdict) -> str:
    """Return median and spread of both sides, and the gain."""
    sides = ([1e3 * f(side) for f in (median, min, max)] for side in (outcome.base, outcome.contender))
    before, after = ("{:.4g} ms ({:.4g} to {:.4g})".format(*numbers) for numbers in sides)
    return f"{before} -> {after} a step, {outcome.gain:.2f}x"


def write(output: Path, source: Path, found: Sequence[Tried], card: str) -> None:
    """Write a config with `source` as its base and the keys that won, each with what it gained on `card`.

    Raises ConfigError, with what it would have written, where `output` exists.
    """
    named = {path.resolve(): name for name, path in shipped().items()}
    base = named.get(source.resolve()) or os.path.relpath(source.resolve(), output.resolve().parent)
    lines = [
        f"# Written by `fastsuncet tune` on {card}. Medians of a step, lowest and highest in brackets.",
        f"base: {as_yaml(base)}",
    ]
    sections: dict[str, dict[str, list[str]]] = {}  # of a key that two rungs set the later one counts
    for (rung, values), outcome in found:
        for key, value in values.items() if outcome.won else ():
            section, _, name = key.rpartition(".")
            text = [f"  # {rung}: {_times(outcome)}, {card}", f"  {name}: {as_yaml(value)}"]
            sections.setdefault(section, {})[name] = text
    for section, keys in sections.items():
        lines += [f"{section}:", *itertools.chain(*keys.values())]
    text = "\n".join([*lines, ""])
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(output, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:  # made during the trials, which must not be lost
        raise ConfigError(f"--output {output} exists. Save this under another name:\n\n{text}") from None


def candidates(asked: Config, config: Config, device: str) -> list[Rung]:
    """Return the contenders on "cuda" or "cpu" for a config as `asked`, which runs as `config`, most promising first.

    What is written in the config is never tried.
    """
    rungs = (_gpu if device == "cuda" else _cpu)(config)
    return [(name, values) for name, values in rungs if _is_open(asked, config, values)]


def _is_open(asked: Config, config: Config, values: dict[str, Any]) -> bool:
    """Return whether a contender changes the config, and nothing in it that was written."""
    now = flat(config.canonical())
    changed = [key for key, value in values.items() if now[key] != value]
    try:
        config.with_values(values)
        if "meta.compile" in values:
            require_compiler()
    except ConfigError:
        return False
    return bool(changed) and not any(asked.is_written(key) for key in changed)


def _gpu(config: Config) -> Iterator[Rung]:
    yield "CUDA graph", {"meta.cuda_graph": True}
    yield "compile", {"meta.compile": True, "model.fused_batchnorm": False}
    both = config.criterion.instance != "none" and config.criterion.supervised_epochs != 0
    yield from _loader(config, read_ahead=4, streams=1 + both)
    # Its pixels are near those of the other decoder, not equal.
    yield "hardware JPEG decoder", {"data.hw_decoder_share": 1.0}


def _cpu(config: Config) -> Iterator[Rung]:
    for count in _around(config.meta.threads or torch.get_num_threads()):
        yield f"torch threads: {count}", {"meta.threads": count}
    yield from _loader(config, read_ahead=3)
    yield "compile", {"meta.compile": True}


def _loader(config: Config, read_ahead: int, streams: int = 1) -> Iterator[Rung]:
    for count in _around(decode_threads(config.data.decode_threads, streams=streams)):
        yield f"decode threads: {count}", {"data.decode_threads": count}
    yield f"read-ahead: {read_ahead}", {"data.prefetch": read_ahead}


def _around(now: int) -> list[int]:
    """Return other numbers of threads than `now`, up to one more than this process's share of the cores."""
    share = max(1, cores_of_process())
    most = min(share + 1, 2 * MOST)
    tried = dict.fromkeys((share, most, share // 2, 1))
    return [count for count in tried if 1 <= count <= most and count != now]
