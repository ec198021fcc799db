"""Time BatchNorm with its residual and ReLU, forward and backward, on the shapes of a ResNet-50's 53 layers.

    python tools/bench/bench_norm.py [--device cpu|cuda] [--images N] [--most K] [--rounds R] [--json FILE] [--quick]
    torchrun --nproc-per-node 8 tools/bench/bench_norm.py          # the same with the statistics of all ranks

Contenders take turns on the same activations, channels-last and in bf16: torch's three operators, torch.compile of
them, and our kernels. Each is first compared with float32; one that differs is not timed, and if it is ours the exit
code is 1. On a GPU each runs as a CUDA graph where it can, so that the times are those of the kernels.

The limit is a copy of as many bytes as two passes forward and two backward must move. A layer that fits in the caches
can be faster than that, and on a CPU, where a copy also reads what it overwrites, every layer can.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.distributed.launch import Place, join
from fastsuncet.models.fused_batchnorm import FusedNorm, fuse
from fastsuncet.models.norm_kernel import fused_norm, prove
from fastsuncet.models.resnet import build_model
from fastsuncet.models.sync_batchnorm import RankBatchNorm
from fastsuncet.training.cuda_graph import first_message
from tools.bench import harness

OPERATORS, COMPILED, OURS = "torch, three operators", "torch.compile of them", "fastsuncet kernels"
LIMIT = "limit: a copy of as many bytes"
TOLERANCE = 0.02  # mean difference to float32 over the mean value: 16 bits cost less than half of it
RULE: dict[str, Any] = {"eps": 1e-5, "momentum": 0.1}  # of every BatchNorm

Kind = Literal["plain", "relu", "add"]  # y = n, relu(n), relu(n + residual), with n = BatchNorm(x)
WORDS = {"plain": "BatchNorm", "relu": "BatchNorm, ReLU", "add": "BatchNorm, residual, ReLU"}
PASSES = {"plain": 8, "relu": 8, "add": 10}  # over the activations, reads and writes together
# One forward and backward pass: y, and the gradients of x, weight, bias and, where there is one, the residual.
Pass = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class LayerShape:
    """Layers of one shape and kind, and how many of them the network has."""

    kind: Kind
    channels: int
    size: int  # height and width in pixels
    layers: int = 1

    def __str__(self) -> str:
        return f"{self.channels} x {self.size} x {self.size}: {WORDS[self.kind]}"

    def moved(self, images: int) -> int:
        """Return the bytes that forward and backward of one layer must read and write at least, in 16 bits.

        Forward reads x for the statistics, reads it again with the residual, and writes y. Backward reads dy and x for
        the sums and again for the gradient, and writes that and the residual's.
        """
        return 2 * PASSES[self.kind] * images * self.channels * self.size**2


def resnet50_shapes() -> list[LayerShape]:
    """Return the shapes of torchvision's ResNet-50 at 224 pixels, those that move most bytes first."""
    encoder = fuse(build_model("resnet50", device="meta").encoder, shared=False)
    found: Counter[tuple[Kind, int, int]] = Counter()

    def count(norm: FusedNorm, inputs: tuple[Tensor, ...]) -> None:
        kind: Kind = "add" if len(inputs) == 2 else "relu" if norm.relu else "plain"
        found[kind, inputs[0].shape[1], inputs[0].shape[2]] += 1

    for module in encoder.modules():
        if isinstance(module, FusedNorm):
            module.register_forward_pre_hook(count)
    encoder(torch.empty(2, 3, 224, 224, device="meta"))
    shapes = [LayerShape(*shape, layers) for shape, layers in found.items()]
    return sorted(shapes, key=lambda shape: -shape.layers * shape.moved(1))


