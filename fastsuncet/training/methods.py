"""The methods: what a step learns from its unlabeled images plus what it learns from its labeled ones.

    criterion.instance                               criterion.supervision
      nt_xent  SimCLR (equation 1)                     suncet         SuNCEt (equation 2)
      swav     clusters (section 5, Table 3)           cross_entropy  a linear classifier on h (section 4.1, App. F)
      none     labels alone (appendix H)               sup_con        L_sup_out (appendix H)

Each is a function of the network's outputs; the equations are in `fastsuncet.losses`, one file each.
"""

from collections.abc import Callable

from torch import Tensor

from fastsuncet import losses
from fastsuncet.config import Config
from fastsuncet.losses.tf32 import products
from fastsuncet.training.multi_view_model import Outputs

INSTANCES = {"nt_xent": "SimCLR", "swav": "SwAV", "none": ""}
SUPERVISIONS = {"suncet": "SuNCEt", "cross_entropy": "cross-entropy", "sup_con": "L_sup_out"}


def instance_loss(config: Config) -> Callable[[Outputs], Tensor]:
    """The loss on unlabeled images that `config` names: a scalar, this rank's share of the mean over all."""
    c, s = config.criterion, config.swav

    def nt_xent(out: Outputs) -> Tensor:
        with products(tf32(config)):
            return losses.nt_xent(out.views, c.temperature, keys=c.keys, chunk_size=c.chunk_size)

    def swav(out: Outputs) -> Tensor:
        return losses.swav(
            out.scores, c.temperature, crops=2 + s.small_crops, epsilon=s.epsilon, iterations=s.iterations
        )

    def none(out: Outputs) -> Tensor:
        return out.views.new_zeros((), dtype=out.labeled.dtype)

    return {"nt_xent": nt_xent, "swav": swav, "none": none}[c.instance]


def supervised_loss(config: Config) -> Callable[[Outputs, Tensor], Tensor]:
    """The loss on labeled images that `config` names, 0 where there is none; takes labels (S,) beside the outputs."""
    c = config.criterion

    def suncet(out: Outputs, labels: Tensor) -> Tensor:
        with products(tf32(config)):
            return losses.suncet(
                out.labeled, labels, c.temperature, keys=c.keys, average=c.average, chunk_size=c.chunk_size
            )

    def sup_con(out: Outputs, labels: Tensor) -> Tensor:
        with products(tf32(config)):
            return losses.sup_con(
                out.labeled, labels, c.temperature, keys=c.keys, average=c.average, chunk_size=c.chunk_size
            )

    def cross_entropy(out: Outputs, labels: Tensor) -> Tensor:
        if out.logits is None:  # SimCLR: supervision is never on, so there is no classifier
            return out.labeled.sum() * 0
        return losses.cross_entropy(out.logits, labels)

    return {"suncet": suncet, "sup_con": sup_con, "cross_entropy": cross_entropy}[c.supervision]


def tf32(config: Config) -> bool:
    """Whether the contrastive losses' products run in TF32 on a GPU: never behind a float32 network."""
    return config.criterion.products == "tf32" and config.meta.precision != "fp32"


def has_classifier(config: Config) -> bool:
    """Whether the method trains a linear classifier beside the head."""
    return config.criterion.supervised and config.criterion.supervision == "cross_entropy"


def terms(config: Config) -> tuple[str, str]:
    """The names of the two losses in every tensor, line and file; "none" is one that is not there."""
    return config.criterion.instance, config.criterion.supervision


def name(config: Config) -> str:
    """The method as the paper writes it: "SimCLR + SuNCEt"."""
    parts = [INSTANCES[config.criterion.instance]]
    if config.criterion.supervised:
        parts.append(SUPERVISIONS[config.criterion.supervision])
    return " + ".join(part for part in parts if part)
