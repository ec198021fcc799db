"""Costs against published totals and recorded numbers, and the memory estimate against what autograd keeps."""

import pytest
import torch

from fastsuncet.models.flops import classifier_macs, memory_estimate, network_cost
from fastsuncet.models.resnet import build_model

PAPER_HEAD = (2048, 128)

# Counted by hand, layer by layer: the metrics and checkpoints of all versions must agree on them.
# (name, stem, size, hidden, output): MACs, MACs of the encoder
RECORDED = {
    ("resnet50", "imagenet", 224, 2048, 128): (4_091_592_704, 4_087_136_256),
    ("resnet50", "cifar", 32, 2048, 128): (1_302_265_856, 1_297_809_408),
    ("resnet34", "cifar", 32, 2048, 128): (1_160_708_096, 1_159_397_376),
    ("resnet18", "cifar", 32, 2048, 128): (556_728_320, 555_417_600),
    ("resnet_tiny", "cifar", 16, 32, 16): (3_127_808, 3_125_248),
}


@pytest.mark.slow
@pytest.mark.parametrize("network", RECORDED, ids=str)
def test_network_cost_is_the_recorded_number(network):
    cost = network_cost(*network)
    assert (cost.macs, cost.encoder_macs) == RECORDED[network]
    assert classifier_macs(*network[:3], width=64, classes=10) == cost.encoder_macs + 640


def bytes_kept_for_backward(network, images, dtype):
    """Return what autograd saves in a forward pass: shared storages once, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The tensor is held, so that no address is used twice.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
    ):
        network(images)
    return sum(size for size, _ in kept.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stem", "size", "head_batchnorm", "dtype"),
    [
        ("resnet50", "imagenet", 45, False, None),
        ("resnet18", "cifar", 16, True, None),
        ("resnet_tiny", "cifar", 15, "all", None),
        ("resnet18", "cifar", 16, False, torch.bfloat16),
    ],
)
def test_memory_estimate_is_what_autograd_keeps(name, stem, size, head_batchnorm, dtype):
    """To the byte, in float32 and under autocast."""
    network = build_model(name, stem=stem, head_batchnorm=head_batchnorm)
    images = torch.randn(2, 3, size, size)
    options = {"views": 2, "precision": "bf16" if dtype else "fp32"}
    estimate = memory_estimate(name, stem, size, *PAPER_HEAD, head_batchnorm, **options)
    # Mean and deviation of each channel are not in the estimate: they do not grow with the batch.
    norms = (m for m in network.modules() if isinstance(m, (torch.nn.BatchNorm2d, torch.nn.BatchNorm1d)))
    deviations = 4 * sum(p.numel() for norm in norms for p in norm.parameters())
    copies = estimate.weights - 3 * 4 * sum(p.numel() for p in network.parameters())
    kept = estimate.activations + copies + deviations
    if dtype is not None:  # images and biases are cast too, but backward does not need them
        kept -= images.nbytes + 2 * sum(PAPER_HEAD)
    assert bytes_kept_for_backward(network, images, dtype) == kept
    assert dtype is not None or copies == 0
