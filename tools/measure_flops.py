"""Print what a run costs: multiply-adds of its network, then petaFLOPs of update, epoch and run, as the ledger counts.

    python tools/measure_flops.py configs/in1k_10pct.yaml [section.key=value ...] [--images N] [--labels N]
        [--world-size W] [--json]

No data is needed. A multiply-add of a view costs 6 FLOP, and 8 in updates that `criterion.micro_batch` makes in pieces.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tools` can be imported

from fastsuncet.cli._parser import whole
from fastsuncet.commands.dry_run import IMAGES
from fastsuncet.config import Arithmetic, Config, load_config
from fastsuncet.models.flops import petaflops, run_macs, update_macs, view_macs
from tools.bench import harness


def run_costs(config: Config, a: Arithmetic) -> dict[str, tuple[int, float]]:
    """Return views and petaFLOPs, with the labeled batch and after its switch-off."""
    on, off = a.supervised_steps, a.steps - a.supervised_steps
    # When the loss on labels plateaus is not known before the run.
    plateau = config.criterion.supervised_epochs == "plateau"
    costs = {}
    for name, labeled in ((" with labels", True), ("", False)):
        if not (on if labeled else off or plateau):
            continue
        views, macs = a.update_views(labeled), update_macs(config, a, labeled)
        for what, updates in (("update", 1), ("epoch", a.steps_per_epoch)):
            costs[what + name] = views * updates, petaflops(macs * updates)
    most = " with labels to the end" if plateau else ""
    views = on * a.update_views(True) + off * a.update_views(False)
    costs[f"run of {a.steps:,} updates{most}"] = views, petaflops(run_macs(config, a))
    return costs


def main(arguments: list[str] | None = None) -> int:
    """Print the multiply-adds of a view and the table, or their numbers as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="a YAML file, or the name of a shipped one")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings to change")
    of_data = "unlabeled images (default: those of the public data set; image_folder: ImageNet)"
    parser.add_argument("--images", type=whole(1), help=of_data)
    of_labels = "labeled images, whose passes are the epochs of labels alone"
    parser.add_argument("--labels", type=whole(1), help=of_labels)
    of_ranks = "processes, for batch sizes given per rank"
    parser.add_argument("--world-size", type=whole(1), default=1, help=of_ranks)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    if (images := options.images or IMAGES.get(config.data.kind)) is None:
        parser.error(f"data.kind {config.data.kind} can have any number of images: give it as --images N")
    if options.labels is None and config.criterion.instance == "none":
        parser.error(
            "an epoch of labels alone depends on the number of labeled images: give it as --labels N"
        )
    a = config.resolve(options.world_size, images, num_labeled=options.labels)
    m, size, costs = config.model, config.data.augmentation.size, run_costs(config, a)
    macs = view_macs(config)
    if options.json:
        run = {name: {"views": views, "petaflops": spent} for name, (views, spent) in costs.items()}
        print(json.dumps({"images": images, "view": {"MAC, forward": macs}, "run": run}, indent=2))
        return 0
    network = f"{m.name}, {m.stem} stem, {size} px, head {m.hidden}-{m.output}"
    print(f"one view: {network}: {macs / 1e9:.5g} GMAC forward\n")
    rows = [
        {"": name, "views": f"{views:,}", "petaFLOPs": f"{spent:.5g}"}
        for name, (views, spent) in costs.items()
    ]
    harness.show(f"{images:,} images, {a.steps_per_epoch:,} updates an epoch", rows)
    return 0


if __name__ == "__main__":
    harness.run(main)
