"""Prove and time one contender, in a process that may hang, run out of memory or lose its device.

    fastsuncet tune --child REQUEST REPORT      # what `tuning.processes` starts, one on each rank

Proof comes before timing. A contender's step must give the same bits twice (while meta.deterministic is on) and, from
the run's own weights on its own batch, the losses and the update of plain up to rounding; a contender that only
replays or reads must give plain's bits. Then plain, the base and the contender take turns.
"""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastsuncet.checkpoint import atomic_files
from fastsuncet.config import Arithmetic, Config
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.paired_stream import Batch, PairedStream
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.launch import Place, join
from fastsuncet.distributed.signals import end_with_parent
from fastsuncet.errors import FastSuncetError
from fastsuncet.training import kernel_choice
from fastsuncet.training.cuda_graph import WARMUP, WARMUP_IN_DDP, Step, tensors
from fastsuncet.training.determinism import resolve_precision, set_determinism
from fastsuncet.training.step import build
from fastsuncet.tuning.chooser import BASE, CONTENDER, PLAIN, Report

ROUNDS, FEWEST_ROUNDS = 9, 3
TURN = 0.5  # seconds of timed steps in a turn: short, because other work on the machine comes and goes
# How far (losses and BatchNorm statistics, weights) may be from plain's, relative to their change over all steps. Other
# orders of the same sums were seen to differ by (4e-5, 0.011) in float32, bfloat16 from float32 by (0.003, 0.4).
LIMITS = {"fp32": (1e-3, 0.05), "bf16": (0.02, 0.6), "fp16": (0.02, 0.6)}
PIXEL_LIMIT = 0.02  # of the size of the pixels: operators of a GPU round to other levels
# Small, so that rounding in one step is not enlarged by the next; updates then stay far above the rounding of weights.
PROVED_STEPS, PROVED_LR = 3, 0.1


def main(request: str, report: str) -> int:
    """Answer the request in one file by a report in another."""
    end_with_parent(signal.SIGKILL)
    asked: dict[str, Any] = json.loads(Path(request).read_text(encoding="utf-8"))
    try:
        found = _measure(asked)
    # Anything can end a contender, and the parent reports it.
    except Exception as error:
        kind = "" if isinstance(error, FastSuncetError) else f"{type(error).__name__}: "
        found = Report(problem=kind + (str(error).splitlines() or [""])[0])
    atomic_files.replace(Path(report), json.dumps(asdict(found)).encode())
    # Without waiting for threads of a library, nor for other ranks.
    os._exit(0)


def _measure(asked: dict[str, Any]) -> Report:
    config = Config.from_values(asked["config"])
    with join(config.meta.device) as place:
        plain, _ = resolve_precision(config, place.device)
        sides = {side: plain.with_values(values) for side, values in asked["sides"].items()}
        images = open_images(plain, place, validation=False)
        arithmetic = plain.resolve(place.world_size, *images.counts())
        base, contender, exact = sides.get(BASE, sides[PLAIN]), sides[CONTENDER], asked["exact"]
        # As every run does at its start: each kernel on the shapes of this run's layers.
        kernels = kernel_choice.agree(place, kernel_choice.prove(contender, arithmetic, place.device))
        bench = _Bench(place, images, arithmetic)
        problem = kernels.get("norm.cu") if contender.model != base.model else None
        if problem is None and base.data != contender.data:
            problem = bench.pixel_problem(base, contender, exact=exact)
        elif problem is None:
            problem = bench.step_problem(base if exact else sides[PLAIN], contender, exact=exact)
        # A rank that has left would keep the others waiting in the first collective of the timing.
        if any_rank(problem is not None):
            return Report(problem=problem)
        return Report() if asked["clock"] is None else bench.time(sides, asked["clock"], asked["ends"])


