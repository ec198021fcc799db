"""One pass of the network over all images of a step. DDP and torch.compile wrap it; a checkpoint holds the model alone.

U  unlabeled images of this rank        S  labeled ones        D  width of a projection        E  of a representation
V  views of each unlabeled image        C  classes             K  prototypes
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from fastsuncet.config.arithmetic import piece_sizes
from fastsuncet.models.resnet import Model


class Outputs(NamedTuple):
    """The inputs of the losses for one batch."""

    projections: Tensor  # (V U, D), of the views, view by view
    labeled: Tensor  # (S, D) projections
    logits: Tensor | None  # (S, C) of the classifier, where the method has one
    scores: Tensor | None  # (V U, K) cosines of the views to the prototypes, where the method has them
    predictions: Tensor | None = None  # (V U + S, D) of views, then labeled images, where the method predicts


class MultiViewModel(nn.Module):
    """A model that sees all images of a step together, so that they share BatchNorm's statistics (paper, Listing 1)."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, views: Sequence[Tensor], labeled: Tensor) -> Outputs:
        """Return the losses' inputs for views, each (U, 3, H, W), and labeled images (S, 3, H, W).

        One encoder pass per resolution: the first two views go with the labeled images, small crops follow.
        """
        model = self.model
        large, small = [*views[:2], labeled], list(views[2:])
        unlabeled, shown = sum(map(len, views)), sum(map(len, views[:2]))

        def join(parts: list[Tensor]) -> Tensor:
            """Return (V U + S, ...): views, large before small, then labeled images."""
            return torch.cat([parts[0][:shown], *parts[1:], parts[0][shown:]]) if small else parts[0]

        # An empty tensor has no memory layout: in a cat it would turn a channels-last batch back.
        h = [model.encoder(torch.cat([images for images in large if len(images)] or large))]
        if small:
            h.append(model.encoder(torch.cat(small)))
        logits = scores = predictions = None
        if model.predictor is None:
            z = model.head(join(h))
        else:
            # PAWS's heads see one resolution at a time, which counts for their BatchNorm; SwAV's sees all.
            projected = [model.head(rows) for rows in h]
            z = join(projected)
            # A slice, because an identity would return z, whose gradient is that of the other loss too.
            predictions = join([model.predictor(rows) for rows in projected])[:]
        if model.classifier is not None:
            # Without rows once supervision is off, but still used: DDP waits for every gradient.
            logits = model.classifier(h[0][shown:])
        if model.prototypes is not None:
            from fastsuncet.losses.swav import prototype_scores

            scores = prototype_scores(z[:unlabeled], model.prototypes.weight)
        return Outputs(z[:unlabeled], z[unlabeled:], logits, scores, predictions)


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Leave the running statistics of `model` as they are. In training mode its outputs keep their bits."""
    # Not by `track_running_stats`: torch's BatchNorm would save fewer tensors, which a recomputation refuses.
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, before):
            norm.momentum, norm.num_batches_tracked = momentum, batches


class PiecewiseModel(MultiViewModel):
    """The same pass in pieces that keep no activations: the memory of one piece (GradCache, arXiv 2101.06983).

    The losses see all outputs. Their backward pass recomputes one piece after the other, from the last to the first, so
    a gradient is that of the whole batch. BatchNorm normalizes each piece by its own statistics, the same in both
    passes; synchronized, by those of the n-th pieces of all ranks. A piece holds the same share of the unlabeled
    images, each with all its views, and of the labeled ones, whose order mixes the classes.
    """

    def __init__(self, model: Model, most: int):  # views at a time on this rank
        super().__init__(model)
        self.most = most

    def forward(self, views: Sequence[Tensor], labeled: Tensor) -> Outputs:
        count = len(views)
        sizes = piece_sizes(len(views[0]) if views else 0, len(labeled), count, self.most)
        if len(sizes) == 1:
            return super().forward(views, labeled)
        unlabeled, with_label = map(list, zip(*sizes))
        shown = zip(*(view.split(unlabeled) for view in views)) if views else [()] * len(sizes)

        def run(*piece: Any) -> Outputs:
            frozen = (nullcontext(), frozen_statistics(self))
            return checkpoint(
                super(PiecewiseModel, self).forward,
                *piece,
                use_reentrant=False,
                preserve_rng_state=False,  # the network draws no random number
                context_fn=lambda: frozen,
            )

        def by_view(pieces: Sequence[Tensor]) -> Tensor:
            """Return (V U, ...) view by view, of pieces that are so."""
            parts = [x.unflatten(0, (count or 1, size)) for x, size in zip(pieces, unlabeled)]
            return torch.cat(parts, dim=1).flatten(0, 1)

        z, z_labeled, logits, scores, predictions = zip(*map(run, shown, labeled.split(with_label)))
        predicted = None
        if self.model.predictor is not None:
            parts = [p.split([len(p) - labels, labels]) for p, labels in zip(predictions, with_label)]
            of_views, of_labeled = zip(*parts)
            predicted = torch.cat([by_view(of_views), *of_labeled])
        return Outputs(
            by_view(z),
            torch.cat(z_labeled),
            torch.cat(logits) if self.model.classifier is not None else None,
            by_view(scores) if self.model.prototypes is not None else None,
            predicted,
        )
