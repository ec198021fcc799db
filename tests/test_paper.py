"""The configs have the paper's values, and docs/paper.md is true: its commands parse and its costs add up."""

import functools
import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from fastsuncet.cli._parser import Parser
from fastsuncet.commands.report import paper
from fastsuncet.commands.sweep.runs import Job, expand, read_sweep, runs_named
from fastsuncet.config import Config, load_config
from fastsuncet.metrics.results import asked
from fastsuncet.models.flops import classifier_macs, petaflops, run_macs
from fastsuncet.models.resnet import WIDTHS
from pipelines.datasets.label_splits import bernoulli

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "configs" / "paper"
SHIPPED = sorted(path.stem for path in FOLDER.parent.glob("*.yaml"))
FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SWEEPS = [f"paper/{name}" for name in FILES if "\ncommands:" in (FOLDER / f"{name}.yaml").read_text()]
DOCUMENT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
TABLE = [line for line in DOCUMENT.splitlines() if re.match(r"\| (\d+|all) \|", line)]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE]
# Row number -> its commands
COMMANDS = {
    int(number): block.splitlines()
    for numbers, block in re.findall(r"^Rows? ([\d and]+):\n\n```bash\n(.*?)\n```", DOCUMENT, re.M | re.S)
    for number in numbers.split(" and ")
}
LINES = sorted({line for lines in COMMANDS.values() for line in lines})

GPUS = 8
# FLOP per second and GPU: the views that one H200 trained on from files (BENCHMARKS.md), of 4.09 GMAC, 6 FLOP per MAC.
SUSTAINED = 5_596 * 4_091_592_704 * 6
IMAGES = {"imagenet": 1_281_167, "cifar10": 50_000}
LISTS = {"10percent.txt": 128_116, "1percent.txt": 12_811}
TRANSFER_CLASSES = {"cifar10": 10, "cifar100": 100, "voc07": 20}


@functools.cache
def runs_of(path: str, *overrides: str):
    return expand(read_sweep(path), overrides)


def jobs_of(command: str) -> list[Job]:
    """Return the jobs of a valid command line, none for a report."""
    _, name, *words = shlex.split(command)
    options = Parser(name).parse(words)
    if name == "sweep":
        runs = runs_named(runs_of(options.name, *options.overrides), options.only)
        return [job for run in runs for job in run.jobs]
    return [] if name == "report" else [Job(name, (name, *words), (), (), options.config)]


def jobs_in(config: str) -> list[Job]:
    """Return the jobs of a shipped config, or of a file of configs/paper."""
    return jobs_of(f"fastsuncet {'sweep' if config in SWEEPS else 'train'} {config}")


def train_config(name: str, pattern: str) -> Config:
    """Return the first training config of the runs of a sweep that `pattern` names."""
    jobs = jobs_of(f"fastsuncet sweep {name} --only '{pattern}'")
    return next(job.config for job in jobs if job.command == "train")


def data_of(config: Config) -> tuple[int, int, int]:
    """Return (training images, classes, labeled images) without the data."""
    cifar = config.data.kind == "cifar10"
    images, split = IMAGES["cifar10" if cifar else "imagenet"], config.data.split
    labeled = {"none": 0, "all": images}.get(split.kind) or LISTS.get(Path(split.file or "").name, 0)
    if split.kind == "bernoulli":
        labeled = len(bernoulli(images, split.fraction, split.seed))
    return images, 10 if cifar else 1000, labeled


def sizes_of(config: Config):
    """Return the sizes of a run: ImageNet's on 8 GPUs, CIFAR-10's on one, as in the paper."""
    images, classes, labeled = data_of(config)
    return config.resolve(1 if config.data.kind == "cifar10" else GPUS, images, classes, labeled or None)


