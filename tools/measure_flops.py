"""Count what a run costs: FLOPs of a training pass by torch's counter and by the rule of 6 per MAC, then petaFLOPs.

    python tools/measure_flops.py configs/in1k_10pct.yaml [section.key=value ...] [--images N] [--world-size W]

The counter runs one forward and backward pass on the meta device, where tensors have shapes and no values. Exits
with 1 if the two counts disagree by more than the one difference that it explains.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from fastsuncet.config import Arithmetic, Config, load_config
from fastsuncet.errors import FastSuncetError
from fastsuncet.models.flops import FLOP_PER_MAC, network_cost, petaflops
from fastsuncet.models.resnet import build_model

SAMPLES = 2  # BatchNorm in the head wants more than one
IMAGENET_TRAIN, CIFAR10_TRAIN = 1_281_167, 50_000


@dataclass(frozen=True)
class Count:
    """FLOP of one sample's forward and backward pass, counted by torch and by the rule of 6 per MAC."""

    macs: int
    forward: int
    backward: int
    image_gradient: int  # the rule counts the gradient of the images, which training does not compute

    @property
    def analytic_forward(self) -> int:
        """2 FLOP per MAC."""
        return 2 * self.macs

    @property
    def analytic_backward(self) -> int:
        """4 FLOP per MAC: the gradients of inputs and of weights."""
        return (FLOP_PER_MAC - 2) * self.macs

    @property
    def agrees(self) -> bool:
        """Whether torch counts the FLOP of the rule, except the gradient of the images."""
        return (
            self.forward == self.analytic_forward
            and self.backward == self.analytic_backward - self.image_gradient
        )


def count(
    name: str, library: str, stem: str, size: int, hidden: int, output: int, head_batchnorm: bool = False
) -> Count:
    """Count one training pass of the network that these arguments of `build_model` make."""
    network = build_model(name, library, stem, hidden, output, head_batchnorm, device="meta")

    def training_pass(image_gradient: bool) -> tuple[int, int]:
        images = torch.empty(SAMPLES, 3, size, size, device="meta", requires_grad=image_gradient)
        with FlopCounterMode(display=False) as forward:
            z = network(images)
        with FlopCounterMode(display=False) as backward:
            z.sum().backward()
        return forward.get_total_flops() // SAMPLES, backward.get_total_flops() // SAMPLES

    forward, backward = training_pass(image_gradient=False)
    return Count(
        macs=network_cost(name, stem, size, hidden, output, head_batchnorm).macs,
        forward=forward,
        backward=backward,
        image_gradient=training_pass(image_gradient=True)[1] - backward,
    )


def network_table(found: Count) -> list[str]:
    """Return the two counts next to each other, and why they differ."""
    rows = [
        ("GMAC forward", found.forward / 2, found.macs),
        ("GFLOP forward", found.forward, found.analytic_forward),
        ("GFLOP backward", found.backward, found.analytic_backward),
        ("GFLOP in all", found.forward + found.backward, FLOP_PER_MAC * found.macs),
    ]
    share = found.image_gradient / (FLOP_PER_MAC * found.macs)
    return [
        f"{'one view':<18}{'torch counts':>14}{'6 per MAC':>14}",
        *(f"{name:<18}{counted / 1e9:>14.5g}{expected / 1e9:>14.5g}" for name, counted, expected in rows),
        "",
        f"The {found.image_gradient / 1e9:.3g} GFLOP between them ({share:.1%}) are the first convolution's gradient "
        "with respect to the",
        "images: training does not need it and skips it. The ledger counts 6 FLOP per MAC, and so counts it.",
    ]


def run_table(macs: int, arithmetic: Arithmetic) -> list[str]:
    """Views and petaFLOPs of an update, an epoch and the run, with the labeled batch and after its switch-off."""
    a = arithmetic
    plain = 2 * a.global_unlabeled
    rows = [("update", plain), ("epoch", plain * a.steps_per_epoch)]
    if a.supervised_steps:
        on = plain + a.global_labeled
        rows = [("update with labels", on), ("epoch with labels", on * a.steps_per_epoch), *rows]
    rows.append((f"run of {a.steps:,} updates", a.total_samples()))
    return [
        f"{'':<26}{'views':>16}{'petaFLOPs':>14}",
        *(f"{name:<26}{views:>16,}{petaflops(macs, views):>14.5g}" for name, views in rows),
    ]


def images_of(config: Config) -> tuple[int, str]:
    """How many unlabeled images the config's data set has, and where that number is from."""
    if config.data.kind == "cifar10":
        return CIFAR10_TRAIN, "CIFAR-10's training set"
    if config.data.kind == "digits":
        from pipelines.datasets.in_memory import digits

        return len(digits(train=True)), "scikit-learn's digits, the training part"
    if config.data.index is not None and Path(config.data.index).expanduser().exists():
        from pipelines.datasets.index_io import load_index

        return len(load_index(Path(config.data.index).expanduser(), refresh=False)), config.data.index
    return IMAGENET_TRAIN, "ImageNet's training set; --images N for another"


def main(arguments: list[str] | None = None) -> int:
    """Prints both tables. Exit code 0, 1 if the counts disagree, or the code of what is wrong with the config."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", help="a YAML file from configs/, or your own")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings to change for this count"
    )
    parser.add_argument("--images", type=int, help="unlabeled images (default: the data set's own number)")
    parser.add_argument("--world-size", type=int, default=1, help="processes, for batch sizes given per rank")
    options = parser.parse_intermixed_args(arguments)
    try:
        config = load_config(options.config, options.overrides)
        images, source = (options.images, "--images") if options.images else images_of(config)
        arithmetic = config.resolve(options.world_size, images)
    except FastSuncetError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    m, size = config.model, config.data.augmentation.size
    found = count(m.name, m.library, m.stem, size, m.hidden, m.output, m.head_batchnorm)
    print(f"{m.name} from {m.library}, {m.stem} stem, {size} px, head {m.hidden}-{m.output}")
    print(f"{images:,} images ({source}), {arithmetic.steps_per_epoch:,} updates an epoch\n")
    print("\n".join([*network_table(found), "", *run_table(found.macs, arithmetic)]))
    if not found.agrees:
        print("\ntorch's counter and the rule of 6 FLOP per MAC DISAGREE", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
