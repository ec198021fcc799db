"""Every collective of a training step and its bytes, from the config alone.

    W  ranks        U, S  unlabeled and labeled images of a rank        D  width of a projection
    P  parameters        C  channels of a BatchNorm layer        K  prototypes

    BatchNorm, forward       all-reduce      8 (1 + 2 C) bytes, once a layer and pass; float64
    rows, forward            all-gather      4 D (2 U) and 4 D S of each rank; 8 S of labels
    codes, forward           all-gather      4 (2 K) of each rank, once an iteration of Sinkhorn's (SwAV)
    rows, backward           reduce-scatter  4 D W (2 U) and 4 D W S: the gradient of the keys of all ranks' anchors
    BatchNorm, backward      all-reduce      4 (2 C), once a layer and pass
    weights, backward        all-reduce      4 P, in buckets

SwAV's small crops are a second pass through the encoder, so each of its BatchNorms sends twice. SwAV and cross-entropy
gather no rows: prototypes and classifier are on every rank. A BatchNorm of one rank sends nothing, and DDP sends no
buffers.

`tests/tools/test_scaling_model.py` compares this with the collectives of real steps over 2, 4 and 8 ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.config import Config
from fastsuncet.models.resnet import build_model
from fastsuncet.training.methods import has_classifier

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
    swav, classifier = c.instance == "swav", has_classifier(config)
    network = build_model(
        m.name,
        m.library,
        m.stem,
        m.hidden,
        m.output,
        m.head_batchnorm,
        classes=classes if classifier else None,
        prototypes=config.swav.prototypes if swav else None,
        device="meta",
    )
    passes = 2 if swav and config.swav.small_crops else 1
    norms = []
    for part in (*[network.encoder] * passes, network.head) if m.sync_batchnorm else ():
        norms += [module.num_features for module in part.modules() if isinstance(module, _BatchNorm)]
    found = [
        Message("BatchNorm, statistics", "all_reduce", DOUBLE * (1 + 2 * channels)) for channels in norms
    ]

    def add_shape(what: str) -> None:
        # On a GPU each shape is compared once in a run, not at every step.
        if device == "cpu":
            found.append(Message(f"shape of the {what}", "all_gather", ranks * 2 * INTEGER))

    if swav:
        add_shape("scores")
        size = ranks * FLOAT * CODE_CROPS * config.swav.prototypes
        found.append(Message("codes, Sinkhorn's sums", "all_gather", size, config.swav.iterations))
    if classifier:
        add_shape("logits")
    gathered = gathered_rows(config, images, labeled)
    for what, rows in gathered.items():
        add_shape(what)
        if what == "labeled images":
            found.append(Message("labels", "all_gather", ranks * INTEGER * rows))
        found.append(Message(f"rows of the {what}", "all_gather", ranks * FLOAT * rows * m.output))
    if c.keys == "attached":
        # gloo has no reduce-scatter.
        back = "all_reduce" if device == "cpu" else "reduce_scatter"
        for what, rows in reversed(gathered.items()):
            found.append(Message(f"gradient of the {what} as keys", back, ranks * FLOAT * rows * m.output))
    found += [Message("BatchNorm, gradients", "all_reduce", FLOAT * 2 * channels) for channels in norms]
    weights = FLOAT * sum(p.numel() for p in network.parameters())
    return [*(x for x in found if x.bytes), Message("gradients of the weights", "all_reduce", weights)]


def gathered_rows(config: Config, images: int, labeled: int) -> dict[str, int]:
    """Return the rows of a rank, 0 if there are none, for each loss that compares rows of all ranks."""
    c = config.criterion
    found = {"views": 2 * images} if c.instance == "nt_xent" else {}
    if c.supervision != "cross_entropy":
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
