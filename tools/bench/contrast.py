"""Time SuNCEt, NT-Xent and PAWS, forward and backward, against the dense forms of their authors.

The rows of PAWS are its anchors, 8 views of each image; it has 105 supports for 512 anchors, as on ImageNet. Memory is
the largest sum of the tensors that are alive at any time in a pass. On a GPU each contender is timed as a CUDA graph
where it can be captured: launched one by one, small kernels wait for the host.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

import fastsuncet
from fastsuncet.distributed.place import pick_device
from fastsuncet.training.methods import tf32_products
from tools.bench import harness

ROUNDS = 5
OURS, TF32, AUTHORS = "fastsuncet", "fastsuncet, TF32 products", "dense, as the authors"
TEMPERATURE, WIDTH = 0.1, 128
Loss = Callable[[Tensor], Tensor]  # z (N, D) -> scalar


# The forms of the authors, with all N x N similarities at once. Each takes ids (N,) int64 and returns the loss of
# z (N, D), with the constants that it keeps from step to step.
def suncet(ids: Tensor) -> Loss:
    """Return SuNCEt in the authors' later form: each class's probability, by a product with one-hot labels.

    It costs N x N x C more multiply-adds each way, but has no loop. -t log p is the log of a power, as they write it.
    """
    others, targets = off_diagonal(ids), F.one_hot(ids).float()

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        probabilities = exps / exps.sum(dim=1, keepdim=True) @ targets
        return torch.log(probabilities**-targets).sum(dim=1).mean()

    return loss


def nt_xent(ids: Tensor) -> Loss:
    """Return NT-Xent: the exponentials times a mask of others and a mask of positives, summed."""
    others = off_diagonal(ids)
    positives = others * (ids[:, None] == ids[None, :])

    def loss(z: Tensor) -> Tensor:
        exps = exponentials(z, others)
        return -torch.log((exps * positives).sum(dim=1) / exps.sum(dim=1)).mean()

    return loss


def paws(labels: Tensor) -> Loss:
    """Return PAWS, with all probabilities at once: z holds the anchors, then the supports, whose labels are given."""
    targets, target_supports = paws_targets(labels)
    rows = 0.9 * F.one_hot(labels).float()
    rows += 0.1 / rows.shape[1]

    def snn(query: Tensor, supports: Tensor) -> Tensor:
        return torch.softmax(F.normalize(query) @ F.normalize(supports).T / TEMPERATURE, dim=1) @ rows

    def sharpen(p: Tensor) -> Tensor:
        return p**4 / (p**4).sum(dim=1, keepdim=True)

    def loss(z: Tensor) -> Tensor:
        with torch.no_grad():
            large = sharpen(snn(targets, target_supports))
            wanted = torch.cat([large, *[sum(large.chunk(2)) / 2] * 6])
            wanted.masked_fill_(wanted < 1e-4, 0)
        p = snn(z[: -len(labels)], z[-len(labels) :])
        mean = sharpen(p).mean(dim=0)
        return (p**-wanted).log().sum(dim=1).mean() - (mean**-mean).log().sum()

    return loss


def exponentials(z: Tensor, others: Tensor) -> Tensor:
    """Return exp of all N x N cosines over the temperature, without the anchor itself and without a maximum."""
    unit = z / z.norm(dim=1, keepdim=True)
    return torch.exp(unit @ unit.T / TEMPERATURE) * others


def off_diagonal(ids: Tensor) -> Tensor:
    """Return (N, N): 0 on the diagonal, else 1."""
    return 1 - torch.eye(len(ids), device=ids.device)


DENSE = {"suncet": suncet, "nt_xent": nt_xent, "paws": paws}


def paws_targets(labels: Tensor) -> list[Tensor]:
    """Return the targets (2 B, D) and target supports (S, D) of PAWS, which carry no gradient."""
    generator, sizes = torch.Generator().manual_seed(1), (2 * (len(labels) * 512 // 105) // 8, len(labels))
    return [torch.randn(n, WIDTH, generator=generator).to(labels.device) for n in sizes]


def inputs(loss: str, rows: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return z (N, D), which requires a gradient, and ids (N,): classes of 8, or two views of N/2 images.

    Of PAWS z are N anchors and S supports (N + S, D), and ids the labels of the supports (S,), 7 of each class.
    """
    supports = rows * 105 // 512 if loss == "paws" else 0
    z = torch.randn(rows + supports, WIDTH, generator=torch.Generator().manual_seed(rows))
    count, each = (supports, 7) if supports else (rows, 8 if loss == "suncet" else 2)
    return z.to(device).requires_grad_(), torch.arange(count, device=device) % max(1, count // each)


def ours(loss: str, ids: Tensor, tf32: bool = False) -> Loss:
    """Return our loss of z, for PAWS of anchors and then supports. `tf32`: as a bf16 run on a GPU has it."""
    targets = paws_targets(ids) if loss == "paws" else ()
    settings = {"views": 8, "classes": len(ids) // 7}  # as the trainer, which knows their number

    def value(z: Tensor) -> Tensor:
        with tf32_products(tf32):
            if loss == "paws":
                return sum(fastsuncet.paws(*z.tensor_split([-len(ids)]), ids, *targets, **settings))
            if loss == "suncet":
                return fastsuncet.suncet(z, ids, TEMPERATURE)
            return fastsuncet.nt_xent(z, TEMPERATURE)

    return value


def contenders(loss: str, device: str = "cpu") -> dict[str, Callable[[Tensor], Loss]]:
    """Return all that compute `loss`, ours first, equal in value and gradient; each takes the ids (N,)."""
    found: dict[str, Callable[[Tensor], Loss]] = {OURS: partial(ours, loss)}
    found |= {TF32: partial(ours, loss, tf32=True)} if device == "cuda" and loss != "paws" else {}
    return found | {AUTHORS: DENSE[loss]}


def forward_backward(function: Loss, z: Tensor) -> Tensor:
    """Compute one value and its gradient, without the previous gradient."""
    z.grad = None
    value = function(z)
    value.backward()
    return value.detach()


def measure(options: Namespace) -> int:
    """Time and count each loss at each number of rows."""
    device = pick_device(options.device, 0).type
    rows, rounds = ([512], 2) if options.quick else (options.rows, options.rounds)
    clock = partial(harness.seconds_of, device=device, repeats=10 if device == "cuda" else 1)
    torch.set_num_threads(1)
    for loss, n in product(options.loss, rows):
        z, ids = inputs(loss, n, device)
        prepared = contenders(loss, device).items()
        calls = {name: partial(forward_backward, prepare(ids), z) for name, prepare in prepared}
        # A graph's operators are not dispatched again, so the calls themselves are counted.
        graphs = {name: harness.capture_graph(name, call) for name, call in calls.items() if device == "cuda"}
        found = harness.rows_of(harness.time_in_turns(graphs or calls, clock, rounds), device, OURS)
        for name, call in calls.items():
            found[name] |= harness.counted(call, device)
        title = f"{loss}, N = {n}, D = {WIDTH}, forward and backward, float32, {harness.CLOCK[device]}"
        harness.show(title, found.values())
    return 0


def add_arguments(add: Callable) -> None:
    add("--rows", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="N (default: %(default)s)")
    add("--loss", nargs="+", choices=DENSE, default=[*DENSE])
    add("--device", choices=harness.DEVICES, default="auto")
