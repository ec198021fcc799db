"""Time the training step: end to end, on one fixed batch, and against a plain PyTorch SimCLR step.

    python tools/bench/bench_step.py CONFIG [section.key=value ...] [--device cpu|cuda] [--rounds R] [--steps K]
                                     [--json FILE] [--quick]

Contenders take turns of K steps. The peers train the same network on as many views of the same size, in the same
precision and memory layout, with torch's SGD: one with lightly's NTXentLoss (extra `bench`; left out where it is not
installed), one with the usual cross-entropy over a dense matrix of similarities. They have no SuNCEt, so ours runs
twice: as CONFIG says, and as SimCLR alone. `fastsuncet tune` compares our step with itself in other settings.

Operators and host waits of a step are counted too. On a GPU, CUDA itself checks that no step waits for the device: if
one does, the exit code is 1.
"""

import contextlib
import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.config import Config, load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import Batch, PairedStream
from fastsuncet.distributed.launch import Place, join
from fastsuncet.models.resnet import build_model
from fastsuncet.training.cuda_graph import WARMUP, GraphedStep, first_message
from fastsuncet.training.determinism import PRECISIONS, resolve_precision, set_determinism
from fastsuncet.training.step import build, train_step
from tools.bench import harness
from tools.bench.dispatch_counter import counts
from tools.bench.harness import Call, ratios, spread, target

END_TO_END, FIXED, SIMCLR = "end to end", "one fixed batch", "one fixed batch, SimCLR alone"
PLAIN, LIGHTLY = "plain PyTorch, dense loss", "plain PyTorch, lightly's NTXentLoss"


