"""The arithmetic of cost: against published totals, against torch's own counters, and against itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from fastsuncet.models.flops import (
    SHAPES,
    analytic_macs,
    encoder_layers,
    equivalent_epochs,
    layers,
    memory_estimate,
    petaflops,
    run_samples,
)
from fastsuncet.models.resnet import build_model

IMAGENET_TRAIN = 1_281_167
PAPER_HEAD = (2048, 128)


@pytest.mark.parametrize(
    ("stem", "size", "giga"), [("imagenet", 224, 4.0871), ("imagenet", 96, 0.7507), ("cifar", 32, 1.2978)]
)
def test_the_walk_finds_the_published_multiply_adds_of_a_resnet50(stem, size, giga):
    encoder = sum(layer.macs for layer in encoder_layers("resnet50", stem, size))
    assert encoder / 1e9 == pytest.approx(giga, abs=5e-5)
    assert (analytic_macs("resnet50", stem, size, *PAPER_HEAD) - encoder) / 1e9 == pytest.approx(
        0.0045, abs=5e-5
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("size", [33, 64])
def test_the_walk_counts_what_torch_counts_on_the_real_network(name, stem, size):
    network = build_model(name, stem=stem, hidden=96, output=40, device="meta")
    with FlopCounterMode(display=False) as counter:
        network(torch.empty(2, 3, size, size, device="meta"))
    assert 2 * 2 * analytic_macs(name, stem, size, 96, 40) == counter.get_total_flops()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("stem", ["imagenet", "cifar"])
@pytest.mark.parametrize("head_batchnorm", [False, True])
def test_the_walk_counts_the_real_networks_parameters(name, stem, head_batchnorm):
    network = build_model(name, stem=stem, head_batchnorm=head_batchnorm, device="meta")
    walk = layers(name, stem, 32, *PAPER_HEAD, head_batchnorm)
    assert sum(layer.parameters for layer in walk) == sum(p.numel() for p in network.parameters())
    with_weights = {key.rpartition(".")[0].removeprefix("encoder.") for key, _ in network.named_parameters()}
    assert {layer.name for layer in walk if layer.parameters} == with_weights


def bytes_kept_for_backward(network, images, dtype=None):
    """What autograd really saves in a forward pass: shared storages once, parameters and buffers left out."""
    own = {t.untyped_storage().data_ptr() for t in (*network.parameters(), *network.buffers())}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=dtype, enabled=dtype is not None),
    ):
        network(images)
    return sum(size for size, _ in kept.values())


def parameter_bytes(network, *kinds):
    return 4 * sum(
        p.numel() for m in network.modules() if isinstance(m, kinds) for p in m.parameters(recurse=False)
    )


@pytest.mark.parametrize(
    ("name", "stem", "size", "head_batchnorm"),
    [
        ("resnet50", "imagenet", 45, False),
        ("resnet18", "cifar", 16, False),
        ("resnet_tiny", "cifar", 15, True),
    ],
)
def test_the_memory_estimate_is_what_autograd_keeps_to_the_byte(name, stem, size, head_batchnorm):
    network = build_model(name, stem=stem, head_batchnorm=head_batchnorm)
    estimate = memory_estimate(
        name, stem, size, *PAPER_HEAD, samples=2, precision="fp32", head_batchnorm=head_batchnorm
    )
    # Mean and deviation of each channel are left out of the estimate: they do not grow with the batch.
    norms = parameter_bytes(network, torch.nn.BatchNorm2d, torch.nn.BatchNorm1d)
    assert bytes_kept_for_backward(network, torch.randn(2, 3, size, size)) == estimate.activations + norms
    assert estimate.parameters == estimate.gradients == estimate.momentum
    assert estimate.parameters == 4 * sum(p.numel() for p in network.parameters())
    assert estimate.weight_copies == 0


def test_the_memory_estimate_under_autocast_counts_half_activations_and_weight_copies():
    network = build_model("resnet18", stem="cifar")
    estimate = memory_estimate("resnet18", "cifar", 16, *PAPER_HEAD, samples=2, precision="bf16")
    kept = bytes_kept_for_backward(network, torch.randn(2, 3, 16, 16), torch.bfloat16)
    norms = parameter_bytes(network, torch.nn.BatchNorm2d)
    images = 2 * 3 * 16 * 16 * 4
    biases = 2 * (2048 + 128)  # cast too, but backward does not need them
    assert kept + images + biases - norms == estimate.activations + estimate.weight_copies


def test_a_view_of_224_pixels_keeps_about_44_megabytes_in_sixteen_bits():
    one, two = (memory_estimate("resnet50", "imagenet", 224, *PAPER_HEAD, samples=n) for n in (1, 2))
    assert (two.activations - one.activations) / 1e6 == pytest.approx(44, rel=0.02)
    assert one.parameters == 4 * 27_966_656
    assert two.total - one.total == two.activations - one.activations


def test_a_cifar_update_costs_4_teraflop_and_an_imagenet_epoch_62_7_petaflop():
    cifar = analytic_macs("resnet50", "cifar", 32, *PAPER_HEAD)
    assert petaflops(cifar, 512) * 1e3 == pytest.approx(4.00, abs=0.005)
    assert petaflops(cifar, 512 * 97_500) == pytest.approx(390, abs=0.5)
    imagenet = analytic_macs("resnet50", "imagenet", 224, *PAPER_HEAD)
    assert petaflops(imagenet, run_samples(312, 0, 4096, 0)) == pytest.approx(62.7, abs=0.05)


@pytest.mark.parametrize(
    ("epochs", "supervised", "simclr"),
    [
        (100, 250, 145.5),
        (200, 250, 291),
        (300, 250, 413.8),
        (400, 250, 513.8),
        (500, 250, 613.9),
        (400, 30, 413.8),
    ],
)
def test_suncet_epochs_are_the_recipes_simclr_epochs_of_equal_compute(epochs, supervised, simclr):
    samples = run_samples(epochs * 454, supervised * 454, unlabeled=2816, labeled=2560)
    assert equivalent_epochs(samples, IMAGENET_TRAIN, 4096) == pytest.approx(simclr, abs=0.06)


def test_the_cifar_run_with_labels_costs_1_22_times_the_one_without():
    samples = run_samples(500 * 390, 100 * 390, unlabeled=128, labeled=280)
    assert equivalent_epochs(samples, 50_000, 256) / 500 == pytest.approx(1.22, abs=0.005)


@given(
    steps=st.integers(0, 10**6),
    supervised=st.integers(0, 10**6),
    unlabeled=st.integers(1, 10**4),
    labeled=st.integers(0, 10**4),
)
def test_the_samples_of_a_run_are_those_of_its_steps_one_by_one(steps, supervised, unlabeled, labeled):
    done = run_samples(steps, supervised, unlabeled, labeled)
    step = 2 * unlabeled + (labeled if steps < supervised else 0)
    assert run_samples(steps + 1, supervised, unlabeled, labeled) - done == step
    assert run_samples(0, supervised, unlabeled, labeled) == 0


def test_fewer_images_than_a_batch_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="100 images are fewer than one batch of 256"):
        equivalent_epochs(1, 100, 256)
