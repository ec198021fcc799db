"""Train for many steps and epochs, and show that memory, file descriptors and threads do not grow.

    python tools/soak.py FOLDER --images DATA/train [--steps 20000] [--epochs 50] [section.key=value ...]

One process of `fastsuncet train`: a tiny network, DALI on JPEG files, a k-NN evaluation and a checkpoint each epoch.
The numbers are the system's (/proc), taken ten times an epoch; FOLDER/samples.jsonl keeps them. Exit code 1: after a
tenth of the run the resident memory still grows by over 1 MB an epoch, or descriptors or threads do at all.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `fastsuncet` can be imported

from fastsuncet.paths import cli_command

RUN = (
    *("data.kind=image_folder", "data.split.kind=all", "data.split.fraction=null", "meta.device=cpu"),
    *("data.augmentation.blur=0.5", "criterion.classes_per_batch=2", "criterion.supervised_imgs_per_class=2"),
    *("checkpoint.every=null", "checkpoint.every_epochs=1", "evaluation.knn_every_epochs=1"),
)
BATCH, CLASSES = 8, 4
LIMIT = 1.0  # MB an epoch


def copy_images(images: Path, to: Path, train: int, validation: int) -> None:
    """Copy so many images of each of the first four classes of `images`, to train with and for validation."""
    for name in sorted(folder.name for folder in images.iterdir() if folder.is_dir())[:4]:
        files = sorted(path for path in (images / name).iterdir() if path.is_file())
        for part, chosen in (("train", files[:train]), ("val", files[train : train + validation])):
            (to / part / name).mkdir(parents=True)
            for path in chosen:
                shutil.copy(path, to / part / name)


def sample(pid: int) -> dict[str, float]:
    """Return memory in MB, descriptors and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return {
        "memory": int(fields["VmRSS"].split()[0]) / 1024,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(fields["Threads"]),
    }


def soak(top: Path, overrides: list[str], per_epoch: int) -> list[dict[str, float]]:
    """Train to the end and return the samples, ten an epoch."""
    words = ["train", "digits_demo", *overrides]
    metrics, samples = top / "runs" / "digits_demo" / "metrics.jsonl", []
    with (
        (top / "log").open("wb") as log,
        (top / "samples.jsonl").open("w", buffering=1, encoding="utf-8") as file,
        subprocess.Popen([*cli_command(), *words], stdout=log, stderr=log) as process,
    ):
        while process.poll() is None:
            time.sleep(0.05)
            lines = metrics.read_bytes().splitlines() if metrics.exists() else []
            step = json.loads(lines[-1])["step"] if lines else 0
            if step > (samples[-1]["step"] if samples else 0):
                try:
                    samples.append({"step": step, "epoch": step / per_epoch, **sample(process.pid)})
                except (OSError, KeyError):  # it has just ended
                    continue
                file.write(json.dumps(samples[-1]) + "\n")
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}: {top / 'log'}")
    return samples


def report(samples: list[dict[str, float]]) -> int:
    """Print how the numbers went; return 1 if one of them grows."""
    settled = [each for each in samples if each["step"] > samples[-1]["step"] / 10]
    epochs = [each["epoch"] for each in settled]
    growth = float(np.polyfit(epochs, [each["memory"] for each in settled], 1)[0])
    thirds = [settled[: len(settled) // 3], settled[-(len(settled) // 3) :]]
    print(f"{samples[-1]['step']:,} steps, {samples[-1]['epoch']:.0f} epochs, {len(samples)} samples")
    print("| | first third | last third |\n|---|---:|---:|")
    wrong = growth > LIMIT
    for name in ("memory", "descriptors", "threads"):
        low_high = [(min(e[name] for e in part), max(e[name] for e in part)) for part in thirds]
        cells = " | ".join(f"{low:,.0f} to {high:,.0f}" for low, high in low_high)
        print(f"| {name}{', MB' * (name == 'memory')} | {cells} |")
        wrong |= name != "memory" and low_high[1][1] > low_high[0][1]
    print(f"resident memory grows by {growth:+.3f} MB an epoch")
    return int(wrong)


def main(arguments: list[str] | None = None) -> int:
    """Train, sample and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=Path, required=True, help="a folder of classes of images")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=50)
    options, overrides = parser.parse_known_args(arguments)
    top, per_epoch = options.folder.resolve(), options.steps // options.epochs
    top.mkdir(parents=True)
    copy_images(options.images, top / "data", train=per_epoch * BATCH // CLASSES, validation=20)
    values = {
        "data.root": top / "data",
        "logging.folder": top / "runs",
        "logging.log_every": max(1, per_epoch // 10),
        "criterion.unsupervised_batch_size": BATCH,
        "optimization.steps": per_epoch * options.epochs,
    }
    return report(
        soak(top, [*RUN, *(f"{key}={value}" for key, value in values.items()), *overrides], per_epoch)
    )


if __name__ == "__main__":
    sys.exit(main())
