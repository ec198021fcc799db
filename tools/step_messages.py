"""What a training step says to other ranks: every collective and its bytes, from the config alone.

    W  ranks        U, S  unlabeled and labeled images of a rank        D  width of a projection
    P  parameters        C  channels of a BatchNorm layer

    BatchNorm, forward       all-gather      4 (1 + 2 C) bytes of each rank, once a layer
    rows, forward            all-gather      4 D (2 U) and 4 D S of each rank; 8 S of labels
    rows, backward           reduce-scatter  4 D W (2 U) and 4 D W S: what all ranks' anchors ask of their keys
    BatchNorm, backward      all-reduce      4 (2 C), once a layer
    weights, backward        all-reduce      4 P, in buckets

`tests/test_scaling_model.py` counts them over 2, 4 and 8 ranks: they are these, to the byte.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastsuncet.compute import layers
from fastsuncet.config import Config

FLOAT, INTEGER = (
    4,
    8,
)  # bytes: rows, statistics and gradients are float32 in every precision; labels are int64


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


def messages(config: Config, ranks: int, images: int, labeled: int, device: str = "cuda") -> list[Message]:
    """What one step of `config` says, in order of the step. `device` "cpu" adds what gloo makes necessary.

    Raises ConfigErrors for what is not modelled: SwAV, whose codes need sums over ranks; cross-entropy, whose
    classifier has gradients of its own; BatchNorm whose statistics are not shared.
    """
    c, m = config.criterion, config.model
    if c.instance == "swav":
        raise config.error("criterion.instance", "swav is not modelled; nt_xent and none are")
    if c.supervised and c.supervision == "cross_entropy":
        raise config.error("criterion.supervision", "cross_entropy is not modelled; suncet and sup_con are")
    if not m.sync_batchnorm:
        raise config.error(
            "model.sync_batchnorm", "false is not modelled: DDP then sends all buffers at every step"
        )
    if ranks == 1:
        return []
    walk = layers(
        m.name, m.stem, config.data.augmentation.size, m.hidden, m.output, head_batchnorm=m.head_batchnorm
    )
    norms = [layer.parameters // 2 for layer in walk if "bn" in layer.name or "downsample.1" in layer.name]
    if m.head_batchnorm:
        norms.append(m.hidden)
    views = 2 * images if c.instance == "nt_xent" else 0
    contrasted = labeled if c.supervised else 0
    said = [
        Message("BatchNorm, statistics", "all_gather", ranks * FLOAT * (1 + 2 * channels))
        for channels in norms
    ]
    gathered = [("views", views), ("labeled images", contrasted)]
    for what, rows in gathered:
        if device == "cpu":  # on a GPU each shape is compared once in a run, not at every step
            said.append(Message(f"shape of the {what}", "all_gather", ranks * 2 * INTEGER))
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
    return [
        *(x for x in said if x.bytes),
        Message("gradients of the weights", "all_reduce", gradient_bytes(walk)),
    ]


def gradient_bytes(walk: Sequence[Any]) -> int:
    """Of all parameters of encoder and head."""
    return FLOAT * sum(layer.parameters for layer in walk)


def summed(said: Sequence[Message]) -> list[Message]:
    """Messages of one name as one: their bytes together, one after the other."""
    names = dict.fromkeys((x.what, x.collective) for x in said)
    groups = [[x for x in said if (x.what, x.collective) == name] for name in names]
    return [Message(*name, sum(x.bytes for x in group), 1) for name, group in zip(names, groups)]
