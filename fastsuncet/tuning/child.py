"""What a process that may hang, run out of memory or lose its device is started for: to try something new.

    fastsuncet tune --child REQUEST REPORT      # started by `tuning.processes`; REPORT gets lines of JSON

It tries kernels, each by its own proof and timing, or a step: proof comes before timing. A step must give the same bits
twice (while meta.deterministic is on). A contender that only replays or reads must give plain's bits. Another one may
differ from plain by `FACTOR` times what plain differs from itself when each pixel is moved by one rounding.
"""

import contextlib
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from fastsuncet.config import Arithmetic, Config, flat
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.data.paired_stream import Batch, PairedStream, views
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.place import Place, join, work_stream
from fastsuncet.distributed.signals import end_with_parent
from fastsuncet.errors import FastSuncetError
from fastsuncet.kernels import switches
from fastsuncet.training.cuda_graph import WARMUP, WARMUP_IN_DDP, GraphedStep, tensors
from fastsuncet.training.determinism import PRECISIONS, set_determinism
from fastsuncet.training.step import build, train_step
from fastsuncet.tuning.fast_paths import PATHS
from fastsuncet.tuning.trials import seconds, try_kernel
from fastsuncet.tuning.verdicts import Verdict
from pipelines.backend import NO_MEMORY

WINDOWS = 4  # timed without a pause between them
SECONDS = 0.5  # of timed steps in a window: short, because other work on the machine comes and goes
FACTOR = 10  # emulated kernels that were right differed by up to 8 times (a narrow ResNet-50, float32)
FLOOR = 1e-6  # of a distance: float32 rounds its sums by less
PIXEL_LIMIT = 0.02  # of the size of the pixels: decoders of a GPU round to other levels
PROOF_IMAGES, PROOF_VIEWS = 32, 128  # of a rank: a proof in two precisions would not fit with a whole batch
EXACT_STEPS = 3
# By optimizer: at a larger rate the outputs of an own network overflowed in fp16 after six steps, and then no bits say
# anything. A LARS step is a share of a weight's own size.
LR = {"lars": 0.1, "sgd": 0.01, "adamw": 0.001}
# Settings by which a step only replays or reads.
EXACT = {"meta.cuda_graph", "data.decode_threads", "data.prefetch"}

Update = Callable[[Batch, float], Tensor]  # a step
Found = dict[str, dict[str, Tensor]]  # "losses", "weights", "BatchNorm statistics" -> tensor by name


def main(request: str, report: str) -> int:
    """Answer the request in one file by lines in another."""
    end_with_parent(signal.SIGKILL)
    asked: dict[str, Any] = json.loads(Path(request).read_text(encoding="utf-8"))
    with open(report, "a", encoding="utf-8") as stream:

        def say(line: dict[str, Any]) -> None:
            print(json.dumps(line), file=stream, flush=True)

        try_kernels(asked, say) if "try" in asked else try_step(asked, say)
    # Without waiting for threads of a library, nor for other ranks.
    os._exit(0)


