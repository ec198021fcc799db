"""Time the training step: end to end, on one fixed batch, and against a plain PyTorch SimCLR step.

The peer trains the same network on as many views of the same size, in the same precision and memory layout, with
torch's SGD and the usual cross-entropy over a dense matrix of similarities. It has no SuNCEt. `fastsuncet tune`
compares our step with itself in many settings, --against in one more, and the case `peers` with lightly.

Operators and host waits of a step are counted too. On a GPU, CUDA itself checks that no step waits for the device: if
one does, the exit code is 1.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastsuncet.config import Config, load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import Batch, PairedStream
from fastsuncet.distributed.place import Place, join
from fastsuncet.models.resnet import build_model
from fastsuncet.training.cuda_graph import WARMUP, GraphedStep, first_message
from fastsuncet.training.determinism import PRECISIONS, resolve_precision, set_determinism
from fastsuncet.training.step import build, train_step
from fastsuncet.tuning.fast_paths import PATHS, resolved
from tools.bench import harness
from tools.bench.harness import Call, ratios, spread

ROUNDS = 7
END_TO_END, FIXED, PLAIN = "end to end", "one fixed batch", "plain PyTorch, dense loss"


class StepBench:
    """The contenders of one process on one config, as calls that each make one update."""

    def __init__(self, config: Config, place: Place, batch: Batch, classes: int):
        self.config, self.place, self.batch, self.classes = config, place, batch, classes
        self.notes: list[str] = []  # why there is no CUDA graph where one was asked for

    @classmethod
    def open(cls, config: Config, place: Place) -> tuple["StepBench", PairedStream]:
        """Return the bench over a config's first batch, and the stream of its batches, which the caller closes."""
        config, _ = resolve_precision(config, place.device)
        images = open_images(config, place, validation=False)
        arithmetic = config.resolve(place.world_size, *images.counts())
        if place.on_gpu:
            # As in a run whose trials pass. Without, a loader would take DALI's own operators, at a third of the speed.
            found = {
                name: path.excluded(config, arithmetic) or path.missing() for name, path in PATHS.items()
            }
            config = resolved(config, found)
        stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
        return cls(config, place, stream(0), len(images.train.classes)), stream

    @cached_property
    def _update(self) -> Callable[[Batch], Tensor]:
        """Our step of one network, for all contenders: a card of 80 GB does not hold two graphs and the plain step."""
        _, network, optimizer, method = build(self.config, self.place, self.classes)
        if self.config.meta.cuda_graph is True:
            graphed = GraphedStep(network, optimizer, method, say=self.notes.append)
            return lambda batch: graphed(batch, 1e-3)
        return lambda batch: train_step(network, optimizer, batch, 1e-3, method)

    def ours(self, batch_of: Callable[[int], Batch]) -> Call:
        """Return our step on the batches that `batch_of` returns, from the one after the first on."""
        # A loader starts anew for a step that does not follow the one before.
        update, steps = self._update, itertools.count(self.batch.step + 1)

        def step() -> Any:
            # These switches belong to the process, and the other contender sets them differently.
            set_determinism(self.config, self.place)
            return update(batch_of(next(steps)))

        return step

    def plain(self) -> Call:
        """Return the step of a tutorial in our precision and memory layout; its kernels need not be deterministic."""
        m, meta, tau = self.config.model, self.config.meta, self.config.criterion.temperature
        layout = torch.channels_last if meta.channels_last else torch.contiguous_format
        model = build_model(m.name, m.stem, *m.head).to(self.place.device, memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
        # DALI writes channels-last, and a convolution prefers that of two layouts: NCHW images must be made.
        views = torch.cat([*self.batch.views, self.batch.labeled]).contiguous(memory_format=layout)
        first, second = views[: len(views) // 2 * 2].chunk(2)
        device, dtype = self.place.device.type, PRECISIONS[meta.precision]
        free = self.config.model_copy(update={"meta": meta.model_copy(update={"deterministic": False})})

        def step() -> Tensor:
            set_determinism(free, self.place)
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                z = model(torch.cat([first, second]))
            value = dense_nt_xent(*z.float().chunk(2), tau)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            return value.detach()

        return step


def dense_nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return NT-Xent as tutorials write it: (B, D) twice -> the mean over 2B anchors, by one (2B, 2B) matrix."""
    z = F.normalize(torch.cat([first, second]))
    logits = z @ z.T / temperature
    logits.fill_diagonal_(float("-inf"))
    number = torch.arange(len(z), device=z.device)
    return F.cross_entropy(logits, number.roll(len(first)))


def wait_in(step: Call, device: str) -> list[str]:
    """Return CUDA's message about the first place where the host waits in a step; [] for none, and on a CPU."""
    if device != "cuda":
        return []
    try:
        with harness.waiting_raises():
            step()
    except RuntimeError as error:
        return [f"a step waits for the device: {first_message(error)}"]
    return []


def measure(options: Namespace) -> int:
    """Time the contenders; return 1 if a step waits for the device."""
    rounds, steps = (2, 1) if options.quick else (options.rounds, options.steps)
    settings = {"": []} | ({f", {' '.join(options.against)}": options.against} if options.against else {})
    with join(options.device) as place:
        device, calls, fixed, ahead, opened = place.device.type, {}, {}, {}, []
        for suffix, more in settings.items():
            words = [*options.overrides, *more, f"meta.device={options.device}"]
            # A stream for each: a setting can be one of the loader's.
            bench, stream = StepBench.open(load_config(options.config, words), place)
            opened.append((bench, stream))
            calls[END_TO_END + suffix] = bench.ours(stream)
            calls[FIXED + suffix] = fixed[FIXED + suffix] = bench.ours(lambda _, bench=bench: bench.batch)
            # Batches that were prepared while others had their turns are not part of this turn.
            ahead[END_TO_END + suffix] = bench.config.data.prefetch + 1
        bench, stream = opened[0]
        calls[PLAIN] = bench.plain()
        clock = partial(harness.seconds_of, device=device, repeats=steps)
        # Momentum exists after the warm-up, kernels are chosen, and a CUDA graph, where one is asked for, is captured.
        seconds = harness.time_in_turns(calls, clock, rounds, WARMUP + 1, ahead)
        counted = {
            name: harness.counted(call, device) for name, call in (*fixed.items(), (PLAIN, calls[PLAIN]))
        }
        waits = [wait for step in fixed.values() for wait in wait_in(step, device)]
        for _, each in opened:
            each.close()
    views = sum(map(len, bench.batch.views)) + len(bench.batch.labeled)
    rows = []
    for name, times in seconds.items():
        speeds = {"ms a step": spread(times, 1e3), "views/s": spread([views / each for each in times])}
        speeds["x one fixed batch"] = spread(ratios(seconds[FIXED], times))
        rows.append({"": name, **speeds, **counted.get(name, {})})
    pixels = stream.options.backend + ", view operator" * bool(stream.options.view_operator)
    title = f"a step of {views} views, pixels by {pixels}, {harness.CLOCK[device]}"
    harness.show(title, rows)
    # A CPU makes the pixels itself, so there they always cost time.
    for suffix in settings if device == "cuda" else ():
        reached = ratios(seconds[FIXED + suffix], seconds[END_TO_END + suffix])
        what = f"end to end, of the speed on a fixed batch{suffix}"
        harness.show_target(what, reached, 0.97, at_least=True)
    for note in (*(note for each, _ in opened for note in each.notes), *(f"WRONG: {wait}" for wait in waits)):
        print(note, end="\n\n")
    return 1 if waits else 0


def add_arguments(add: Callable) -> None:
    add("config", help="a YAML file, or the name of a shipped one")
    add("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    add("--steps", type=int, default=10, help="in a turn (default: %(default)s)")
    text = "time our step with these settings too, in the same turns"
    add("--against", nargs="+", default=[], metavar="section.key=value", help=text)
    add("--device", choices=harness.DEVICES, default="auto")
