"""A step over real ranks sends what the tables of docs/scaling.md say, and nothing else."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastsuncet.config import Config
from fastsuncet.distributed.place import Place
from fastsuncet.models.resnet import BasicBlock, Bottleneck
from fastsuncet.training.step import build, build_model, train_step
from tests.support.methods import CPU, METHODS, batch_of
from tests.support.ranks import run_ranks
from tests.support.runs import small_config

RANKS, IMAGES, LABELED, CLASSES = 2, 4, 6, 10
GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"
SWAV = ("criterion.instance=swav", "swav.prototypes=12", "swav.small_crops=3", "swav.small_size=8")
CASES = {
    "suncet": (),
    "detached": ("criterion.keys=detached",),
    "cross_entropy": ("criterion.supervision=cross_entropy",),
    "fused": ("model.fused_batchnorm=true",),
    "head_batchnorm": ("model.head_batchnorm=true",),
    "own_statistics": ("model.sync_batchnorm=false",),
    "swav": SWAV,
    "paws": METHODS["PAWS"],
}


def documented(config: Config) -> tuple[Counter, int]:
    """Return how often each (collective, bytes) is sent, and the bytes of the gradients, which DDP cuts in buckets."""
    c, model, sent = config.criterion, build_model(config, CLASSES, device="meta"), Counter()
    once_a_size = c.instance in ("swav", "paws")  # large and small crops are two passes
    ends = [
        block for block in model.modules() if isinstance(block, BasicBlock | Bottleneck) and block.downsample
    ]
    fused = config.model.fused_batchnorm is True
    shortcuts = {getattr(block, "bn3", block.bn2): block.downsample[1] for block in ends if fused}
    parts = [model.encoder, model.encoder] if once_a_size else [model.encoder]
    heads = [model.head] if model.predictor is None else [model.head, model.predictor] * 2
    norms = [m for part in [*parts, *heads] for m in part.modules() if isinstance(m, _BatchNorm)]
    for norm in norms if config.model.sync_batchnorm else ():
        if norm not in shortcuts.values():
            channels = [each.num_features for each in (norm, shortcuts.get(norm)) if each is not None]
            sent[REDUCE, 8 * sum(1 + 2 * count for count in channels)] += 1
            sent[REDUCE, 8 * sum(channels)] += 1

    def compared(count: int, *, labels: bool = False, gathers: int = 1) -> None:
        """Count what gathers rows, and on a CPU their shape, and reduces the gradient of the keys."""
        size = RANKS * 4 * count * config.model.output
        sent[GATHER, RANKS * 16] += 1
        sent[GATHER, size] += gathers
        sent[GATHER, RANKS * 8 * count] += labels
        sent[SCATTER, size] += c.keys == "attached"

    if c.instance == "nt_xent":
        compared(2 * IMAGES)
    elif c.instance == "swav":
        sent[GATHER, RANKS * 16] += 1
        sent[GATHER, RANKS * 8 * config.swav.prototypes] += 3
    else:
        compared(LABELED, labels=True, gathers=2)
        predictions = RANKS * 4 * c.classes_per_batch
        sent.update([(GATHER, RANKS * 16), (GATHER, predictions), (SCATTER, predictions)])
        sent[GATHER, RANKS * 4 * LABELED] += config.paws.prior == "labels"
    if c.supervision == "suncet":
        compared(LABELED, labels=True)
    elif c.supervision == "cross_entropy":
        sent[GATHER, RANKS * 16] += 1
    return sent, 4 * sum(p.numel() for p in model.parameters())


class Recorder(TorchDispatchMode):
    """Counts each (collective, bytes of its largest tensor), DDP's buckets included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            sizes = (x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
            self.seen[function._schema.name.split("::")[1], max(sizes)] += 1
        return function(*args, **(kwargs or {}))


def record_a_step(rank: int, world_size: int, folder: str) -> dict[str, dict]:
    """Return the collectives of a rank's second step: in the first one ranks also exchange their shapes."""
    seen = {}
    for case, overrides in CASES.items():
        config = small_config(Path(folder), *overrides)
        place = Place(rank, world_size, CPU)
        _, network, optimizer, method = build(config, place, CLASSES, range(1, CLASSES + 1))
        batch = batch_of(config, LABELED, IMAGES, seed=rank)
        train_step(network, optimizer, batch, 0.1, method)
        with Recorder() as recorder:
            train_step(network, optimizer, batch, 0.1, method)
        seen[case] = dict(recorder.seen)
    return seen


@pytest.mark.slow
def test_step_sends_what_the_document_says(tmp_path):
    for seen in run_ranks(record_a_step, RANKS, str(tmp_path)):
        for case, overrides in CASES.items():
            wanted, gradients = documented(small_config(tmp_path, *overrides))
            left = Counter(seen[case])
            left.subtract(wanted)
            assert min(left.values()) >= 0, (case, left)
            buckets = {size: calls for (name, size), calls in left.items() if calls and name == REDUCE}
            assert left.total() == sum(buckets.values()), (case, left)
            assert sum(size * calls for size, calls in buckets.items()) == gradients, case
