"""Print what a run costs: multiply-adds of its network by torch's counter, then petaFLOPs of update, epoch and run.

    python tools/measure_flops.py configs/in1k_10pct.yaml [section.key=value ...] [--images N] [--world-size W]

torch counts one forward and backward pass on the meta device, where tensors have shapes and no values: nothing is
computed, and no data is needed. The ledger counts 6 FLOP per multiply-add, which includes the gradient of the images;
training does not need that one, so torch's count is smaller.
"""

import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tools` can be imported

from fastsuncet.config import Arithmetic, Config, load_config
from fastsuncet.data.paired_stream import run_macs, update_macs
from fastsuncet.models.flops import FLOP_PER_MAC, network_cost, petaflops
from fastsuncet.models.resnet import build_model
from tools.bench import harness

IMAGENET_TRAIN, CIFAR10_TRAIN = 1_281_167, 50_000


def training_flops(config: Config, *, image_gradient: bool = False) -> int:
    """Return torch's count of one view's forward and backward pass."""
    m, size = config.model, config.data.augmentation.size
    network = build_model(m.name, m.library, m.stem, m.hidden, m.output, m.head_batchnorm, device="meta")
    # Two images, because BatchNorm in the head needs more than one.
    images = torch.empty(2, 3, size, size, device="meta", requires_grad=image_gradient)
    with FlopCounterMode(display=False) as counter:
        network(images).sum().backward()
    return counter.get_total_flops() // 2


def images_of(config: Config) -> tuple[int, str]:
    """Return the number of unlabeled images of the config's data set, and its source."""
    if config.data.kind == "cifar10":
        return CIFAR10_TRAIN, "CIFAR-10's training set"
    if config.data.kind == "digits":
        from pipelines.datasets.in_memory import digits

        return len(digits(train=True)), "scikit-learn's digits, the training part"
    if config.data.index is not None and Path(config.data.index).expanduser().exists():
        from pipelines.datasets.index import load_index

        return len(load_index(Path(config.data.index).expanduser(), refresh=False)), config.data.index
    return IMAGENET_TRAIN, "ImageNet's training set; --images N for another"


def network_table(config: Config) -> dict:
    """Return the table of one view's cost."""
    m, size = config.model, config.data.augmentation.size
    macs = network_cost(m.name, m.stem, size, m.hidden, m.output, m.head_batchnorm).macs
    points = [
        {"name": "GMAC, forward", "count": macs},
        {"name": "GFLOP, forward and backward, torch's count", "count": training_flops(config)},
        {"name": f"GFLOP, {FLOP_PER_MAC} per MAC, as the ledger counts", "count": FLOP_PER_MAC * macs},
    ]
    title = f"one view: {m.name} from {m.library}, {m.stem} stem, {size} px, head {m.hidden}-{m.output}"
    return harness.table(
        title, points, [("", "name", str), ("", "count", lambda count: f"{count / 1e9:.5g}")]
    )


def run_table(config: Config, a: Arithmetic, images: str) -> dict:
    """Return the table of views and petaFLOPs, with the labeled batch and after its switch-off."""
    points = []
    cases = [(" with labels", True)] if a.supervised_steps else []
    for name, labeled in (*cases, ("", False)):
        views, macs = a.update_samples(labeled), update_macs(config, a, labeled)
        points.append({"name": f"update{name}", "views": views, "macs": macs})
        points.append(
            {"name": f"epoch{name}", "views": views * a.steps_per_epoch, "macs": macs * a.steps_per_epoch}
        )
    whole = {"name": f"run of {a.steps:,} updates", "views": a.total_samples(), "macs": run_macs(config, a)}
    cost = ("petaFLOPs", "macs", lambda macs: f"{petaflops(macs, 1):.5g}")
    columns = [("", "name", str), ("views", "views", "{:,}".format), cost]
    title = f"{images}, {a.steps_per_epoch:,} updates an epoch"
    return harness.table(title, [*points, whole], columns)


def main(arguments: list[str] | None = None) -> int:
    """Print both tables."""
    parser = harness.parser(__doc__, devices=())
    parser.add_argument("config", help="a YAML file from configs/, or your own")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    parser.add_argument("--images", type=int, help="unlabeled images (default: the data set's own number)")
    parser.add_argument("--world-size", type=int, default=1, help="processes, for batch sizes given per rank")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    images, source = (options.images, "--images") if options.images else images_of(config)
    sizes = config.resolve(options.world_size, images)
    report = harness.Report("measure_flops", options.json, config=config.canonical())
    return report.finish([network_table(config), run_table(config, sizes, f"{images:,} images ({source})")])


if __name__ == "__main__":
    harness.run(main)
