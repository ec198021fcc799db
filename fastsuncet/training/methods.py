"""The methods: a loss on the unlabeled images plus a loss on the labeled ones.

    criterion.instance                               criterion.supervision
      nt_xent  SimCLR (equation 1)                     suncet         SuNCEt (equation 2)
      swav     clusters (section 5, Table 3)           cross_entropy  a linear classifier on h (section 4.1, App. F)
      paws     labeled images (arXiv 2104.13963)       sup_con        L_sup_out (appendix H)
      none     labels alone (appendix H)               none           only with paws, which has the labels

Each is a function of the network's outputs (`Outputs` of multi_view_model.py), which passes the config's settings to a
loss. The equations are in `fastsuncet.losses`, one file each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from fastsuncet.config import Config
from fastsuncet.training.multi_view_model import Outputs

Loss = Callable[[Outputs, Tensor], Tensor]


def loss_of(name: str) -> Callable:
    """Return the function of that name in its file in `fastsuncet/losses`. A run imports those of its own method."""
    return getattr(import_module(f"fastsuncet.losses.{name}"), name)


def nt_xent(config: Config, out: Outputs, *_: object) -> Tensor:
    """Contrast the two views of each unlabeled image with all others."""
    c = config.criterion
    with tf32_products(tf32(config)):
        return loss_of("nt_xent")(out.projections, c.temperature, keys=c.keys, chunk_size=c.chunk_size)


def swav(config: Config, out: Outputs, *_: object) -> Tensor:
    """Predict the clusters of each unlabeled image's other views."""
    assert out.scores is not None  # build() gives the model of this method prototypes
    s, temperature = config.swav, config.criterion.temperature
    options = {"epsilon": s.epsilon, "iterations": s.iterations}
    return loss_of("swav")(out.scores, temperature, crops=2 + s.small_crops, **options)


def paws(config: Config, out: Outputs, labels: Tensor, per_class: Tensor | None) -> Tensor:
    """Predict the class of each unlabeled image's other views, which the labeled images near them give."""
    assert out.predictions is not None  # build() gives the model of this method a predictor
    p, views = config.paws, 2 + config.swav.small_crops
    first, second = out.projections.chunk(views)[:2]
    anchors, supports = out.predictions.split([len(out.projections), len(labels)])
    prior = None
    if p.prior == "labels":
        assert per_class is not None
        prior = per_class[labels]
    cross_entropy, me_max = loss_of("paws")(
        anchors,
        supports,
        labels,
        torch.cat([second, first]),  # each predicts the other
        out.labeled,
        views=views,
        temperature=config.criterion.temperature,
        sharpen=p.sharpen,
        smoothing=p.smoothing,
        prior=prior,
        # An image that stands in for a bad one can be of a class of its own.
        classes=None if config.data.bad_images else config.criterion.classes_per_batch,
    )
    return cross_entropy + me_max if p.me_max else cross_entropy


def contrast_labels(name: str, config: Config, out: Outputs, labels: Tensor, *_: object) -> Tensor:
    """Contrast the labeled images with each other, by the loss of that name."""
    c = config.criterion
    options = {"keys": c.keys, "average": c.average, "chunk_size": c.chunk_size}
    with tf32_products(tf32(config)):
        return loss_of(name)(out.labeled, labels, c.temperature, **options)


def cross_entropy(config: Config, out: Outputs, labels: Tensor, *_: object) -> Tensor:
    """Classify the labeled images."""
    if out.logits is None:  # SimCLR: supervision is never on, so there is no classifier
        return out.labeled.sum() * 0
    return loss_of("cross_entropy")(out.logits, labels)


def none(config: Config, out: Outputs, *_: object) -> Tensor:
    """Return 0."""
    # The sum of no rows: with labels alone and cross-entropy no other loss uses the head, and DDP waits for it.
    return out.projections[:0].sum()


class Term(NamedTuple):
    """A loss: its name in the paper, and its value from config, outputs, labels (S,) and `per_class`."""

    title: str
    loss: Callable[[Config, Outputs, Tensor, Tensor | None], Tensor]


# The values of criterion.instance and criterion.supervision.
TERMS = {
    "nt_xent": Term("SimCLR", nt_xent),
    "swav": Term("SwAV", swav),
    "paws": Term("PAWS", paws),
    "suncet": Term("SuNCEt", partial(contrast_labels, "suncet")),
    "sup_con": Term("L_sup_out", partial(contrast_labels, "sup_con")),
    "cross_entropy": Term("cross-entropy", cross_entropy),
    "none": Term("", none),
}


def losses(config: Config, per_class: Tensor | None = None) -> tuple[Loss, Loss]:
    """Return the config's losses on unlabeled and on labeled images: scalars, this rank's share of a mean.

    `per_class` (C,), floating and on the device, counts the labeled images of each class of the data set; PAWS reads it
    with `paws.prior: labels`.
    """
    terms = TERMS[config.criterion.instance].loss, TERMS[config.criterion.supervision].loss
    instance, supervised = (
        lambda out, labels, loss=loss: loss(config, out, labels, per_class) for loss in terms
    )
    return instance, supervised


def loss_inputs(out: Outputs) -> tuple[Tensor, Tensor]:
    """Return what each of the two losses alone reads: z, SwAV's scores, PAWS's predictions, or logits."""
    candidates = (out.scores, out.predictions, out.projections), (out.logits, out.labeled)
    instance, supervised = (next(x for x in each if x is not None) for each in candidates)
    return instance, supervised


def tf32(config: Config) -> bool:
    """Whether the contrastive losses' products run in TF32 on a GPU: never after a float32 network."""
    return config.criterion.products == "tf32" and config.meta.precision != "fp32"


@contextmanager
def tf32_products(allowed: bool) -> Iterator[None]:
    """Allow or forbid CUDA to cut the factors of float32 products to TF32's 10 bits, for which it has tensor cores.

    For losses behind a 16-bit network, whose projections have bfloat16's 7 bits. torch's switch is restored.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def has_classifier(config: Config) -> bool:
    """Whether the method trains a linear classifier on h."""
    return config.criterion.supervised and config.criterion.supervision == "cross_entropy"


def terms(config: Config) -> tuple[str, str]:
    """Return the names of the two losses in every tensor, line and file; "none" for one that the method has not."""
    c = config.criterion
    return c.instance, c.supervision if c.supervised else "none"


def name(config: Config) -> str:
    """Return the method as the paper writes it: "SimCLR + SuNCEt", or "labels alone, SuNCEt"."""
    titles = " + ".join(TERMS[term].title for term in terms(config) if term != "none")
    return f"labels alone, {titles}" if config.criterion.instance == "none" else titles
