"""What a step asks of the network in one pass. DDP and torch.compile go around it; a checkpoint holds the model alone.

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
    """What the losses see of one batch."""

    views: Tensor  # (V U, D) projections, view by view
    labeled: Tensor  # (S, D) projections
    logits: Tensor | None  # (S, C) of the classifier, where the method has one
    scores: Tensor | None  # (V U, K) cosines of the views to the prototypes, where the method has them


class Learner(nn.Module):
    """A model, shown all images of a step together so that they share BatchNorm's statistics (paper, Listing 1)."""

    def __init__(self, model: Model):
        super().__init__()
        self.model = model

    def forward(self, views: Sequence[Tensor], labeled: Tensor) -> Outputs:
        """Views, each (U, 3, H, W), and labeled images (S, 3, H, W) to what the losses need.

        One pass through the encoder a resolution: the first two views are as large as the labeled images and go with
        them, SwAV's small crops follow. S = 0 once supervision is switched off.
        """
        model = self.model
        large, small = [*views[:2], labeled], list(views[2:])
        # No images are in no memory layout: joined with any, they would turn a channels-last batch back for good.
        h = model.encoder(torch.cat([images for images in large if len(images)] or large))
        unlabeled = sum(map(len, views[:2]))
        if small:
            h = torch.cat([h[:unlabeled], model.encoder(torch.cat(small)), h[unlabeled:]])
            unlabeled = sum(map(len, views))
        z = model.head(h)  # (V U + S, D)
        # A classifier sees no row once supervision is off, and is used all the same: DDP waits for every gradient.
        return Outputs(
            views=z[:unlabeled],
            labeled=z[unlabeled:],
            logits=model.classifier(h[unlabeled:]) if model.classifier is not None else None,
            scores=prototype_scores(z[:unlabeled], model.prototypes.weight)
            if model.prototypes is not None
            else None,
        )
