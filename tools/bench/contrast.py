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
from torch import Tensor

import fastsuncet
from fastsuncet.distributed.place import pick_device
from fastsuncet.training.methods import tf32_products
from tools.bench import dense_forms, harness
from tools.bench.dense_forms import TEMPERATURE, WIDTH, Loss, forward_backward, inputs, paws_targets

ROUNDS = 5
LOSSES = ("suncet", "nt_xent", "paws")
OURS, TF32, AUTHORS = "fastsuncet", "fastsuncet, TF32 products", "dense, as the authors"


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
    if loss == "paws":
        return found | {AUTHORS: lambda labels: dense_forms.paws(labels, *paws_targets(labels))}
    found |= {TF32: partial(ours, loss, tf32=True)} if device == "cuda" else {}
    return found | {AUTHORS: dense_forms.suncet if loss == "suncet" else dense_forms.nt_xent}


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
    add("--loss", nargs="+", choices=LOSSES, default=LOSSES)
    add("--device", choices=harness.DEVICES, default="auto")
