"""Time what stands between the command and a run's first step, against another commit.

    python tools/bench/bench_start.py --before FOLDER [--tree TREE] [--rounds R] [--json FILE] [--quick]

FOLDER is a checkout of the other commit. Contenders are processes, in turns. "import" is Python and the modules of
`fastsuncet train`. "first step" is `fastsuncet train digits_demo` with one update, in a fresh folder.

TREE/train is a folder of class folders. With it, also: a first index of it, once each; a start with that index;
torchvision's ImageFolder, which lists the same tree; a start where each stat takes 0.4 ms
(tools/bench/slow_files.c); and `fastsuncet train in1k_10pct` on it with one update of a small network, with the kept
index. The seconds of the first four are those of opening the images, without imports.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from tools.bench import harness
from tools.bench.slow_files import preloaded

ROOT = Path(__file__).resolve().parents[2]
STAT_US = 400
ONE_STEP = [
    *("optimization.steps=1", "optimization.warmup=0", "checkpoint.export=[]"),
    "evaluation.knn_every_epochs=null",
]
LABELS = ["data.split.kind=bernoulli", "data.split.file=null", "data.split.fraction=0.1"]
SMALL = [
    *("model.name=resnet_tiny", "data.augmentation.size=32", "meta.precision=fp32"),
    *("criterion.unsupervised_batch_size=8", "criterion.classes_per_batch=2"),
    *("criterion.supervised_imgs_per_class=2", "optimization.epochs=null", "checkpoint.every_epochs=null"),
]
TIMED = """
import json, sys, time
{imports}
began = time.process_time(), time.perf_counter()
{call}
print(json.dumps([time.process_time() - began[0], time.perf_counter() - began[1]]))
"""
OPEN = TIMED.format(
    imports="""from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import join
config = load_config("in1k_10pct", sys.argv[1:])""",
    call='with join("cpu") as place:\n    open_images(config, place, validation=False)',
)
LIST = TIMED.format(imports="from torchvision.datasets import ImageFolder", call="ImageFolder(sys.argv[1])")
COLUMNS: list[harness.Column] = [
    ("", "name", str),
    ("CPU s", "cpu", harness.spread),
    ("wall s", "wall", harness.spread),
    ("CPU, x before", "cpu_to_before", harness.spread),
    ("CPU, x ImageFolder", "cpu_to_listing", harness.spread),
]


class Contender(NamedTuple):
    """A process: `python WORDS` with the sources of `checkout`."""

    name: str
    words: Sequence[str]
    checkout: Path
    timed: bool = False  # whether it prints its own seconds
    environment: dict[str, str] | None = None
    rounds: int | None = None  # None: as the others

    def seconds(self) -> tuple[float, float]:
        """Run it and return its processor and its wall seconds. Raises RuntimeError with its errors if it fails."""
        began, before = time.perf_counter(), os.times()
        done = subprocess.run(
            [sys.executable, *self.words],
            cwd=self.checkout,  # Python looks for modules there first
            env={**(self.environment or os.environ), "PYTHONPATH": str(self.checkout)},
            capture_output=True,
            text=True,
        )
        wall, after = time.perf_counter() - began, os.times()
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stderr}")
        if self.timed:
            cpu, wall = json.loads(done.stdout.splitlines()[-1])
            return cpu, wall
        return (
            after.children_user + after.children_system - before.children_user - before.children_system,
            wall,
        )


def contenders(before: Path, tree: Path | None, scratch: Path) -> list[Contender]:
    """Return the processes to time; those of a first index come first, because later ones read what they keep."""
    made = []
    for name, checkout in (("before", before), ("now", ROOT)):
        runs = f"logging.folder={scratch / name}"
        train = ("-m", "fastsuncet", "train")
        made += [
            Contender(f"import, {name}", ("-c", "import fastsuncet.commands.train"), checkout),
            Contender(f"first step, digits_demo, {name}", (*train, "digits_demo", *ONE_STEP, runs), checkout),
        ]
        if tree is not None:
            images = (f"data.root={tree}", runs, *LABELS)
            opened = ("-c", OPEN, *images)
            made.insert(0, Contender(f"first index, {name}", opened, checkout, timed=True, rounds=1))
            made += [
                Contender(f"start, {name}", opened, checkout, timed=True),
                Contender(
                    f"first step, in1k_10pct, {name}",
                    (*train, "in1k_10pct", *ONE_STEP, *SMALL, *images),
                    checkout,
                ),
            ]
    if tree is not None:
        slow = preloaded(scratch, SLOW_FOLDER=tree, SLOW_STAT_US=STAT_US)
        opened = ("-c", OPEN, f"data.root={tree}", f"logging.folder={scratch / 'now'}", *LABELS)
        made += [
            Contender("ImageFolder", ("-c", LIST, str(tree / "train")), ROOT, timed=True),
            Contender(f"start, {STAT_US} us a stat, now", opened, ROOT, timed=True, environment=slow),
        ]
    return made


def measure(every: Sequence[Contender], rounds: int, scratch: Path) -> list[dict[str, Any]]:
    """Return a point per contender: processor and wall seconds by turn, and ratios within each turn."""
    points = [{"name": each.name, "cpu": [], "wall": []} for each in every]
    for turn in range(rounds):
        for each, point in zip(every, points):
            if each.rounds is None or turn < each.rounds:
                for run in ("digits_demo", "in1k_10pct"):  # else it would be continued
                    subprocess.run(["rm", "-rf", *scratch.glob(f"*/{run}")], check=True)
                cpu, wall = each.seconds()
                point["cpu"].append(cpu)
                point["wall"].append(wall)
                print(
                    f"{each.name}: {cpu:.2f} s of processor time, {wall:.2f} s", file=sys.stderr, flush=True
                )
    named = {point["name"]: point for point in points}
    for point in points:
        if (before := named.get(point["name"].replace(", now", ", before"))) not in (None, point):
            point["cpu_to_before"] = harness.ratios(point["cpu"], before["cpu"])
        if point["name"] == "start, now":
            point["cpu_to_listing"] = harness.ratios(point["cpu"], named["ImageFolder"]["cpu"])
    return points


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the JSON."""
    made = harness.parser(__doc__, rounds=3, quick="one turn")
    made.add_argument(
        "--before", type=Path, required=True, metavar="FOLDER", help="a checkout of another commit"
    )
    made.add_argument("--tree", type=Path, metavar="TREE", help="TREE/train holds class folders of images")
    options = made.parse_args(arguments)
    report = harness.Report("bench_start", options.json)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tree = None if options.tree is None else options.tree.resolve()
        every = contenders(options.before.resolve(), tree, scratch)
        points = measure(every, 1 if options.quick else options.rounds, scratch)
    found = {point["name"]: point for point in points}
    notes = []
    if tree is not None:
        index, start = found["first index, now"], found["start, now"]
        faster = [1 / ratio for ratio in index["cpu_to_before"]]
        notes = [
            harness.target("a first index, times as fast as before", faster, 3, at_least=True),
            harness.target("a start, x ImageFolder's listing", start["cpu_to_listing"], 1.5, at_least=False),
            harness.target(
                "a slow start, s", found[f"start, {STAT_US} us a stat, now"]["wall"], 15, at_least=False
            ),
        ]
    return report.finish([harness.table("Processes", points, COLUMNS)], notes=notes, points=points)


if __name__ == "__main__":
    harness.run(main)
