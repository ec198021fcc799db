"""The methods: a loss on the unlabeled images plus a loss on the labeled ones.

    criterion.instance                               criterion.supervision
      nt_xent  SimCLR (equation 1)                     suncet         SuNCEt (equation 2)
      swav     clusters (section 5, Table 3)           cross_entropy  a linear classifier on h (section 4.1, App. F)
      paws     labeled images (arXiv 2104.13963)       sup_con        L_sup_out (appendix H)
      none     labels alone (appendix H)               none           only with paws, which has the labels

Each is a function of the network's outputs; the equations are in `fastsuncet.losses`, one file each. This module passes
`criterion.temperature` to them. It divides the rows in `losses/contrast.py`, or in `losses/contrast_symmetric.py` where
one CPU process has all rows.

To add a loss:
1. Write it in `fastsuncet/losses/` and export it there.
2. Add a function and its name below; `CriterionSection.contrasts_labels` says whether it contrasts labeled images.
3. Add the name to `criterion.instance` or `criterion.supervision` in `fastsuncet/config/schema.py`.
4. Add the name to `FIELDS` in `fastsuncet/metrics/progress_bar.py`.
5. Add a dense float64 twin to `tests/support/dense_losses.py`, and a row to `METHODS` in
   `tests/training/test_methods.py`, which fails while one of these is missing.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fastsuncet import losses
from fastsuncet.config import Config
from fastsuncet.losses.tf32 import products
from fastsuncet.training.multi_view_model import Outputs

INSTANCES = {"nt_xent": "SimCLR", "swav": "SwAV", "paws": "PAWS", "none": ""}
SUPERVISIONS = {"suncet": "SuNCEt", "cross_entropy": "cross-entropy", "sup_con": "L_sup_out", "none": ""}

Loss = Callable[[Outputs, Tensor], Tensor]


def instance_loss(config: Config, per_class: Tensor | None = None) -> Loss:
    """Return the config's loss on unlabeled images: a scalar, this rank's share of the mean over all images.

    It takes outputs and labels (S,). `per_class` (C,), floating and on the device, counts the labeled images of each
    class of the data set; PAWS reads it with `paws.prior: labels`.
    """
    c, s, p = config.criterion, config.swav, config.paws

    def nt_xent(out: Outputs, _: Tensor) -> Tensor:
        with products(tf32(config)):
            return losses.nt_xent(out.views, c.temperature, keys=c.keys, chunk_size=c.chunk_size)

    def swav(out: Outputs, _: Tensor) -> Tensor:
        assert out.scores is not None  # build() gives the model of this method prototypes
        return losses.swav(
            out.scores, c.temperature, crops=2 + s.small_crops, epsilon=s.epsilon, iterations=s.iterations
        )

    def paws(out: Outputs, labels: Tensor) -> Tensor:
        assert out.predictions is not None  # build() gives the model of this method a predictor
        views = 2 + s.small_crops
        first, second = out.views.chunk(views)[:2]
        anchors, supports = out.predictions.split([len(out.views), len(labels)])
        prior = None
        if p.prior == "labels":
            assert per_class is not None
            prior = per_class[labels]
        cross_entropy, me_max = losses.paws(
            anchors,
            supports,
            labels,
            torch.cat([second, first]),  # each predicts the other
            out.labeled,
            views=views,
            temperature=c.temperature,
            sharpen=p.sharpen,
            smoothing=p.smoothing,
            prior=prior,
        )
        return cross_entropy + me_max if p.me_max else cross_entropy

    def none(out: Outputs, _: Tensor) -> Tensor:
        return out.views.new_zeros((), dtype=out.labeled.dtype)

    return {"nt_xent": nt_xent, "swav": swav, "paws": paws, "none": none}[c.instance]


def supervised_loss(config: Config) -> Loss:
    """Return the config's loss on labeled images, 0 where there are none; it takes outputs and labels (S,)."""
    c = config.criterion

    def contrastive(loss: Callable[..., Tensor]) -> Loss:
        def contrast(out: Outputs, labels: Tensor) -> Tensor:
            options = {"keys": c.keys, "average": c.average, "chunk_size": c.chunk_size}
            with products(tf32(config)):
                return loss(out.labeled, labels, c.temperature, **options)

        return contrast

    def cross_entropy(out: Outputs, labels: Tensor) -> Tensor:
        if out.logits is None:  # SimCLR: supervision is never on, so there is no classifier
            return out.labeled.sum() * 0
        return losses.cross_entropy(out.logits, labels)

    def none(out: Outputs, _: Tensor) -> Tensor:
        return out.labeled.new_zeros(())

    return {
        "suncet": contrastive(losses.suncet),
        "sup_con": contrastive(losses.sup_con),
        "cross_entropy": cross_entropy,
        "none": none,
    }[c.supervision]


def loss_inputs(out: Outputs) -> tuple[Tensor, Tensor]:
    """Return what each of the two losses reads: projections z, SwAV's scores, PAWS's predictions, or logits.

    No loss reads the other's, so that the gradient of an input is that of one loss alone.
    """
    read = (x for x in (out.scores, out.predictions, out.views) if x is not None)
    return next(read), out.labeled if out.logits is None else out.logits


def tf32(config: Config) -> bool:
    """Whether the contrastive losses' products run in TF32 on a GPU: never after a float32 network."""
    return config.criterion.products == "tf32" and config.meta.precision != "fp32"


def has_classifier(config: Config) -> bool:
    """Whether the method trains a linear classifier on h."""
    return config.criterion.supervised and config.criterion.supervision == "cross_entropy"


def terms(config: Config) -> tuple[str, str]:
    """Return the names of the two losses in every tensor, line and file; "none" for one that the method has not."""
    c = config.criterion
    return c.instance, c.supervision if c.supervised else "none"


def name(config: Config) -> str:
    """Return the method as the paper writes it: "SimCLR + SuNCEt"."""
    parts = [INSTANCES[config.criterion.instance]]
    if config.criterion.supervised:
        parts.append(SUPERVISIONS[config.criterion.supervision])
    return " + ".join(part for part in parts if part)