def job_cost(job: Job) -> float:
    """Return the petaFLOPs of a job, 0 for an evaluation without training."""
    c = job.config

    def supervised(size: int, classes: int, views: int) -> float:
        m = c.model
        return petaflops(views * classifier_macs(m.name, m.stem, size, WIDTHS[m.name], classes))

    if job.command == "train":
        return petaflops(run_macs(c, sizes_of(c)))
    if job.command == "finetune":
        _, classes, labeled = data_of(c)
        views = c.finetune.epochs * (labeled // c.finetune.batch_size * c.finetune.batch_size)
        count = 1
        if "--every-checkpoint" in job.options:
            sizes = sizes_of(c)
            every = c.checkpoint.every_epochs * sizes.steps_per_epoch
            count = min(c.checkpoint.keep, -(-sizes.steps // every))
        return count * supervised(c.data.augmentation.size, classes, views)
    if job.command == "transfer":
        t = c.transfer
        # Each cell of the grid, and the chosen one once more.
        views = (len(t.learning_rates) * len(t.weight_decays) + 1) * t.steps * t.batch_size
        return sum(supervised(t.size, TRANSFER_CLASSES[name], views) for name in t.datasets)
    return 0.0


def cost(numbers: Iterable[int]) -> float:
    """Return the petaFLOPs of rows, with what they share counted once."""
    jobs = {}
    for job in (job for number in numbers for line in COMMANDS[number] for job in jobs_of(line)):
        # The same training in two sweeps is one; an evaluation depends on all of its config.
        config = "" if job.command == "train" else str(job.config.canonical())
        jobs[job.command, job.config.run_folder, config] = job
    return sum(map(job_cost, jobs.values()))


def rounded(value: float) -> str:
    """Format three digits: 62.7, 31,400."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def test_document_has_28_rows_and_two_of_paws_with_commands_and_says_which_were_run():
    assert [row[0] for row in ROWS] == [*map(str, range(1, 29)), "all", "29", "30"]
    assert sorted(COMMANDS) == list(range(1, 31))
    for row in (row for row in ROWS if row[0] != "all"):
        assert len(row) == 7 and (row[6] == "not run" or "RESULTS.md" in row[6])
        linked = set(re.findall(r"\(\.\./configs/([^)]+)\.yaml\)", row[2]))
        named = {word for line in COMMANDS[int(row[0])] for word in line.split() if word.startswith("paper/")}
        assert linked == named
    assert {word for line in LINES for word in line.split() if word.startswith("paper/")} == {
        f"paper/{name}" for name in FILES
    }
    drawn = {figure for line in LINES for figure in re.findall(r"--paper (\S+)", line)}
    assert drawn and drawn <= {*paper.figures()}


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_document_costs_are_those_of_the_commands(row):
    spent = cost(range(1, 29) if row[0] == "all" else [int(row[0])])
    assert row[3:5] == [rounded(spent), rounded(spent * 1e15 / (GPUS * SUSTAINED) / 3600)]


@pytest.mark.slow
@pytest.mark.parametrize("config", [*SHIPPED, *(f"paper/{name}" for name in FILES)])
def test_config_header_names_its_rows_and_valid_commands(config):
    lines = (FOLDER.parent / f"{config}.yaml").read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    page = "\n".join(line.lstrip("#").strip() for line in lines)
    assert re.match(r"(ImageNet|CIFAR-10|The demo)", page)
    for entry in ("Paper ", "Hardware ", "(Hours|Minutes) ", "Accuracy ", "Command "):
        assert re.search(rf"\n{entry}", page), entry
    commands = re.findall(r"fastsuncet (?:train|sweep|finetune) .*", page.replace("\\\n", " "))
    assert commands
    for command in commands:
        assert jobs_of(command) and shlex.split(command)[2] == config
    if config in SHIPPED:
        assert load_config(config).run_folder == Path("runs", config)
        return
    (said,) = re.findall(r"rows? ([\d, and]+) of docs/paper.md", " ".join(page.split()))
    rows = set(map(int, re.findall(r"\d+", said)))
    assert rows and rows <= {number for number, lines in COMMANDS.items() if any(config in x for x in lines)}


OURS = ["in1k_simclr", "in1k_10pct", "in1k_1pct", "cifar10_simclr", "cifar10_suncet"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OURS, *(f"paper/{name}" for name in FILES)])
def test_runs_fit_their_data_and_keep_the_papers_hyper_parameters(name):
    cifar = "cifar10" in name
    schedule, temperature = ((0.125, 1.0, 0.0, 10), 0.5) if cifar else ((0.6, 4.8, 0.0, 10), 0.1)
    for job in jobs_in(name):
        c, sizes = job.config, sizes_of(job.config)
        o, a, m = c.optimization, c.data.augmentation, c.model
        assert sizes.steps > sizes.warmup_steps >= 0
        # The settings of SwAV and of PAWS are other papers'.
        if name == "paper/in1k_paws":
            assert (o.start_lr, o.lr, o.final_lr, o.warmup) == (0.3, 6.4, 0.064, 10)
            assert o.lr_in_momentum and o.exclude_bias_and_norm and c.finetune.lr == 0.02
            continue
        if job.command == "train" and o.steps is None and name != "paper/in1k_swav":
            assert (o.start_lr, o.lr, o.final_lr, o.warmup) == schedule
            assert c.criterion.temperature == temperature
            assert (o.momentum, o.weight_decay, o.trust_coefficient) == (0.9, 1e-6, 0.001)
            assert not (o.nesterov or o.lr_in_momentum or o.exclude_bias_and_norm or o.legacy_schedule)
        if name in OURS:
            assert (o.epochs, c.meta.seed) == (500, 0)
            assert (a.size, a.strength, a.blur) == ((32, 0.5, 0.0) if cifar else (224, 1.0, 0.5))
            assert (a.crop_scale, a.crop_ratio, a.flip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
            assert (a.jitter, a.gray, a.blur_sigma) == (0.8, 0.2, (0.1, 2.0))
            assert (a.brightness, a.contrast, a.saturation, a.hue) == (0.8, 0.8, 0.8, 0.2)
            assert (a.mean, a.std) == ((0.0,) * 3, (1.0,) * 3)
            assert (m.name, m.stem) == ("resnet50", "cifar" if cifar else "imagenet")
            assert (m.hidden, m.output, m.head_batchnorm, m.sync_batchnorm) == (2048, 128, False, True)
        if job.command == "finetune":
            f, (images, _, labeled) = c.finetune, data_of(c)
            epochs = 90 if cifar else {12_811: 60, 128_116: 30, images: 15}[labeled]
            assert (f.epochs, f.batch_size, f.lr) == (epochs, 256 if cifar else 4096, None)
            assert (f.momentum, f.nesterov, f.weight_decay) == (0.9, True, 0.0)
            assert labeled >= f.batch_size


@pytest.mark.parametrize(
    ("name", "pattern", "unlabeled", "labeled", "views", "steps", "supervised"),
    [  # on each of the paper's 64 GPUs, or on its one for CIFAR-10; updates of an epoch, epochs with labels
        ("in1k_simclr", "", 64, 0, 128, 312, 0),
        ("in1k_10pct", "", 44, 40, 128, 454, 250),
        ("in1k_1pct", "", 44, 40, 128, 454, 30),
        ("cifar10_simclr", "", 256, 0, 512, 195, 0),
        ("cifar10_suncet", "", 128, 280, 536, 390, 100),
        ("paper/in1k_cross_entropy_1pct", "*", 44, 40, 128, 454, 30),
        ("paper/in1k_swav_suncet", "", 44, 40, 44 * 8 + 40, 454, 250),
        ("paper/in1k_all_labels", "*-suncet", 64, 20, 148, 312, 100),
        ("paper/in1k_labels_alone", "*-suncet", 0, 250, 250, 80, 100),
        ("paper/in1k_paws", "*10pct*", 64, 105, 64 * 8 + 105, 312, 100),
    ],
)
def test_a_gpu_has_the_papers_batch(name, pattern, unlabeled, labeled, views, steps, supervised):
    config = train_config(name, pattern) if pattern else load_config(name)
    images, classes, with_labels = data_of(config)
    assert bool(with_labels) == bool(supervised)
    sizes = config.resolve(64 if classes == 1000 else 1, images, classes, with_labels or None)
    assert (sizes.local_unlabeled, sizes.global_labeled // sizes.world_size) == (unlabeled, labeled)
    assert sizes.update_views(True) == views * sizes.world_size
    assert (sizes.steps_per_epoch, sizes.supervised_steps) == (steps, supervised * steps)
    if name in OURS:
        assert (sizes.warmup_steps, sizes.steps) == (10 * steps, 500 * steps)
    if name in ("in1k_10pct", "in1k_1pct"):
        assert (sizes.classes_per_batch, sizes.global_images_per_class) == (20, 2 * 64)


@pytest.mark.parametrize("names", [("in1k_simclr", "in1k_10pct"), ("cifar10_simclr", "cifar10_suncet")])
def test_baseline_differs_only_in_labels_and_batch(names):
    baseline, suncet = map(load_config, names)
    changed = {key for key, _, _ in baseline.changed_keys(suncet.canonical())} - {"criterion.temperature"}
    assert {key.rpartition(".")[0] for key in changed} == {"criterion", "data.split"}
    assert baseline.criterion.temperature == suncet.criterion.temperature


@pytest.mark.parametrize(
    ("here", "run", "there"),
    [
        ("in1k_transfer", "in1k_simclr-500ep", "in1k_simclr"),
        ("in1k_transfer", "in1k_simclr-1000ep", "in1k_simclr"),
        ("in1k_transfer", "in1k_suncet_10pct-500ep", "in1k_suncet_10pct"),
        ("in1k_npi", "in1k_suncet_10pct-400ep", "in1k_suncet_10pct"),
    ],
)
def test_run_shared_by_two_files_is_the_same_run(here, run, there):
    ours, theirs = (train_config(f"paper/{name}", run) for name in (here, there))
    assert ours.run_folder == theirs.run_folder and ours.changed_keys(theirs.canonical()) == []


def identity(job: Job) -> str:
    """Return what a sweep tells the results of a job by."""
    settings = asked(job.config, job.command.split()[-1])
    return repr((job.command, job.config.run_folder, job.options, sorted(settings.items())))


def finetunings(command: str) -> set:
    return {identity(job) for job in jobs_of(command) if job.command == "finetune"}


def test_evaluations_have_different_results_unless_they_are_the_same():
    for name in SWEEPS:
        identities = [identity(job) for job in jobs_in(name) if job.command != "train"]
        assert len(set(identities)) == len(identities), name
    npi, suncet = (f"fastsuncet sweep paper/{name}" for name in ("in1k_npi", "in1k_suncet_10pct"))
    assert finetunings(npi) == finetunings(f"{suncet} --only *-400ep") != set()
    two_lists = "fastsuncet sweep paper/in1k_simclr finetune.epochs=30 --only *-100ep"
    assert len(finetunings(two_lists)) == 2
