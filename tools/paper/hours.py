"""What each row of the paper costs by arithmetic, and the tables of docs/paper.md.

    python tools/paper/hours.py             prints what docs/paper.md holds between its marks
    python tools/paper/hours.py --write     puts it there

Nothing is measured and no data is needed: configs are resolved with the known sizes of ImageNet and CIFAR-10. Counted
are pre-training, fine-tuning and transfer, 6 FLOP a multiply-add; evaluations are not (50,000 forward passes are 0.4
petaFLOPs).
"""

import argparse
import shlex
import sys
from fnmatch import fnmatchcase
from functools import cache
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, `tools` is not importable yet

from fastsuncet.commands.sweep.runs import Job, Run, expand
from fastsuncet.commands.sweep.spec import read_sweep
from fastsuncet.config import Arithmetic, Config, load_config
from fastsuncet.data.paired_stream import run_macs
from fastsuncet.models.flops import FLOP_PER_MAC, classifier_macs
from fastsuncet.models.resnet import WIDTHS
from pipelines.datasets.label_splits import bernoulli
from tools.paper.rows import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "paper.md"
BEGIN, END = "<!-- begin: python tools/paper/hours.py --write -->", "<!-- end -->"

# The one assumption of every hour below: views a second and GPU of SimCLR at 224 pixels with FFCV-SSL on 8 A100 (arXiv
# 2303.01986, Figure 1: 100 epochs in about 12 hours, read off the plot). Published, not measured here.
VIEWS_PER_SECOND, MACS_PER_VIEW = 741, 4_091_592_704
GPUS = 8
SUSTAINED = VIEWS_PER_SECOND * MACS_PER_VIEW * FLOP_PER_MAC  # FLOP a second and GPU: 18.2e12

IMAGENET = (1_281_167, 1000)  # training images, classes
CIFAR10 = (50_000, 10)
LISTS = {"10percent.txt": 128_116, "1percent.txt": 12_811}
# Training images (and classes) that a transfer is fine-tuned towards; its steps do not depend on the images.
TRANSFER_CLASSES = {"cifar10": 10, "cifar100": 100, "voc07": 20}


def counts(config: Config) -> tuple[int, int, int]:
    """(training images, classes, labeled images) of a config of the paper, without its data."""
    images, classes = CIFAR10 if config.data.kind == "cifar10" else IMAGENET
    split = config.data.split
    if split.kind == "bernoulli":
        return images, classes, len(bernoulli(images, split.fraction, split.seed))
    return (
        images,
        classes,
        {"none": 0, "all": images}.get(split.kind) or LISTS.get(Path(split.file or "").name, 0),
    )


def sizes(config: Config) -> Arithmetic:
    """The sizes of a run: ImageNet's on 8 GPUs, CIFAR-10's on one, as in the paper (8 cannot share 28 images)."""
    images, classes, labeled = counts(config)
    return config.resolve(1 if config.data.kind == "cifar10" else GPUS, images, classes, labeled or None)


def pretraining(config: Config) -> float:
    """PetaFLOPs of `fastsuncet train`."""
    return FLOP_PER_MAC * run_macs(config, sizes(config)) / 1e15


