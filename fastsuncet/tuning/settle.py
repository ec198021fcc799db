"""What a run trains with: what its checkpoint says, else what was chosen for this machine before, else what wins now.

A run that has a checkpoint never tunes. A new run with `meta.speed: auto` tunes if 0.5 % of the time that its FLOPs
predict is enough for a child. That depends on the config and on the kind of device alone, so that a short run has the
same bits everywhere. Everything here happens before this process touches a GPU.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.run_folder import RunStatus, exclusive_run_folder, on_rank_0
from fastsuncet.config import Arithmetic, Config
from fastsuncet.console import say_line
from fastsuncet.data.cpu_count import cores
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.paired_stream import run_macs
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError, ConfigError, Preempted
from fastsuncet.tuning import processes, record
from fastsuncet.tuning.chooser import Choice, Rung, Verdict, climb, problem_of
from fastsuncet.tuning.record import Record
from fastsuncet.tuning.rungs import candidates

SHARE, MOST, LEAST = 0.005, 180.0, 40.0  # of the predicted run; seconds; less is not enough for a child
# Floating-point operations a second that a training step of a ResNet reaches: on one GPU, on one core.
RATE = {"cuda": 1e14, "cpu": 5e10}


class Settled(NamedTuple):
    """What a run starts with: the record of its choice (None: plain), and its images if they were opened for it."""

    speed: Record | None
    images: Images | None
    line: str  # for the summary


PLAIN = Settled(None, None, "plain")


def settle(config: Config, place: Place) -> Settled:
    """Return what the run of `config` trains with. Collective; `place` is of a group without a GPU.

    Raises ConfigError for `meta.speed: fixed` where nothing was chosen before and for a written CUDA graph that fails,
    Preempted on a stop signal.
    """
    with SignalFlag() as signals, exclusive_run_folder(config.run_folder, place):
        found = _settle(config, place, signals)
        if any_rank(signals.requested is not None):
            stop = Preempted(
                f"{signals.requested or 'another rank'}: stopped before the first step; the same command starts it"
            )
            if place.first and manager.newest_meta(config.run_folder / manager.FOLDER) is None:
                RunStatus(config.run_folder / "status.json", place).write("preempted", 0, str(stop))
            raise stop
        return found


def _settle(config: Config, place: Place, signals: SignalFlag) -> Settled:
    meta = on_rank_0(place, lambda: manager.newest_meta(config.run_folder / manager.FOLDER))
    if meta is not None:
        speed = meta.get("speed")
        if speed is None:
            return Settled(None, None, "plain, as in the checkpoint")
        _require_agreement(config, speed)
        return Settled(speed, None, f"{speed['line']}; as in the checkpoint")
    device, plain = device_type(config), config.meta.speed == "plain"
    graph = config.meta.cuda_graph and device == "cuda"
    if plain and not graph:
        return Settled(None, None, "plain, as configured")
    images = open_images(config, place, validation=config.evaluation.knn_every_epochs is not None)
    arithmetic = config.resolve(place.world_size, *images.counts())
    if graph:
        _require_graph(config, signals)
    if plain:
        return Settled(None, images, "plain, as configured")
    fixed = config.meta.speed == "fixed"
    budget = seconds_to_spend(config, arithmetic, device)
    if not fixed and budget < LEAST:
        return Settled(None, images, "plain; the run is too short to tune")
    rungs = candidates(config, device)
    try:
        key = record.key(config, arithmetic, device, rungs)
    except record.NoKey as error:
        if fixed:
            raise ConfigError(f"meta.speed is fixed, and no choice is valid here: {error}") from error
        return Settled(None, images, f"plain; {error}")
    kept = broadcast_json(record.cached(key))
    if kept is not None:
        return Settled(kept, images, f"{kept['line']}; measured before")
    if fixed:
        raise ConfigError(
            "meta.speed is fixed, and no choice is kept for this machine, these versions and this config: run "
            "`fastsuncet tune` with the same config first, or write meta.speed: auto or plain"
        )
    if not rungs:
        return Settled(None, images, "plain; every switch of speed is written")
    say_line(
        f"speed: tries {len(rungs)} of its switches, at most {budget:.0f} s (meta.speed: plain turns this off)"
    )
    speed = tune(config, place, rungs, key, budget, signals)
    return Settled(speed, images, speed["line"])


def tune(
    config: Config,
    place: Place,
    rungs: list[Rung],
    key: dict,
    seconds: float,
    signals: SignalFlag,
    say: Callable[[Verdict], None] = lambda verdict: None,
) -> Record:
    """Prove and time the rungs within `seconds`, keep the choice for later runs, and return its record. Collective."""
    began = time.monotonic()

    def left() -> float:
        """Return the seconds left: those of rank 0, because all ranks start a child or none does."""
        spent = broadcast_json(time.monotonic() - began)
        return 0.0 if any_rank(signals.requested is not None) else seconds - spent

    def measure(rung: Rung, base: dict) -> list:
        # Half of the time for one child: what hangs must not cost the others theirs.
        return processes.measure(config, rung, base, min(left(), max(LEAST, seconds / 2)), signals)

    choice: Choice = climb(rungs, measure, lambda: left() > LEAST / 2, say)
    found = record.record_of(choice, key)
    stopped = any_rank(signals.requested is not None)  # on any rank: then not all rungs were tried
    if place.first and not stopped:
        try:
            record.keep(found)
        except (OSError, RuntimeError) as error:  # the run does not need it
            say_line(f"speed: the choice cannot be kept for later runs: {error}")
    return found


def device_type(config: Config) -> str:
    """Return "cuda" or "cpu", where the run of `config` will train, without touching a GPU."""
    return "cuda" if config.meta.device != "cpu" and torch.cuda.is_available() else "cpu"


def seconds_to_spend(config: Config, arithmetic: Arithmetic, device: str) -> float:
    """Return how long a run may be tuned, from the time that its FLOPs predict."""
    units = arithmetic.world_size if device == "cuda" else cores()
    # A backward pass costs two forward passes, and a multiply-add is two operations.
    return min(MOST, SHARE * 6 * run_macs(config, arithmetic) / (RATE[device] * units))


def _require_graph(config: Config, signals: SignalFlag) -> None:
    """Raise ConfigError if a written CUDA graph cannot be captured, or replays other bits. Collective.

    In children, because a capture that fails on one rank alone leaves the others waiting in its collectives.
    """
    plain = config.with_values({"meta.cuda_graph": False})
    graph = Rung("CUDA graph", {"meta.cuda_graph": True}, clock=None, exact=True)
    problem = problem_of(processes.measure(plain, graph, {}, MOST, signals))
    if problem and not any_rank(signals.requested is not None):
        raise ConfigError(
            f"meta.cuda_graph is true, and a process that tried it could not use it: {problem}. Remove the line"
        )


def _require_agreement(config: Config, speed: Record) -> None:
    """Raise CheckpointError if a switch is written now that the run was started without."""
    now = config.with_values(speed["chosen"])
    changed = [row for row in config.changed_keys(now.canonical()) if config.is_written(row[0])]
    if changed:
        lines = [
            f"{key}: {old!r} in the checkpoint, chosen by tuning; {new!r} now" for key, old, new in changed
        ]
        raise CheckpointError(
            "\n  ".join(["the run was started with other switches of speed:", *lines])
            + "\nRemove these lines to continue the run, or give the new run another logging.write_tag."
        )