class _Bench:
    """Steps of any config on this rank's images."""

    def __init__(self, place: Place, images: Images, arithmetic: Arithmetic):
        self.place, self.images, self.arithmetic = place, images, arithmetic
        self.threads = torch.get_num_threads()
        self.supervised = 2 * arithmetic.supervised_steps >= arithmetic.steps  # most updates are of this kind

    def use(self, config: Config) -> None:
        """Set the process's switches as `config` has them: sides with different ones take turns."""
        torch.set_num_threads(self.threads)
        set_determinism(config, self.place)

    def step(self, config: Config) -> tuple[torch.nn.Module, Step]:
        """Build a network and its step, on the weights that the run starts with."""
        self.use(config)
        model, network, optimizer, setting = build(config, self.place, len(self.images.train.classes))
        return model, Step(network, optimizer, setting, graphs=config.meta.cuda_graph, say=_refuse)

    def stream(self, config: Config) -> PairedStream:
        """Open the images of this rank as `config` reads them."""
        labeled = self.images.split.indices
        return PairedStream(config, self.images.train, labeled, self.arithmetic, self.place)

    @property
    def warmup(self) -> int:
        """Steps until a CUDA graph is captured."""
        return WARMUP if self.place.world_size == 1 else WARMUP_IN_DDP

    # ------------------------------------------------------------------------------------------------------ proofs
    def step_problem(self, plain: Config, contender: Config, *, exact: bool) -> str | None:
        """Return what is wrong with a contender's steps, None if they compute what `plain` computes."""
        with contextlib.closing(self.stream(plain)) as stream:
            batch = stream(0, self.supervised)
        pairs = [(plain, contender)]
        if plain.meta.precision == contender.meta.precision != "fp32" and not contender.meta.compile:
            # Sixteen bits hide a small mistake. The kernels have one source for all types.
            exactly = {"meta.precision": "fp32"}
            pairs.insert(0, (plain.with_values(exactly), contender.with_values(exactly)))
        found = (self._problem_of(batch, *pair, exact=exact) for pair in pairs)
        return next((problem for problem in found if problem), None)

    def _problem_of(self, batch: Batch, plain: Config, contender: Config, *, exact: bool) -> str | None:
        steps = PROVED_STEPS + (self.warmup if contender.meta.cuda_graph else 0)
        expected, found = (self._train(config, batch, steps) for config in (plain, contender))
        if contender.meta.deterministic:
            if not _equal(found, self._train(contender, batch, steps)):
                return f"{steps} steps gave other bits the second time"
            if exact and not _equal(expected, found):
                return f"{steps} steps gave other bits than without it"
        close, weights = max(LIMITS[config.meta.precision] for config in (plain, contender))
        for name, change in expected.items():
            error, limit = _distance(found[name], change), weights if name == "weights" else close
            if not error <= limit:  # also for NaN
                return f"the {name} of {steps} steps differ by {error:.1e}, limit {limit:g}"
        return None

    def _train(self, config: Config, batch: Batch, steps: int) -> dict[str, Tensor]:
        """Return the losses of some steps on one batch, and by how much they changed weights and statistics."""
        model, update = self.step(config)
        before = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
        losses = torch.stack([update(batch, PROVED_LR).clone() for _ in range(steps)]).cpu()
        changes = {name: (x.detach().cpu() - before[name]).double() for name, x in model.state_dict().items()}
        weights = {name for name, _ in model.named_parameters()}

        def joined(names: set[str]) -> Tensor:
            none = losses.new_zeros(0, dtype=torch.float64)  # a network without BatchNorm has no statistics
            return torch.cat([none, *(changes[name].flatten() for name in sorted(names))])

        return {
            "losses": losses,
            "weights": joined(weights),
            "BatchNorm statistics": joined(changes.keys() - weights),
        }

    def pixel_problem(self, plain: Config, contender: Config, *, exact: bool) -> str | None:
        """Return what is wrong with a contender's pixels: not those of `plain`, or not the same when read twice."""
        with contextlib.ExitStack() as stack:
            streams = [
                stack.enter_context(contextlib.closing(self.stream(c))) for c in (plain, contender, contender)
            ]
            for step in range(2):
                batches = [tensors(stream(step, self.supervised)) for stream in streams]
                for expected, found, again in zip(*batches, strict=True):
                    if not torch.equal(found, again):
                        return f"other pixels the second time, at step {step}"
                    if exact and not torch.equal(found, expected):
                        return f"other pixels than without it, at step {step}"
                    if len(found) and not (error := _distance(found, expected)) <= PIXEL_LIMIT:
                        return f"the pixels differ by {error:.1e}, limit {PIXEL_LIMIT:g}, at step {step}"
        return None

    # ------------------------------------------------------------------------------------------------------ timing
    def time(self, sides: dict[str, Config], clock: str, ends: float) -> Report:
        """Return the seconds a step of each side by turn, and the share of the card's memory that stays free."""
        with contextlib.ExitStack() as stack:
            calls = {side: stack.enter_context(self._side(config, clock)) for side, config in sides.items()}
            for side, call in calls.items():
                seconds = self._turn(sides[side], call, self.warmup + 2, 1)
            skipped = max(config.data.prefetch for config in sides.values()) + 1 if clock == "loop" else 1
            # Equal on all ranks, whose steps wait for each other.
            seconds = broadcast_json(seconds)
            steps = max(1, min(50, round(TURN / seconds)))
            needed = len(calls) * (skipped + steps) * seconds
            rounds = broadcast_json(min(ROUNDS, int((ends - time.time()) / needed)))
            if rounds < FEWEST_ROUNDS:
                return Report(problem=f"no time for {FEWEST_ROUNDS} turns: a step takes {seconds:.3g} s")
            found: dict[str, list[float]] = {side: [] for side in calls}
            left = None
            for turn in range(rounds):
                order = list(calls) if turn % 2 == 0 else list(reversed(calls))
                for side in order:
                    found[side].append(self._turn(sides[side], calls[side], skipped, steps))
                    if self.place.device.type == "cuda":
                        free, total = torch.cuda.mem_get_info()
                        left = free / total if side == CONTENDER else left
                        # The memory that this side keeps for its next turn is not the other's.
                        torch.cuda.empty_cache()
            views = self.arithmetic.update_samples(self.supervised) // self.place.world_size
            return Report(seconds=found, memory_left=left, views=views)

    @contextlib.contextmanager
    def _side(self, config: Config, clock: str) -> Iterator[Callable[[], Any]]:
        _, update = self.step(config)
        numbers = itertools.count()
        with contextlib.closing(self.stream(config)) as stream:
            if clock == "loop":
                yield lambda: update(stream(next(numbers), self.supervised), 1e-3)
                return
            batch = stream(0, self.supervised)
        yield lambda: update(batch, 1e-3)

    def _turn(self, config: Config, call: Callable[[], Any], skipped: int, steps: int) -> float:
        """Return the seconds of a step. What was prepared during the other sides' turns is skipped."""
        self.use(config)
        for _ in range(skipped):
            call()
        began = self._now()
        for _ in range(steps):
            call()
        return (self._now() - began) / steps

    def _now(self) -> float:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _refuse(line: str) -> NoReturn:
    """End the contender whose step was not captured: a run would go on without a graph, which is plain."""
    raise FastSuncetError(line)


def _equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def _distance(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, over all numbers; 0 where both are 0."""
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return (difference / size.clamp(min=1e-30)).item()
