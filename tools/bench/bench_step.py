"""Time the training step: end to end, on one fixed batch, and against a plain PyTorch SimCLR step.

    python tools/bench/bench_step.py CONFIG [section.key=value ...] [--device cpu|cuda] [--rounds R] [--steps K]
                                     [--compile] [--json FILE] [--quick]

Contenders take turns of K steps. The peers train the same network on as many views of the same size, in the same
precision and memory layout, with torch's SGD: one with lightly's NTXentLoss (extra `bench`; left out where it is not
installed), one with the usual cross-entropy over a dense matrix of similarities. They have no SuNCEt, so ours runs
twice: as CONFIG says, and as SimCLR alone. --compile adds our step with `meta.compile=true`, which needs a C++ compiler
(on a GPU also Triton) and takes minutes before its first turn; these are reported separately.

Operators and host waits of a step are counted too. On a GPU, CUDA itself checks that no step waits for the device: if
one does, the exit code is 1.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
from fastsuncet.training.cuda_graph import WARMUP, WARMUP_IN_DDP, Step
from fastsuncet.training.determinism import PRECISIONS, resolve_precision, set_determinism
from fastsuncet.training.step import build
from tools.bench import harness
from tools.bench.dispatch_counter import Counter
from tools.bench.harness import Call, format_spread, ratios, spread, target

END_TO_END, FIXED, SIMCLR = "end to end", "one fixed batch", "one fixed batch, SimCLR alone"
COMPILED = "one fixed batch, compiled"
PLAIN, LIGHTLY = "plain PyTorch, dense loss", "plain PyTorch, lightly's NTXentLoss"


class StepBench:
    """The contenders of one process on one config, as calls that each make one update."""

    def __init__(self, config: Config, place: Place, batch: Batch, classes: int):
        self.config, self.place, self.batch, self.classes = config, place, batch, classes
        self.notes: list[str] = []  # why there is no CUDA graph or compiled step where one was asked for
        self.compile_seconds: float | None = None  # wall time until the first compiled step was done
        self.views = sum(map(len, batch.views)) + len(batch.labeled)

    @classmethod
    def open(cls, config: Config, place: Place) -> tuple["StepBench", PairedStream]:
        """Return the bench over a config's first batch, and the stream of its batches, which the caller closes."""
        config, _ = resolve_precision(config, place.device)
        images = open_images(config, place, validation=False)
        arithmetic = config.resolve(place.world_size, *images.counts())
        stream = PairedStream(config, images.train, images.split.indices, arithmetic, place)
        return cls(config, place, stream(0), len(images.train.classes)), stream

    def changed(self, **settings: Any) -> "StepBench":
        """Return a bench over the same batch with other settings of the model or meta section."""
        sections = self.config.canonical()
        for name, value in settings.items():
            sections["model" if name in sections["model"] else "meta"][name] = value
        return StepBench(Config.from_values(sections), self.place, self.batch, self.classes)

    def ours(self, batch_of: Callable[[int], Batch]) -> Call:
        """Return our step on the batches that `batch_of` returns."""
        _, network, optimizer, setting = build(self.config, self.place, self.classes)
        update = Step(network, optimizer, setting, graphs=self.config.meta.cuda_graph, say=self.notes.append)
        steps = itertools.count()

        def step() -> Any:
            # These switches belong to the process, and other contenders set them differently.
            set_determinism(self.config, self.place)
            return update(batch_of(next(steps)), 1e-3)

        return step

    def simclr_batch(self) -> Batch:
        """Return a batch of as many views as the config's step has, all of them unlabeled."""
        views = torch.cat([*self.batch.views, self.batch.labeled])
        half = len(views) // 2
        pair = (views[:half], views[half : 2 * half])
        return replace(self.batch, views=pair, labeled=views[:0], labels=self.batch.labels[:0])

    def plain(self, loss: Callable[[Tensor, Tensor], Tensor], *, tf32: bool = False) -> Call:
        """Return the step of a tutorial in our precision and memory layout; its kernels need not be deterministic.

        `tf32`: float32 convolutions round their factors, which is torch's default and not ours.
        """
        m, meta = self.config.model, self.config.meta
        model = build_model(m.name, m.library, m.stem, m.hidden, m.output, m.head_batchnorm)
        layout = torch.channels_last if meta.channels_last else torch.contiguous_format
        model = model.to(self.place.device, memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
        # DALI writes channels-last, and a convolution prefers that of two layouts: NCHW images must be made.
        first, second = (view.contiguous(memory_format=layout) for view in self.simclr_batch().views)
        device, dtype = self.place.device.type, PRECISIONS[meta.precision]
        free = self.config.model_copy(update={"meta": meta.model_copy(update={"deterministic": False})})

        def step() -> Tensor:
            set_determinism(free, self.place)
            torch.backends.cudnn.allow_tf32 = tf32
            with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
                z = model(torch.cat([first, second]))
            value = loss(*z.float().chunk(2))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    def compiled(self) -> Call | None:
        """Return our compiled step on the fixed batch; None, and a note, where it cannot be compiled."""
        began = time.perf_counter()
        try:
            step = self.changed(compile=True).ours(lambda _: self.batch)
            step()
        # What is missing decides the kind of error, and the other contenders are still wanted.
        except Exception as error:
            self.notes.append(f"no {COMPILED!r}: {type(error).__name__}: {harness.first_line(error)}")
            return None
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - began
        self.notes.append(
            f"{self.compile_seconds:.0f} s until the first compiled step, not in the figures above"
        )
        return step

    def contenders(self, stream: PairedStream, *, compiled: bool = False) -> dict[str, Call]:
        """Return all contenders by the name in the table."""
        temperature, fixed, simclr = self.config.criterion.temperature, self.batch, self.simclr_batch()
        calls = {
            END_TO_END: self.ours(stream),
            FIXED: self.ours(lambda _: fixed),
            SIMCLR: self.ours(lambda _: simclr),
        }
        if compiled and (step := self.compiled()) is not None:
            calls[COMPILED] = step
        calls[PLAIN] = self.plain(lambda a, b: dense_nt_xent(a, b, temperature))
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
    device, world_size = bench.place.device.type, bench.place.world_size

    def turn(name: str) -> float:
        # Batches that were prepared while others had their turns are not part of this turn.
        for _ in range(prefetch + 1 if name == END_TO_END else 0):
            calls[name]()
        return harness.seconds_of(calls[name], device, steps)

    # Momentum exists then, kernels are chosen, and a CUDA graph, where one is asked for, is captured.
    for call in calls.values():
        for _ in range((WARMUP if world_size == 1 else WARMUP_IN_DDP) + 1):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in harness.rotated(list(calls), number):
            seconds[name].append(turn(name))
    points = []
    for name, call in calls.items():
        views = bench.views if name in (END_TO_END, FIXED, COMPILED) else 2 * (bench.views // 2)
        point: dict[str, Any] = {"name": name, "views": views, "seconds": seconds[name]}
        point["views_per_second"] = [views / each for each in seconds[name]]
        # Counting would compile the compiled step again, and it does not see what is compiled.
        if name not in (END_TO_END, COMPILED):
            with Counter() as counter:
                call()
            point |= {"operators": counter.operators, "host_waits": counter.waits}
        points.append(point)
    fixed = next(point for point in points if point["name"] == FIXED)
    for point in points:
        point["speed_to_fixed"] = ratios(point["views_per_second"], fixed["views_per_second"])
    return points


def wait_in(step: Call, device: str) -> str:
    """Return CUDA's message about the first place where the host waits in a step; "" for none, and on a CPU."""
    if device != "cuda":
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return harness.first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON; return 1 if CUDA finds that a step waits for the device."""
    parser = harness.parser(__doc__, rounds=7, quick="two turns of one step")
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG section.key=value", help="default: the digits demo"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="also our step with meta.compile=true")
    options = parser.parse_intermixed_args(arguments)
    files = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word] + [f"meta.device={options.device}"]
    rounds, steps = (2, 1) if options.quick else (options.rounds, options.steps)
    digits = Path(__file__).resolve().parents[2] / "configs" / "digits_demo.yaml"
    config = load_config(files[0] if files else digits, overrides)
    report = harness.Report("bench_step", options.json, config=config.canonical())
    with join(config.meta.device) as place:
        config, _ = resolve_precision(config, place.device)
        set_determinism(config, place)
        device = place.device.type
        bench, stream = StepBench.open(config, place)
        calls = bench.contenders(stream, compiled=options.compile)
        points = measure(bench, calls, config.data.prefetch, rounds, steps)
        waits = wait_in(calls[FIXED], device)
        stream.close()
    by_name = {point["name"]: point for point in points}
    targets = [target("host waits in a step", spread([by_name[FIXED]["host_waits"]]), 0, at_least=False)]
    # A CPU makes the pixels itself, so there they always cost time.
    if device == "cuda":
        end_to_end = by_name[END_TO_END]["speed_to_fixed"]
        targets.append(target("end to end, of the speed on a fixed batch", end_to_end, 0.97, at_least=True))
    title = f"a step of {bench.views} views, pixels by {stream.backend}, {harness.CLOCK[device]}"
    columns = [
        ("", "name", str),
        ("ms a step", "seconds", harness.scaled(1e3)),
        ("views/s" if device == "cuda" else "views per CPU second", "views_per_second", harness.scaled(1)),
        ("x one fixed batch", "speed_to_fixed", format_spread),
        ("operators", "operators", str),
        ("host waits", "host_waits", str),
    ]
    return report.finish(
        [harness.table(title, points, columns)],
        notes=bench.notes,
        targets=targets,
        wrong=[f"a step waits for the device: {waits}"] if waits else [],
        device=device,
        points=points,
        pixels=stream.backend,
        compile_seconds=bench.compile_seconds,
    )


if __name__ == "__main__":
    harness.run(main)
