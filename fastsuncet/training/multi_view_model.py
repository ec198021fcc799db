"""One pass of the network over all images of a step. DDP and torch.compile wrap it; a checkpoint holds the model alone.

U  unlabeled images of this rank        S  labeled ones        D  width of a projection        E  of a representation
V  views of each unlabeled image        C  classes             K  prototypes
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastsuncet.losses.swav import prototype_scores
from fastsuncet.models.resnet import Model


class Outputs(NamedTuple):
    """The inputs of the losses for one batch."""

    views: Tensor  # (V U, D) projections, view by view
    labeled: Tensor  # (S, D) projections
    logits: Tensor | None  # (S, C) of the classifier, where the method has one
    scores: Tensor | None  # (V U, K) cosines of the views to the prototypes, where the method has them


class MultiViewModel(nn.Module):
    """A model that sees all images of a step together, so that they share BatchNorm's statistics (paper, Listing 1)."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, views: Sequence[Tensor], labeled: Tensor) -> Outputs:
        """Return the losses' inputs for views, each (U, 3, H, W), and labeled images (S, 3, H, W).

        One encoder pass per resolution: the first two views are as large as the labeled images and go with them,
        SwAV's small crops follow. S = 0 once supervision is switched off.
        """
        model = self.model
        large, small = [*views[:2], labeled], list(views[2:])
        # An empty tensor has no memory layout: in a cat it would turn a channels-last batch back.
        h = model.encoder(torch.cat([images for images in large if len(images)] or large))
        unlabeled = sum(map(len, views[:2]))
        if small:
            h = torch.cat([h[:unlabeled], model.encoder(torch.cat(small)), h[unlabeled:]])
            unlabeled = sum(map(len, views))
        z = model.head(h)  # (V U + S, D)
        logits = scores = None
        if model.classifier is not None:
            # Without rows once supervision is off, but still used: DDP waits for every gradient.
            logits = model.classifier(h[unlabeled:])
        if model.prototypes is not None:
            scores = prototype_scores(z[:unlabeled], model.prototypes.weight)
        return Outputs(z[:unlabeled], z[unlabeled:], logits, scores)