def finetuning(config: Config, checkpoints: int) -> float:
    """PetaFLOPs of `fastsuncet finetune` of so many checkpoints: whole batches of each epoch."""
    _, classes, labeled = counts(config)
    batch = config.finetune.batch_size
    samples = config.finetune.epochs * (labeled // batch * batch)
    return checkpoints * _supervised(config, config.data.augmentation.size, classes, samples)


def transferring(config: Config) -> float:
    """PetaFLOPs of `fastsuncet transfer`: every cell, and the chosen one once more, on each data set."""
    t = config.transfer
    fits = len(t.learning_rates) * len(t.weight_decays) + 1
    samples = fits * t.steps * t.batch_size
    return sum(_supervised(config, t.size, TRANSFER_CLASSES[name], samples) for name in t.datasets)


def _supervised(config: Config, size: int, classes: int, samples: int) -> float:
    name = config.model.name
    macs = classifier_macs(name, config.model.stem, size, WIDTHS[name], classes)
    return FLOP_PER_MAC * samples * macs / 1e15


def checkpoints(config: Config) -> int:
    """How many checkpoints a finished run keeps."""
    steps, every = sizes(config).steps, config.checkpoint.every_epochs * sizes(config).steps_per_epoch
    return min(config.checkpoint.keep, -(-steps // every))


def petaflops(job: Job) -> float:
    """PetaFLOPs of one command line, 0 for an evaluation."""
    if job.command == "train":
        return pretraining(job.config)
    if job.command == "finetune":
        return finetuning(job.config, checkpoints(job.config) if "--every-checkpoint" in job.options else 1)
    return transferring(job.config) if job.command == "transfer" else 0.0


@cache
def runs_of(path: str, *overrides: str) -> list[Run]:
    """The runs of a sweep of this repository."""
    return expand(read_sweep(ROOT / path), overrides)


def jobs_of(command: str) -> list[Job]:
    """The jobs of a command line of docs/paper.md; none for a report."""
    words = shlex.split(command)[1:]
    names = [words[i + 1] for i, word in enumerate(words) if word == "--only"]
    rest = [word for i, word in enumerate(words) if word != "--only" and words[i - 1] != "--only"]
    if rest[0] == "sweep":
        runs = runs_of(rest[1], *rest[2:])
        return [
            job
            for run in runs
            if not names or any(fnmatchcase(run.name, n) for n in names)
            for job in run.jobs
        ]
    if rest[0] in ("train", "finetune"):
        return [Job(rest[0], tuple(rest), (), (), load_config(ROOT / rest[1], rest[2:]))]
    return []


def files_of(row: Row) -> list[str]:
    """The configs that a row's commands name, each once."""
    words = [word for command in row.commands for word in shlex.split(command)]
    return list(dict.fromkeys(word for word in words if word.startswith("configs/")))


def cost(rows: tuple[Row, ...] | list[Row]) -> float:
    """PetaFLOPs of all that `rows` need, what they share counted once."""
    jobs = {}
    for row in rows:
        for command in row.commands:
            for job in jobs_of(command):
                # What is done, and not the line that asks for it: two sweeps may share a run.
                of = job.config.canonical() if job.command != "train" else job.config.run_folder
                jobs[job.command, str(job.config.run_folder), str(of)] = job
    return sum(petaflops(job) for job in jobs.values())


def rounded(value: float) -> str:
    """Three digits: 62.7, 31,400."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def hours(petaflop: float) -> float:
    """On 8 GPUs at the assumed rate."""
    return petaflop * 1e15 / (GPUS * SUSTAINED) / 3600


def table() -> list[str]:
    """Markdown: a line a row of the paper."""
    lines = [
        "| row | what | config | petaFLOPs | hours on 8 GPUs, by arithmetic | paper | here |",
        "|---:|---|---|---:|---:|---|---|",
    ]
    for row in ROWS:
        links = ", ".join(f"[{Path(name).stem}](../{name})" for name in files_of(row))
        spent = cost([row])
        lines.append(
            f"| {row.number} | {row.item} | {links} | {rounded(spent)} | {rounded(hours(spent))} | {row.paper} | "
            f"{row.ours} |"
        )
    spent = cost(ROWS)
    lines.append(
        f"| all | each run and fine-tuning once | | {rounded(spent)} | {rounded(hours(spent))} | | |"
    )
    return lines


def commands() -> list[str]:
    """Markdown: the commands of every row, rows with the same ones together."""
    lines = []
    for same, rows in groupby(ROWS, key=lambda row: row.commands):
        numbers = [str(row.number) for row in rows]
        lines += [f"Row{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}:", "", "```bash"]
        lines += [command.strip() for command in same] + ["```", ""]
    return lines


def between_the_marks() -> str:
    """What the tool owns of docs/paper.md."""
    return "\n".join([BEGIN, "", *table(), "", "## The commands", "", *commands(), END])


def main(arguments: list[str] | None = None) -> int:
    """Prints, or writes into docs/paper.md; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/paper.md, between its marks")
    if not parser.parse_args(arguments).write:
        print(between_the_marks())
        return 0
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    DOCUMENT.write_text(before + between_the_marks() + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