class StepBench:
    """The contenders of one process on one config, as calls that each make one update."""

    def __init__(self, config: Config, place: Place, batch: Batch, classes: int):
        self.config, self.place, self.batch, self.classes = config, place, batch, classes
        self.notes: list[str] = []  # why there is no CUDA graph where one was asked for
        self.views = sum(map(len, batch.views)) + len(batch.labeled)

    @classmethod
    def open(cls, config: Config, place: Place) -> tuple["StepBench", PairedStream]:
        """Return the bench over a config's first batch, and the stream of its batches, which the caller closes."""
        config, _ = resolve_precision(config, place.device)
        images = open_images(config, place, validation=False)
        arithmetic = config.resolve(place.world_size, *images.counts())
        stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
        return cls(config, place, stream(0), len(images.train.classes)), stream

    def ours(self, batch_of: Callable[[int], Batch]) -> Call:
        """Return our step on the batches that `batch_of` returns."""
        _, network, optimizer, method = build(self.config, self.place, self.classes)
        graphed = None
        if self.config.meta.cuda_graph is True:
            graphed = GraphedStep(network, optimizer, method, say=self.notes.append)
        steps = itertools.count()

        def step() -> Any:
            # These switches belong to the process, and other contenders set them differently.
            set_determinism(self.config, self.place)
            if graphed is not None:
                return graphed(batch_of(next(steps)), 1e-3)
            return train_step(network, optimizer, batch_of(next(steps)), 1e-3, method)

        return step

    def simclr_batch(self) -> Batch:
        """Return a batch of as many views as the config's step has, all of them unlabeled."""
        views = torch.cat([*self.batch.views, self.batch.labeled])
        half = len(views) // 2
        pair = (views[:half], views[half : 2 * half])
        return replace(self.batch, views=pair, labeled=views[:0], labels=self.batch.labels[:0])

    def plain(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Call:
        """Return the step of a tutorial in our precision and memory layout; its kernels need not be deterministic."""
        m, meta = self.config.model, self.config.meta
        model = build_model(m.name, m.library, m.stem, *m.head)
        layout = torch.channels_last if meta.channels_last else torch.contiguous_format
        model = model.to(self.place.device, memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
        # DALI writes channels-last, and a convolution prefers that of two layouts: NCHW images must be made.
        first, second = (view.contiguous(memory_format=layout) for view in self.simclr_batch().views)
        device, dtype = self.place.device.type, PRECISIONS[meta.precision]
        free = self.config.model_copy(update={"meta": meta.model_copy(update={"deterministic": False})})

        def step() -> Tensor:
            set_determinism(free, self.place)
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                z = model(torch.cat([first, second]))
            value = loss(*z.float().chunk(2))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    def contenders(self, stream: PairedStream) -> dict[str, Call]:
        """Return all contenders by the name in the table."""
        temperature, simclr = self.config.criterion.temperature, self.simclr_batch()
        calls = {
            END_TO_END: self.ours(stream),
            FIXED: self.ours(lambda _: self.batch),
            SIMCLR: self.ours(lambda _: simclr),
            PLAIN: self.plain(lambda a, b: dense_nt_xent(a, b, temperature)),
        }
        with contextlib.suppress(ImportError):
            from lightly.loss import NTXentLoss

            calls[LIGHTLY] = self.plain(NTXentLoss(temperature))
        return calls


def dense_nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return NT-Xent as tutorials write it: (B, D) twice -> the mean over 2B anchors, by one (2B, 2B) matrix."""
    z = F.normalize(torch.cat([first, second]))
    logits = z @ z.T / temperature
    logits.fill_diagonal_(float("-inf"))
    number = torch.arange(len(z), device=z.device)
    return F.cross_entropy(logits, number.roll(len(first)))


def measure(
    bench: StepBench, calls: dict[str, Call], prefetch: int, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Return one point per contender: seconds of each turn's steps, views per second, operators and host waits."""
    # Momentum exists after that, kernels are chosen, and a CUDA graph, where one is asked for, is captured.
    warmup = WARMUP + 1
    # Batches that were prepared while others had their turns are not part of this turn.
    ahead = {END_TO_END: prefetch + 1}
    seconds = harness.time_in_turns(calls, bench.place.device.type, rounds, steps, warmup, ahead)
    points = []
    for name, times in seconds.items():
        views = bench.views if name in (END_TO_END, FIXED) else 2 * (bench.views // 2)
        point: dict[str, Any] = {"name": name, "views": views, "seconds": times}
        point["views_per_second"] = [views / each for each in times]
        point["speed_to_fixed"] = ratios(point["views_per_second"], [bench.views / s for s in seconds[FIXED]])
        points.append(point | (counts(calls[name]) if name != END_TO_END else {}))
    return points


def wait_in(step: Call, device: str) -> str:
    """Return CUDA's message about the first place where the host waits in a step; "" for none, and on a CPU."""
    if device != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return first_message(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON; return 1 if CUDA finds that a step waits for the device."""
    parser = harness.parser(__doc__, rounds=7, quick="two turns of one step", device="auto", config=True)
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    rounds, steps = (2, 1) if options.quick else (options.rounds, options.steps)
    config = load_config(options.config, [*options.overrides, f"meta.device={options.device}"])
    report = harness.Report("bench_step", options.json, config=config.canonical())
    with join(config.meta.device) as place:
        config, _ = resolve_precision(config, place.device)
        set_determinism(config, place)
        device = place.device.type
        bench, stream = StepBench.open(config, place)
        calls = bench.contenders(stream)
        points = measure(bench, calls, config.data.prefetch, rounds, steps)
        waits = wait_in(calls[FIXED], device)
        stream.close()
    by_name = {point["name"]: point for point in points}
    targets = [target("host waits in a step", [by_name[FIXED]["host_waits"]], 0, at_least=False)]
    # A CPU makes the pixels itself, so there they always cost time.
    if device == "cuda":
        end_to_end = by_name[END_TO_END]["speed_to_fixed"]
        targets.append(target("end to end, of the speed on a fixed batch", end_to_end, 0.97, at_least=True))
    title = f"a step of {bench.views} views, pixels by {stream.backend}, {harness.CLOCK[device]}"
    columns = [
        ("", "name", str),
        ("ms a step", "seconds", partial(spread, factor=1e3)),
        ("views/s" if device == "cuda" else "views per CPU second", "views_per_second", spread),
        ("x one fixed batch", "speed_to_fixed", spread),
        *harness.COUNTS,
    ]
    tables = [harness.table(title, points, columns)]
    wrong = [f"a step waits for the device: {waits}"] if waits else []
    return report.finish(tables, notes=bench.notes + targets, wrong=wrong, points=points)


if __name__ == "__main__":
    harness.run(main)
