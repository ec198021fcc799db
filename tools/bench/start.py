"""Time what stands between the command and a run's first step, against another commit.

--before FOLDER is a checkout of the other commit. Contenders are processes. "import" is Python and the modules of
`fastsuncet train`. "first step" is `fastsuncet train digits_demo` with one update, in a fresh folder.
"""

import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench import harness

ROOT = Path(__file__).resolve().parents[2]
ONE_STEP = [
    *("optimization.steps=1", "optimization.warmup=0", "checkpoint.export=[]"),
    "evaluation.knn_every_epochs=null",
]
COMMANDS = {
    "import": ["-c", "import fastsuncet.commands.train"],
    "first step": ["-m", "fastsuncet", "train", "digits_demo", *ONE_STEP],
}
COLUMNS = {"cpu": "CPU s", "wall": "wall s", "cpu_to_before": "CPU, x before"}


def seconds(words: Sequence[str], checkout: Path) -> tuple[float, float]:
    """Run `python WORDS` with the sources of a checkout; return its processor and its wall seconds.

    Raises RuntimeError with its errors if it fails.
    """
    began, before = time.perf_counter(), os.times()
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    # Python looks for modules in the working folder first.
    done = subprocess.run(
        [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True
    )
    wall, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return sum(after[2:4]) - sum(before[2:4]), wall  # user and system seconds of the children


def measure(options: Namespace, report: harness.Report) -> dict[str, Any]:
    """Time both commands with both checkouts."""
    checkouts = {"before": options.before.resolve(), "now": ROOT}
    points = [
        {"name": f"{command}, {name}", "cpu": [], "wall": []} for command in COMMANDS for name in checkouts
    ]
    for _ in range(1 if options.quick else options.rounds):
        for point in points:
            command, _, name = point["name"].partition(", ")
            # A run that is there would be continued.
            with tempfile.TemporaryDirectory() as folder:
                runs = [f"logging.folder={folder}"] if command == "first step" else []
                found = seconds([*COMMANDS[command], *runs], checkouts[name])
            for clock, value in zip(("cpu", "wall"), found):
                point[clock].append(value)
    for before, now in zip(points[::2], points[1::2]):
        now["cpu_to_before"] = harness.ratios(now["cpu"], before["cpu"])
    return {"tables": [harness.table("Processes", points, harness.spread_columns(COLUMNS))], "points": points}


CASE = harness.Case(
    measure,
    rounds=3,
    quick="one turn",
    add_arguments=lambda add: add("--before", type=Path, required=True, metavar="FOLDER", help="a checkout"),
)
