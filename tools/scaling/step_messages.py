"""Every collective of a training step and its bytes, from the config alone.

docs/scaling.md has the table of them, by the settings that change it.
`tests/tools/test_scaling_model.py` compares this with the collectives of real steps over 2 and 4 ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.config import Config
from fastsuncet.config.schema import ContrastsLabels
from fastsuncet.models.fused_batchnorm import FusedBlock, fuse
from fastsuncet.training.methods import has_classifier
from fastsuncet.training.step import build_model

# Bytes: rows, codes and gradients are float32 in every precision, BatchNorm's sums float64; labels are int64.
FLOAT, DOUBLE, INTEGER = 4, 8, 8
CODE_CROPS = 2  # views whose codes SwAV computes: the large ones


@dataclass(frozen=True)
class Message:
    """One collective of a step, `calls` times; `bytes` are those of the largest tensor of a call on this rank."""

    what: str
    collective: str  # "all_gather", "reduce_scatter" or "all_reduce"
    bytes: int  # of the joined rows of an all_gather, of the rows before a reduce_scatter, of an all_reduce's tensor
    calls: int = 1

    def sent(self, ranks: int) -> float:
        """Return the bytes that this rank sends in all calls, with rings."""
        times = 2 if self.collective == "all_reduce" else 1
        return self.calls * times * (ranks - 1) / ranks * self.bytes


def messages(
    config: Config, ranks: int, images: int, labeled: int, device: str = "cuda", classes: int = 1000
) -> list[Message]:
    """Return the messages of one step of `config`, in order. `device` "cpu" adds what gloo makes necessary.

    `classes`: of the data set; the gradient of cross-entropy's classifier depends on it.
    """
    if ranks == 1:
        return []
    c, m = config.criterion, config.model
    swav, paws, classifier = c.instance == "swav", c.instance == "paws", has_classifier(config)
    network = build_model(config, classes, device="meta")
    passes = 2 if (swav or paws) and config.swav.small_crops else 1
    heads = [network.head] if network.predictor is None else [network.head, network.predictor] * passes
    # "auto": on a GPU that proved the kernels.
    if m.fused_batchnorm is True or (m.fused_batchnorm == "auto" and device == "cuda"):
        network = fuse(network, shared=True)
    norms: list[tuple[int, ...]] = []
    for part in (*[network.encoder] * passes, *heads) if m.sync_batchnorm else ():
        norms += channels_of_messages(part)
    found = [
        Message("BatchNorm, statistics", "all_reduce", DOUBLE * sum(1 + 2 * c for c in layers))
        for layers in norms
    ]

    def add_shape(what: str) -> None:
        # On a GPU each shape is compared once in a run, not at every step.
        if device == "cpu":
            found.append(Message(f"shape of the {what}", "all_gather", ranks * 2 * INTEGER))

    if swav:
        add_shape("scores")
        size = ranks * FLOAT * CODE_CROPS * config.swav.prototypes
        found.append(Message("codes, Sinkhorn's sums", "all_gather", size, config.swav.iterations))
    if paws:
        add_shape("anchors")
        add_shape("supports")
        supports, labels = ranks * FLOAT * labeled * m.output, ranks * labeled
        found.append(Message("rows of the supports", "all_gather", supports, calls=2))
        found.append(Message("labels of the supports", "all_gather", INTEGER * labels))
        found.append(
            Message("rows of the mean predictions", "all_gather", ranks * FLOAT * c.classes_per_batch)
        )
        if config.paws.prior == "labels":
            found.append(Message("rows of the prior", "all_gather", FLOAT * labels))
    if classifier:
        add_shape("logits")
    gathered = gathered_rows(config, images, labeled)
    for what, rows in gathered.items():
        add_shape(what)
        if what == "labeled images":
            found.append(Message("labels", "all_gather", ranks * INTEGER * rows))
        found.append(Message(f"rows of the {what}", "all_gather", ranks * FLOAT * rows * m.output))
    # gloo has no reduce-scatter.
    back = "all_reduce" if device == "cpu" else "reduce_scatter"
    if paws:
        found.append(Message("gradient of the mean predictions", back, ranks * FLOAT * c.classes_per_batch))
        found.append(Message("gradient of the supports", back, ranks * FLOAT * labeled * m.output))
    if c.keys == "attached":
        for what, rows in reversed(gathered.items()):
            found.append(Message(f"gradient of the {what} as keys", back, ranks * FLOAT * rows * m.output))
    found += [Message("BatchNorm, gradients", "all_reduce", FLOAT * 2 * sum(layers)) for layers in norms]
    weights = FLOAT * sum(p.numel() for p in network.parameters())
    return [*(x for x in found if x.bytes), Message("gradients of the weights", "all_reduce", weights)]


def channels_of_messages(network: nn.Module) -> list[tuple[int, ...]]:
    """Return the channels of the BatchNorms of each message: of one layer, or of the two that end a fused block."""
    ends = [block.ends() for block in network.modules() if isinstance(block, FusedBlock)]
    shortcuts = {last: norm for last, norm in ends if norm is not None}
    alone = [
        norm for norm in network.modules() if isinstance(norm, _BatchNorm) and norm not in shortcuts.values()
    ]
    together = [(norm, shortcuts.get(norm)) for norm in alone]
    return [tuple(each.num_features for each in layers if each is not None) for layers in together]


def gathered_rows(config: Config, images: int, labeled: int) -> dict[str, int]:
    """Return the rows of a rank, 0 if there are none, for each loss that compares rows of all ranks."""
    c = config.criterion
    found = {"views": 2 * images} if c.instance == "nt_xent" else {}
    # Without labeled images the ranks still tell each other that they have none.
    if c.supervision in get_args(ContrastsLabels):
        found["labeled images"] = labeled if c.supervised else 0
    return found


def merged(found: Sequence[Message]) -> list[tuple[Message, int]]:
    """Return the messages of one name as one of all their bytes, with the number of calls."""
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in found:
        groups.setdefault((message.what, message.collective), []).append(message)
    return [
        (replace(group[0], bytes=sum(x.bytes * x.calls for x in group), calls=1), sum(x.calls for x in group))
        for group in groups.values()
    ]