class NormLayer:
    """The tensors of one layer on this rank, which all contenders share: channels-last; weight and bias float32."""

    def __init__(self, shape: LayerShape, images: int, place: Place, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.images, self.place = shape, images, place
        generator = torch.Generator(place.device).manual_seed(place.rank)
        size = (images, shape.channels, shape.size, shape.size)

        def draw(mean: float) -> Tensor:
            # Drawn in 16 bits for every dtype, so that all have the same values.
            x = torch.empty(
                size, dtype=torch.bfloat16, device=place.device, memory_format=torch.channels_last
            )
            return x.normal_(mean, generator=generator).to(dtype)

        # A gradient of mean 1, so that its sums over a layer are large compared with their rounding.
        self.x, self.d_y = draw(0.5).requires_grad_(), draw(1.0)
        self.residual = draw(0.0).requires_grad_() if shape.kind == "add" else None
        wave = torch.arange(shape.channels, device=place.device)
        self.weight, self.bias = (nn.Parameter(1 + 0.5 * torch.sin(wave * step)) for step in (0.3, 0.7))

    def through(self, forward: Callable[[Tensor, Tensor | None], Tensor]) -> Pass:
        """Return a pass through `forward`."""
        leaves = [self.x, self.weight, self.bias, *([] if self.residual is None else [self.residual])]

        def forward_backward() -> list[Tensor]:
            y = forward(self.x, self.residual)
            return [y.detach(), *torch.autograd.grad(y, leaves, self.d_y)]

        return forward_backward


def operators(layer: NormLayer, *, compile: bool = False) -> Pass:
    """Return BatchNorm, an addition and a ReLU of torch, in torch.compile if asked.

    Over several ranks the BatchNorm is torch's SyncBatchNorm, or ours on a CPU, where torch's cannot train.
    """
    norm: Any = nn.BatchNorm2d(layer.shape.channels, **RULE).to(layer.place.device)
    norm.weight, norm.bias = layer.weight, layer.bias
    if layer.place.world_size > 1:
        on_cpu = layer.place.device.type == "cpu"
        norm = RankBatchNorm.take_over(norm) if on_cpu else nn.SyncBatchNorm.convert_sync_batchnorm(norm)

    def forward(x: Tensor, residual: Tensor | None) -> Tensor:
        y = norm(x)
        y = y if residual is None else y + residual
        return y if layer.shape.kind == "plain" else F.relu(y)

    if compile:
        # Without a reset torch.compile stops compiling a function after some shapes.
        torch._dynamo.reset()
        forward = torch.compile(forward, dynamic=False)
    return layer.through(forward)


def kernels(layer: NormLayer) -> Pass:
    """Return our kernels, without a check of the device."""
    running = [torch.zeros_like(layer.weight), torch.ones_like(layer.weight)]
    rest = {"relu": layer.shape.kind != "plain", "shared": True, **RULE}
    return layer.through(lambda x, r: fused_norm(x, r, layer.weight, layer.bias, *running, **rest))


CONTENDERS: dict[str, Callable[[NormLayer], Pass]] = {
    OPERATORS: operators,
    COMPILED: lambda layer: operators(layer, compile=True),
    OURS: kernels,
}


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest mean difference of two lists of tensors, as a share of the mean value.

    A mean, because where y rounds to the other side of 0 its ReLU correctly passes another gradient.
    """
    return max(
        ((a.double() - b.double()).abs().mean() / b.double().abs().mean()).item()
        for a, b in zip(found, expected)
    )


def prepare(name: str, layer: NormLayer, expected: Sequence[Tensor]) -> tuple[Pass | None, str]:
    """Return a contender, None if it does not run or is far from `expected`, and a note on it or ""."""
    device, ranks = layer.place.device, layer.place.world_size
    if name == OURS and (why := harness.kernel_problem("norm.cu", device, prove)):
        return None, why
    try:
        call = CONTENDERS[name](layer)
        found = call()
    # A compiler, a kernel or the memory can fail in any way, and the other contenders are still wanted.
    except Exception as error:
        return None, f"failed: {type(error).__name__}: {first_message(error)}"
    # Over ranks some contenders return a weight's gradient of this rank's rows, some the mean of all: not compared.
    compared = [i for i in range(len(found)) if ranks == 1 or i not in (2, 3)]
    off = difference([found[i] for i in compared], [expected[i] for i in compared])
    if not off <= TOLERANCE:
        return None, f"WRONG: {100 * off:.1f} % off float32"
    if device.type == "cpu" or ranks > 1:
        return call, ""
    call, why = harness.capture_graph(call)
    return call, why and f"not as a CUDA graph: {why}"


def measure(shape: LayerShape, images: int, place: Place, rounds: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of one layer by contender and of the limit, and the notes on contenders."""
    layer = NormLayer(shape, images, place)
    # The same layer with activations in float32.
    expected = operators(NormLayer(shape, images, place, torch.float32))()
    prepared = {name: prepare(name, layer, expected) for name in CONTENDERS}
    calls = {name: call for name, (call, _) in prepared.items() if call is not None}
    notes = {name: note for name, (_, note) in prepared.items() if note}
    device = place.device.type
    limit = harness.copy_of(shape.moved(images), device)
    seconds = harness.time_in_turns({**calls, LIMIT: limit}, device, rounds, repeats)
    if device == "cuda":
        # The graphs keep all of a layer's activations several times.
        del calls, prepared
        torch.cuda.empty_cache()
    return {"layer": str(shape), "layers": shape.layers, "seconds": seconds, "notes": notes}


def totals(layers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one point per contender: the seconds of all layers in each round, or why there is no such sum.

    The first one that was timed is what the others are compared with.
    """
    rounds = range(len(layers[0]["seconds"][LIMIT]))
    sums = {
        name: [sum(each["layers"] * each["seconds"][name][turn] for each in layers) for turn in rounds]
        for name in (*CONTENDERS, LIMIT)
        if all(name in each["seconds"] for each in layers)
    }
    timed = {point["name"]: point for point in harness.points_of(sums, next(iter(sums)), LIMIT)}
    points = []
    for name in (*CONTENDERS, LIMIT):
        notes = dict.fromkeys(each["notes"][name] for each in layers if name in each["notes"])
        points.append({"name": name, "note": "; ".join(notes)} | timed.get(name, {}))
    return points


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON, which has each layer too; return 1 if our own kernels are wrong."""
    parser = harness.parser(__doc__, rounds=7, quick="three small shapes, two turns", device="auto")
    parser.add_argument("--images", type=int, help="on each rank (default: 256 on a GPU, 2 on a CPU)")
    parser.add_argument("--most", type=int, metavar="K", help="only the K shapes that move most bytes")
    options = parser.parse_args(arguments)
    shapes, rounds = resnet50_shapes()[: options.most], options.rounds
    if options.quick:
        # The last shape of each kind is the smallest.
        shapes, rounds = list({shape.kind: shape for shape in resnet50_shapes()}.values()), 2
    layers: list[dict[str, Any]] = []
    with join(options.device) as place:
        device = place.device.type
        images = options.images or (256 if device == "cuda" and not options.quick else 2)
        path = options.json if place.first else None
        report = harness.Report("bench_norm", path, device=device)
        what = f"{images} images on each of {place.world_size} rank(s), 16 bits, channels-last"
        for shape in shapes:
            layers.append(measure(shape, images, place, rounds, 20 if device == "cuda" else 1))
            points = totals(layers)
            count = sum(each["layers"] for each in layers)
            title = f"{count} layers, forward and backward, {what}, {harness.CLOCK[device]}"
            first = next(point["name"] for point in points if "seconds" in point)
            columns = [*harness.time_columns(device, first), ("", "note", str)]
            report.save(tables=[harness.table(title, points, columns)], points=points, layers=layers)
    wrong = [p["note"] for p in points if p["name"] == OURS and "WRONG" in p["note"]]
    if not place.first:
        return 1 if wrong else 0
    return report.finish(report.content["tables"], wrong=wrong)


if __name__ == "__main__":
    harness.run(main)
