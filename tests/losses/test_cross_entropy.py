"""Cross-entropy is torch's mean, and ignores no class number."""

import pytest
import torch

from fastsuncet import cross_entropy
from tests.support.dense_losses import gradient, labeled_batch


def test_cross_entropy_is_torchs_mean():
    logits, labels = labeled_batch(rows=12, width=7, dtype=torch.float32)
    loss, grad = gradient(cross_entropy, logits, labels.int())
    true_loss, true_grad = gradient(torch.nn.functional.cross_entropy, logits.double(), labels)
    assert loss.item() == pytest.approx(true_loss.item(), rel=3e-6)
    assert (grad - true_grad).norm() < 3e-6 * true_grad.norm()


def test_cross_entropy_does_not_ignore_a_class_number():
    with pytest.raises(IndexError):
        cross_entropy(torch.zeros(4, 3), torch.full((4,), -100))
