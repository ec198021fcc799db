"""Which parameters LARS scales and decays."""

from typing import Any

from torch import nn


def parameter_groups(model: nn.Module, *, exclude_bias_and_norm: bool = False) -> list[dict[str, Any]]:
    """Return the trainable parameters of `model` as groups for `LARS`, in the model's order.

    False: one group, everything scaled and decayed, also BatchNorm and biases: the paper's runs (recipe
    4.1, V0). True: parameters of one dimension, which are biases and those of normalization layers, become plain
    SGD without weight decay, as in SimCLR and the authors' later code. Theirs matches the names "bn" and "bias"
    and so misses the four shortcut BatchNorms of a ResNet-50, whose gammas are called
    `layer1.0.downsample.1.weight`.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    least = 2 if exclude_bias_and_norm else 0  # dimensions
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= least]},
        {"params": [p for p in trainable if p.ndim < least], "lars": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
