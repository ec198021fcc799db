"""The training step: end to end, on one fixed batch, and beside a plain PyTorch SimCLR step; operators and host waits.

    python tools/bench/bench_step.py CONFIG [section.key=value ...] [--device cpu|cuda] [--rounds R] [--steps K] [--compile]
                               [--json FILE]

Contenders take turns of K steps. The peers train the same network on as many views of the same size, in the same
precision and memory layout, with torch's SGD: one with lightly's NTXentLoss (extra `bench`; left out where it is not
installed), one with the loss that everybody writes, cross-entropy over a dense matrix of similarities. They have no
SuNCEt, so ours stands there twice: as CONFIG says, and as SimCLR alone. --compile adds our step with
`meta.compile=true`, which needs a C++ compiler (on a GPU also Triton) and takes minutes before its first turn: those
are told apart.

On a GPU the time is the wall's, with a synchronisation at both ends of a turn and none inside; on a CPU it is this
process's CPU time, all threads together, because such machines are shared.
"""

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from fastsuncet.config import Config, load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import Batch, PairedStream
from fastsuncet.distributed.collectives import world_size
from fastsuncet.distributed.launch import Place, join
from fastsuncet.models.resnet import build_model
from fastsuncet.training.cuda_graph import WARMUP, WARMUP_IN_DDP, Step
from fastsuncet.training.determinism import set_determinism
from fastsuncet.training.step import PRECISIONS, build
from tools.bench.common import (
    Counter,
    end,
    environment,
    print_table,
    print_targets,
    ratios,
    spread,
    target,
    told,
    write_json,
)
from tools.bench.device_clock import settled

END_TO_END, FIXED, SIMCLR = "end to end", "one fixed batch", "one fixed batch, SimCLR alone"
COMPILED = "one fixed batch, compiled"
PLAIN, LIGHTLY = "plain PyTorch, dense loss", "plain PyTorch, lightly's NTXentLoss"