def try_kernels(asked: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Prove and time the kernels that `asked` names; name each before it is tried."""
    config, arithmetic = Config.from_values(asked["config"]), Arithmetic(**asked["arithmetic"])
    device = torch.device("cuda", asked["device"])
    torch.cuda.set_device(device)
    with torch.cuda.stream(work_stream(device)):
        for path in asked["try"]:
            say({"path": path})
            trial = PATHS[path].trial
            assert trial is not None  # a graph is tried by `try_step`
            say({"path": path, **vars(try_kernel(path, trial(config, arithmetic), device))})


def try_step(asked: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Prove and time a step against another one."""
    config = Config.from_values(asked["config"])
    base, contender = (config.with_values(asked[side]) for side in ("base", "contender"))
    exact, reads = what_is_asked(base, contender)
    with join(config.meta.device) as place:
        for path, used in asked["paths"].items():
            switches.switch(path, place.device, None if used else "as the run does")
        try:
            bench = Bench(place, Arithmetic(**asked["arithmetic"]), asked["per_class"])
            problem = bench.problem(base, contender, exact=exact)
            # A rank that has left would keep the others waiting in the first collective of the timing.
            if any_rank(problem is not None):
                found = Verdict(problem=problem)
            else:
                found = bench.time(base, contender, reads)
        # Anything can end a contender, and the parent reports it.
        except Exception as error:
            kind = "" if isinstance(error, FastSuncetError) else f"{type(error).__name__}: "
            first = (str(error).splitlines() or [""])[0]
            found = Verdict(problem=kind + first, final=isinstance(error, FastSuncetError))
            say(vars(found))
            os._exit(1)  # the parents then end the other ranks, which can be in a collective
        say(vars(found))
        if found.problem:
            os._exit(0)  # without the end of the process group, which waits for the others


def what_is_asked(base: Config, contender: Config) -> tuple[bool, bool]:
    """Return whether a contender must give the bits of `base`, and whether it is timed while it reads its images."""
    before = flat(base.canonical())
    changed = {key for key, value in flat(contender.canonical()).items() if value != before[key]}
    return changed <= EXACT, any(key.startswith("data.") or key == "meta.threads" for key in changed)


class Bench:
    """Steps of any config on this rank."""

    def __init__(self, place: Place, arithmetic: Arithmetic, per_class: list[int]):
        self.place, self.arithmetic, self.per_class = place, arithmetic, per_class
        self.threads = torch.get_num_threads()
        self.supervised = 2 * arithmetic.supervised_steps >= arithmetic.steps  # most updates are of this kind
        self.images: Images | None = None

    @contextlib.contextmanager
    def step(self, config: Config) -> Iterator[tuple[torch.nn.Module, Update]]:
        """Build a network and its step, on the weights that the run starts with, with torch's switches of `config`."""
        torch.set_num_threads(self.threads)
        set_determinism(config, self.place)
        counts = self.per_class
        model, network, optimizer, method = build(config, self.place, len(counts), counts, self.arithmetic)
        if config.meta.cuda_graph is not True:
            yield model, lambda batch, lr: train_step(network, optimizer, batch, lr, method)
            return
        with contextlib.closing(GraphedStep(network, optimizer, method, say=_refuse)) as graphed:
            yield model, graphed

    def stream(self, config: Config) -> PairedStream:
        """Open the images of this rank as `config` reads them."""
        if self.images is None:
            self.images = open_images(config, self.place, validation=False)
        labeled = self.images.split.indices
        return PairedStream(config, self.images.train, labeled, self.arithmetic, self.place)

    def batch(self, config: Config, *, whole: bool) -> Batch:
        """Draw a batch of the size of this rank's, or a part of it, without reading images."""
        a, side = self.arithmetic, config.data.augmentation.size
        unlabeled = a.local_unlabeled if whole else min(a.local_unlabeled, PROOF_IMAGES)
        images, classes = a.local_labeled // a.labeled_views * self.supervised, max(1, a.classes_per_batch)
        if not whole:
            each = max(1, images // classes) * a.labeled_views
            classes = min(classes, max(2, (PROOF_VIEWS - a.views * unlabeled) // each))
            images = min(images, classes * each // a.labeled_views)
        generator = torch.Generator().manual_seed(self.place.rank)

        def draw(count: int, size: int) -> Tensor:
            pixels = torch.rand(count, size, size, 3, generator=generator).to(self.place.device)
            return pixels.permute(0, 3, 1, 2)

        shown = tuple(draw(unlabeled, view.size) for view in views(config))
        labels = (torch.arange(images, device=self.place.device) % classes).repeat(a.labeled_views)
        return Batch(0, shown, draw(len(labels), side), labels)

    @property
    def warmup(self) -> int:
        """Steps until a CUDA graph is captured."""
        return WARMUP if self.place.world_size == 1 else WARMUP_IN_DDP

    # ------------------------------------------------------------------------------------------------------ proofs
    def problem(self, base: Config, contender: Config, *, exact: bool) -> str | None:
        """Return what is wrong with a contender, None if it computes what `base` computes."""
        if base.data != contender.data:
            return self.pixel_problem(base, contender, exact=exact)
        batch = self.batch(base, whole=exact)
        steps = EXACT_STEPS + self.warmup if exact else 1
        expected, found = self.train(base, batch, steps), self.train(contender, batch, steps)
        if contender.meta.deterministic and not _equal(found, self.train(contender, batch, steps)):
            return f"{steps} steps gave other bits the second time"
        if exact:
            return None if _equal(expected, found) else f"{steps} steps gave other bits than without it"
        moved = self.train(base, _moved(batch, base), steps)
        for name in expected:
            if name == "weights" and base.meta.precision != "fp32":
                continue  # in 16 bits the update of plain moves by its own size
            error, own = (_distance(other[name], expected[name]) for other in (found, moved))
            if not error <= FACTOR * max(own, FLOOR):  # also for NaN
                return f"the {name} differ by {error:.1e}; one rounding of the pixels moves them by {own:.1e}"
        return None

    def train(self, config: Config, batch: Batch, steps: int) -> Found:
        """Return the losses of some steps on one batch, and by how much they changed weights and statistics."""
        with self.step(config) as (model, update):
            before = {name: x.detach().cpu().clone() for name, x in model.state_dict().items()}
            lr = LR[config.optimization.optimizer]
            losses = torch.stack([update(batch, lr).clone() for _ in range(steps)]).cpu()
            after = {name: x.detach().cpu() for name, x in model.state_dict().items()}
        changes = {name: (x - before[name]).double() for name, x in after.items()}
        weights = {name for name, _ in model.named_parameters()}
        parts = {"weights": weights, "BatchNorm statistics": changes.keys() - weights}
        found = {part: {name: changes[name] for name in sorted(names)} for part, names in parts.items()}
        return {"losses": {"losses": losses[:, :2].double()}, **found}

    def pixel_problem(self, base: Config, contender: Config, *, exact: bool) -> str | None:
        """Return what is wrong with a contender's pixels: not those of `base`, or not the same when read twice."""
        found = list(self.pixels(contender))
        for config, equal, when in ((contender, True, "the second time"), (base, exact, "than without it")):
            for number, (pixels, expected) in enumerate(zip(found, self.pixels(config), strict=True)):
                step = 2 * number // len(found)
                if torch.equal(pixels, expected):
                    continue
                if equal:
                    return f"other pixels {when}, at step {step}"
                if not (error := _relative(pixels, expected)) <= PIXEL_LIMIT:
                    return f"the pixels differ by {error:.1e}, limit {PIXEL_LIMIT:g}, at step {step}"
        return None

    def pixels(self, config: Config) -> Iterator[Tensor]:
        """Yield the tensors of two steps on the host: a GPU can lack the memory for two pairs of streams."""
        with contextlib.closing(self.stream(config)) as stream:
            for step in range(2):
                yield from (x.cpu() for x in tensors(stream(step, self.supervised)))

    # ------------------------------------------------------------------------------------------------------ timing
    def time(self, base: Config, contender: Config, reads: bool) -> Verdict:
        """Return the seconds of a step of both, on a fixed batch, or on images that it `reads`.

        The contender is between two turns of the base, and one is alive at a time.
        """
        before, _ = self._turn(base, reads)
        found, left = self._turn(contender, reads)
        after, _ = self._turn(base, reads)
        return Verdict(base=before + after, contender=found, memory_left=left)

    def _turn(self, config: Config, reads: bool) -> tuple[list[float], float]:
        """Return the seconds of a step in each window, and the share of the card's memory that stays free."""
        device, cuda = self.place.device, self.place.device.type == "cuda"
        with self.step(config) as (_, update), contextlib.ExitStack() as stack:
            if reads:
                stream = stack.enter_context(contextlib.closing(self.stream(config)))
                batches = (stream(number, self.supervised) for number in itertools.count())
            else:
                batches = itertools.repeat(self.batch(config, whole=True))

            def call() -> None:
                update(next(batches), 1e-3)

            seconds(call, max(self.warmup + 1, config.data.prefetch + 1), device)
            # Equal on all ranks, whose steps wait for each other.
            steps = broadcast_json(max(1, min(50, round(SECONDS / seconds(call, 1, device)))))
            found = [seconds(call, steps, device) for _ in range(WINDOWS)]
            free, total = torch.cuda.mem_get_info() if cuda else (1, 1)
        if cuda:
            torch.cuda.empty_cache()
        return found, free / total


def _refuse(line: str) -> NoReturn:
    """End the contender whose step was not captured: a run would go on without a graph, which is plain."""
    # For lack of memory it is no verdict for good: another program can have held it.
    raise (torch.OutOfMemoryError if NO_MEMORY.search(line) else FastSuncetError)(line)


def _moved(batch: Batch, config: Config) -> Batch:
    """Return the batch with each pixel moved up or down by one rounding of the network's precision."""
    step = torch.finfo(PRECISIONS[config.meta.precision]).eps

    def move(pixels: Tensor) -> Tensor:
        signs = (
            torch.arange(pixels.numel(), device=pixels.device).mul_(2654435761).bitwise_and_(1 << 16) >> 15
        )
        return pixels * (1 + step * (signs.view(pixels.shape) - 1))

    return replace(batch, views=tuple(map(move, batch.views)), labeled=move(batch.labeled))


def _equal(first: Found, second: Found) -> bool:
    return all(torch.equal(x, second[part][name]) for part in first for name, x in first[part].items())


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the root mean square, over tensors, of |found - expected| / |expected|; 0 where there is none."""
    errors = [_relative(found[name], expected[name]) for name in expected]
    return (sum(error**2 for error in errors) / max(1, len(errors))) ** 0.5


def _relative(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected|, over all numbers; 0 where both are 0."""
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return (difference / size.clamp(min=1e-30)).item()
