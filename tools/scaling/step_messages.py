"""What a training step says to other ranks: every collective and its bytes, from the config alone.

    W  ranks        U, S  unlabeled and labeled images of a rank        D  width of a projection
    P  parameters        C  channels of a BatchNorm layer        K  prototypes

    BatchNorm, forward       all-reduce      8 (1 + 2 C) bytes, once a layer and pass; float64
    rows, forward            all-gather      4 D (2 U) and 4 D S of each rank; 8 S of labels
    codes, forward           all-gather      4 (2 K) of each rank, once an iteration of Sinkhorn's (SwAV)
    rows, backward           reduce-scatter  4 D W (2 U) and 4 D W S: what all ranks' anchors ask of their keys
    BatchNorm, backward      all-reduce      4 (2 C), once a layer and pass
    weights, backward        all-reduce      4 P, in buckets

SwAV's small crops go through the encoder in a pass of their own, so each of its BatchNorms speaks twice. SwAV and
cross-entropy gather no rows: prototypes and classifier are on every rank. Where BatchNorm is each rank's own it says
nothing, and DDP sends no buffers.

`tests/tools/test_scaling_model.py` counts them over 2, 4 and 8 ranks: they are these, to the byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.nn.modules.batchnorm import _BatchNorm

from fastsuncet.config import Config
from fastsuncet.models.resnet import Model, build_model
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
        """Bytes this rank puts on the wire in all calls, with rings."""
        times = 2 if self.collective == "all_reduce" else 1
        return self.calls * times * (ranks - 1) / ranks * self.bytes


def messages(
    config: Config, ranks: int, images: int, labeled: int, device: str = "cuda", classes: int = 1000
) -> list[Message]:
    """What one step of `config` says, in order of the step. `device` "cpu" adds what gloo makes necessary.

    `classes` of the data set: cross-entropy has a classifier for them, and its gradient travels.
    """
    if ranks == 1:
        return []
    c, m = config.criterion, config.model
    model = build_model(
        m.name,
        m.library,
        m.stem,
        m.hidden,
        m.output,
        m.head_batchnorm,
        classes=classes if has_classifier(config) else None,
        prototypes=config.swav.prototypes if c.instance == "swav" else None,
        device="meta",
    )
    norms = passes_of_norms(config, model)
    said = [Message("BatchNorm, statistics", "all_reduce", DOUBLE * (1 + 2 * channels)) for channels in norms]

    def shape(what: str) -> None:
        if device == "cpu":  # on a GPU each shape is compared once in a run, not at every step
            said.append(Message(f"shape of the {what}", "all_gather", ranks * 2 * INTEGER))

    if c.instance == "swav":
        shape("scores")
        size = ranks * FLOAT * CODE_CROPS * config.swav.prototypes
        said.append(Message("codes, Sinkhorn's sums", "all_gather", size, config.swav.iterations))
    if has_classifier(config):
        shape("logits")
    gathered = contrasted(config, images, labeled)
    for what, rows in gathered:
        shape(what)
        if what == "labeled images":
            said.append(Message("labels", "all_gather", ranks * INTEGER * rows))
        said.append(Message(f"rows of the {what}", "all_gather", ranks * FLOAT * rows * m.output))
    if c.keys == "attached":
        back = "all_reduce" if device == "cpu" else "reduce_scatter"  # gloo has no reduce-scatter
        said += [
            Message(f"gradient of the {what} as keys", back, ranks * FLOAT * rows * m.output)
            for what, rows in reversed(gathered)
        ]
    said += [Message("BatchNorm, gradients", "all_reduce", FLOAT * 2 * channels) for channels in norms]
    weights = FLOAT * sum(p.numel() for p in model.parameters())
    return [*(x for x in said if x.bytes), Message("gradients of the weights", "all_reduce", weights)]


def passes_of_norms(config: Config, model: Model) -> list[int]:
    """Return the channels of every BatchNorm that all ranks share, once for each pass of a step through it."""
    if not config.model.sync_batchnorm:
        return []
    encoder, head = (
        [m.num_features for m in part.modules() if isinstance(m, _BatchNorm)]
        for part in (model.encoder, model.head)
    )
    passes = 2 if config.criterion.instance == "swav" and config.swav.small_crops else 1
    return passes * encoder + head


def contrasted(config: Config, images: int, labeled: int) -> list[tuple[str, int]]:
    """(what, rows of a rank) of each loss that compares rows of all ranks with each other; 0 rows if none are there."""
    c = config.criterion
    views = [("views", 2 * images)] if c.instance == "nt_xent" else []
    labels = [("labeled images", labeled * c.supervised)] if c.supervision != "cross_entropy" else []
    return views + labels


def summed(said: Sequence[Message]) -> list[Message]:
    """Messages of one name as one: their bytes together, one after the other."""
    names = dict.fromkeys((x.what, x.collective) for x in said)
    groups = [[x for x in said if (x.what, x.collective) == name] for name in names]
    return [Message(*name, sum(x.bytes * x.calls for x in group), 1) for name, group in zip(names, groups)]