class Bench:
    """One process's contenders on one config: steps by name, each called for one update."""

    def __init__(self, config: Config, place: Place):
        self.config, self.place = config, place
        self.said: list[str] = []  # why there is no graph, or nothing compiled, where that was asked for
        self.compile_seconds: float | None = None  # the wall's, until the first compiled step was done
        images = open_images(config, place, validation=False)
        self.classes = len(images.train.classes)
        self.arithmetic = config.resolve(place.world_size, *images.counts())
        self.stream = PairedStream(config, images.train, images.split.indices, self.arithmetic, place)
        self.batch = self.stream(0)
        self.views = sum(map(len, self.batch.views)) + len(self.batch.labeled)

    @classmethod
    def like(cls, other: "Bench", config: Config) -> "Bench":
        """The same images and batch under another config."""
        made = cls.__new__(cls)
        made.__dict__.update(other.__dict__)
        made.config = config
        return made

    def ours(self, batch_of: Callable[[int], Batch]) -> Callable[[], Any]:
        """Our step on the batches that `batch_of` gives."""
        _, network, optimizer, setting = build(self.config, self.place, self.classes)
        update = Step(network, optimizer, setting, graphs=self.config.meta.cuda_graph, say=self.said.append)
        steps = itertools.count()

        def step() -> Any:
            set_determinism(
                self.config, self.place
            )  # switches of the process, which contenders take turns in
            return update(batch_of(next(steps)), 1e-3)

        return step

    def alone(self) -> Batch:
        """As many views as the config's step has, all of them unlabeled."""
        every = torch.cat([*self.batch.views, self.batch.labeled])
        half = len(every) // 2
        views = (every[:half], every[half : 2 * half])
        return replace(self.batch, views=views, labeled=every[:0], labels=self.batch.labels[:0])

    def plain(self, loss: Callable[[Tensor, Tensor], Tensor], *, tf32: bool = False) -> Callable[[], Any]:
        """The step of a tutorial, in our precision and memory layout, with kernels that need not be deterministic.

        `tf32`: float32 convolutions round their factors, which is how torch comes; ours do not.
        """
        m, meta = self.config.model, self.config.meta
        model = build_model(m.name, m.library, m.stem, m.hidden, m.output, m.head_batchnorm)
        layout = torch.channels_last if meta.channels_last else torch.contiguous_format
        model = model.to(self.place.device, memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-6)
        # Of two layouts a convolution takes channels-last, which is how DALI writes: so NCHW must be made.
        first, second = (view.contiguous(memory_format=layout) for view in self.alone().views)
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

    def compiled(self) -> Callable[[], Any] | None:
        """Our step on the fixed batch with the network in torch.compile, or None, and a line in `said`, without it."""
        sections = self.config.canonical()
        sections["meta"]["compile"] = True
        began = time.perf_counter()
        try:
            step = Bench.like(self, Config.from_values(sections)).ours(lambda _: self.batch)
            step()
        except Exception as error:  # of a dozen kinds, by what is missing; the others are wanted all the same
            self.said.append(f"no {COMPILED!r}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return None
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()
        self.compile_seconds = time.perf_counter() - began
        return step

    def contenders(self, *, compiled: bool = False) -> dict[str, Callable[[], Any]]:
        """All of them, by the name in the table."""
        temperature = self.config.criterion.temperature
        fixed, alone = self.batch, self.alone()
        steps = {END_TO_END: self.ours(self.stream), FIXED: self.ours(lambda _: fixed)}
        steps[SIMCLR] = self.ours(lambda _: alone)
        if compiled and (step := self.compiled()) is not None:
            steps[COMPILED] = step
        steps[PLAIN] = self.plain(lambda a, b: dense_nt_xent(a, b, temperature))
        with contextlib.suppress(ImportError):
            from lightly.loss import NTXentLoss

            steps[LIGHTLY] = self.plain(NTXentLoss(temperature))
        return steps


def dense_nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """NT-Xent as tutorials write it: (B, D) twice -> the mean over 2B anchors, by one (2B, 2B) matrix."""
    z = F.normalize(torch.cat([first, second]))
    logits = z @ z.T / temperature
    logits.fill_diagonal_(float("-inf"))
    number = torch.arange(len(z), device=z.device)
    return F.cross_entropy(logits, number.roll(len(first)))


def measure(
    contenders: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int, steps: int, ahead: int
) -> dict[str, list[float]]:
    """Seconds a step of each turn, by contender; the order turns by one each round."""
    names = list(contenders)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    warmup = WARMUP if world_size() == 1 else WARMUP_IN_DDP
    for call in contenders.values():
        for _ in range(warmup + 1):
            call()  # momentum is there now, kernels are chosen, and a graph, where one is asked for, is captured
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if name == END_TO_END:
                for _ in range(
                    ahead + 1
                ):  # what was made ahead while others had their turn is not this turn's
                    contenders[name]()
            start = now(device)
            for _ in range(steps):
                contenders[name]()
            seconds[name].append((now(device) - start) / steps)
    return seconds


def now(device: torch.device) -> float:
    """Seconds on the clock that fits the device."""
    return settled("cuda") if device.type == "cuda" else time.process_time()


def counted(step: Callable[[], Any]) -> dict[str, int]:
    """Operators of one step, and how often the host must wait in it."""
    with Counter() as counter:
        step()
    return {"operators": counter.operators, "host_waits": counter.waits}


def refused_waits(step: Callable[[], Any], device: torch.device) -> str | None:
    """What CUDA itself says of a host that waits in a step; None on a CPU, "" for a step that never does."""
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def bench(config: Config, place: Place, rounds: int, steps: int, *, compiled: bool = False) -> dict[str, Any]:
    """Measures all contenders: points, targets, and what CUDA says of waits."""
    made = Bench(config, place)
    contenders = made.contenders(compiled=compiled)
    seconds = measure(contenders, place.device, rounds, steps, config.data.prefetch)
    points = [
        {
            "name": name,
            "views": made.views if name in (END_TO_END, FIXED, COMPILED) else 2 * (made.views // 2),
            "seconds": seconds[name],
            # A dispatch mode would have the compiled one traced anew, and what is compiled is not seen by it.
            **(counted(contenders[name]) if name not in (END_TO_END, COMPILED) else {}),
        }
        for name in contenders
    ]
    refused = refused_waits(contenders[FIXED], place.device)
    made.stream.close()
    for row in points:
        row["views_per_second"] = [row["views"] / each for each in row["seconds"]]
    by_name = {row["name"]: row for row in points}
    for row in points:
        row["speed_to_fixed"] = ratios(row["views_per_second"], by_name[FIXED]["views_per_second"])
    asked = [target("host waits in a step", spread([by_name[FIXED]["host_waits"]]), 0, at_least=False)]
    if place.device.type == "cuda":  # a CPU makes the pixels itself: there they cannot come for nothing
        end_to_end = by_name[END_TO_END]["speed_to_fixed"]
        asked.append(target("end to end, of the speed on a fixed batch", end_to_end, 0.97, at_least=True))
    return {
        "points": points,
        "targets": asked,
        "cuda_says_of_waits": refused,
        "pixels": made.stream.backend,
        "compile_seconds": made.compile_seconds,
        "said": made.said,
    }


def show(found: Mapping[str, Any], device: torch.device) -> None:
    """The table."""
    clock = "views/s" if device.type == "cuda" else "views per CPU second"
    head = ["", clock, "x one fixed batch", "operators", "host waits"]
    print_table(
        head,
        [
            [
                row["name"],
                told(spread(row["views_per_second"])),
                told(row["speed_to_fixed"]),
                str(row.get("operators", "")),
                str(row.get("host_waits", "")),
            ]
            for row in found["points"]
        ],
    )


def main(arguments: list[str] | None = None) -> int:
    """Prints the table and writes the JSON. A missed target is a finding, not a failure: 0 either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG section.key=value", help="default: the digits demo"
    )
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--compile", action="store_true", help="also our step with meta.compile=true")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument(
        "--quick", action="store_true", help="two turns of a step: for a look and for the tests"
    )
    options = parser.parse_intermixed_args(arguments)
    files = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word] + [f"meta.device={options.device}"]
    rounds, steps = options.rounds, options.steps
    if options.quick:
        rounds, steps = 2, 1
    digits = Path(__file__).resolve().parents[2] / "configs" / "digits_demo.yaml"
    config = load_config(files[0] if files else digits, overrides)
    where = environment()
    with join(config.meta.device) as place:
        set_determinism(config, place)  # as a run does
        found = bench(config, place, rounds, steps, compiled=options.compile)
        show(found, place.device)
        if found["compile_seconds"] is not None:
            print(f"{found['compile_seconds']:.0f} s until the first compiled step, in no figure above")
        for line in found["said"]:
            print(line)
    print_targets(found["targets"])
    report = {
        "tool": "bench_step",
        "environment": where,
        "device": place.device.type,
        "config": config.canonical(),
    }
    write_json(options.json, {**report, **found})
    return 0


if __name__ == "__main__":
    end(main)
