"""The map of the paper's results: all 28 rows, each with configs that load, commands that parse, costs that add up."""

import re
import shlex
import sys
import types
from pathlib import Path

import pytest

from fastsuncet import cli
from fastsuncet.commands.sweep.jobs import _mark
from fastsuncet.config import load_config
from tests.config.test_shipped_configs import PROFILE, hyper
from tools.paper import hours as paper_hours
from tools.paper.hours import (
    GPUS,
    IMAGENET,
    between_the_marks,
    cost,
    hours,
    jobs_of,
    runs_of,
    sizes,
)
from tools.paper.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "paper"
DOCUMENT = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
SWEEPS = [name for name in FILES if re.search(r"^commands:", (FOLDER / name).read_text(), re.M)]
LINES = [line for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, re.S) for line in block.splitlines()]


def jobs(name: str):
    return jobs_of(f"fastsuncet {'sweep' if name in SWEEPS else 'train'} configs/paper/{name}")


def header(name: str) -> str:
    """The comment a file opens with, without its marks."""
    lines = (FOLDER / name).read_text().split("\n\n")[0].splitlines()
    return "\n".join(line.lstrip("#").strip() for line in lines)


# ------------------------------------------------------------------------------------------------------- the document
def test_the_table_has_the_28_rows_and_says_of_each_whether_it_was_run():
    rows = [line.split(" | ") for line in DOCUMENT.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(1, 29))
    for row in rows:
        assert len(row) == 7
        assert row[6].rstrip(" |") == "not run" or "RESULTS.md" in row[6]


def test_the_tables_are_the_tools_to_the_last_character():
    assert between_the_marks() in DOCUMENT, "run `python tools/paper/hours.py --write`"


def test_the_hours_are_called_arithmetic_and_their_one_assumption_is_named_with_its_source():
    said = " ".join(DOCUMENT.split())
    assert "The hours are arithmetic, not a measurement." in said
    assert "18.2 teraFLOP/s" in said and f"{paper_hours.SUSTAINED / 1e12:.1f}" == "18.2"
    assert "741 views of 224 pixels a second on each of 8 A100" in said and "arXiv 2303.01986" in said
    assert f"{16_621 / 8:,.0f} images a second" in said.replace(" on the same card", "")
    assert round(741 / (16_621 / 8), 2) == 0.36


def test_every_link_leads_somewhere():
    for link in re.findall(r"\]\((?!http)([^)#]+)\)", DOCUMENT):
        assert (ROOT / "docs" / link).resolve().exists(), link


def test_every_config_of_the_paper_is_in_some_row():
    named = {name for row in ROWS for name in paper_hours.files_of(row)}
    assert named == {f"configs/paper/{name}" for name in FILES}


def test_every_command_of_every_row_stands_in_the_document():
    assert set(LINES) == {command.strip() for row in ROWS for command in row.commands}


@pytest.fixture
def backends(monkeypatch):
    """Stands in for all that would touch data; notes the names of what was reached."""
    reached = []

    def module(name: str, function: str) -> None:
        fake = types.ModuleType(name)
        setattr(fake, function, lambda *arguments, **options: reached.append(function) or 0)
        monkeypatch.setitem(sys.modules, name, fake)

    for name in ("run", "finetune", "transfer", "report"):
        module(f"fastsuncet.{name}", name)
    grid = types.ModuleType("fastsuncet.evaluation.transfer_grid.grid")
    grid.parse_shard = lambda text: (1, 1)
    monkeypatch.setitem(sys.modules, "fastsuncet.evaluation.transfer_grid.grid", grid)
    module("fastsuncet.commands.evaluate", "evaluate")
    paper = types.ModuleType("fastsuncet.commands.report.paper")
    paper.TEN, paper.ONE = "imagenet-10pct", "imagenet-1pct"
    sys.modules["fastsuncet.commands.report"].paper = paper
    monkeypatch.setitem(sys.modules, "fastsuncet.commands.report.paper", paper)
    return reached


@pytest.mark.parametrize("line", sorted(set(LINES)))
def test_every_command_line_is_one_that_the_program_reads(line, backends, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    first, command, *words = shlex.split(line)
    assert first == "fastsuncet"
    if command == "sweep":
        assert cli.main([command, *words, "--dry-run"]) == 0, capsys.readouterr().err
        assert "every config is sound" in capsys.readouterr().out
    else:
        assert cli.main([command, *words]) == 0, capsys.readouterr().err
        assert backends == [{"train": "run"}.get(command, command)]


@pytest.mark.parametrize("name", FILES)
def test_every_command_that_a_sweep_would_run_is_one_that_the_program_reads(
    name, backends, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    reached = {"train": "run", "finetune": "finetune", "transfer": "transfer"}
    for job in {job.command: job for job in jobs(name)}.values():
        words = [word.replace(f"{ROOT}/", "") for word in job.arguments]
        assert cli.main(words) == 0, capsys.readouterr().err
        assert backends.pop() == reached.get(job.command, "evaluate")


# --------------------------------------------------------------------------------------------------------- the configs
@pytest.mark.parametrize("name", FILES)
def test_a_config_opens_as_a_page_of_the_lab_book_with_a_command_that_is_sound(name):
    page = header(name)
    assert re.match(r"(ImageNet|CIFAR-10)", page)
    for entry in ("Paper ", "Hardware ", "Hours ", "Accuracy ", "Command "):
        assert f"\n{entry}" in page
    numbers = {row.number for row in ROWS if f"configs/paper/{name}" in paper_hours.files_of(row)}
    (said,) = re.findall(r"rows? ([\d, and]+) of docs/paper.md", " ".join(page.split()))
    claimed = {int(number) for number in re.findall(r"\d+", said)}
    assert claimed <= numbers and claimed, f"{name} says it is of rows {claimed}"
    lines = re.findall(r"fastsuncet (train|sweep|finetune) (.*)", page.replace("\\\n", " "))
    assert lines
    for command, rest in lines:
        assert jobs_of(f"fastsuncet {command} {rest}")
        assert Path(shlex.split(rest)[0]).name == name


@pytest.mark.parametrize("name", FILES)
def test_every_run_fits_its_data_set_and_machine(name):
    for job in jobs(name):
        a = sizes(job.config)
        assert a.steps > a.warmup_steps >= 0
        assert a.world_size == (1 if name.startswith("cifar10") else GPUS)
        if job.command == "finetune":
            assert paper_hours.counts(job.config)[2] >= job.config.finetune.batch_size


IMAGENET_RUNS = [name for name in FILES if name.startswith("in1k") and "swav" not in name]


@pytest.mark.parametrize("name", [n for n in FILES if n != "in1k_swav.yaml"])
def test_the_papers_hyper_parameters_are_left_alone(name):
    for job in (
        job for job in jobs(name) if job.command == "train" and job.config.optimization.steps is None
    ):
        cifar = name.startswith("cifar10")
        lr, tau = ((0.125, 1.0, 0.0, 10), 0.5) if cifar else ((0.6, 4.8, 0.0, 10), 0.1)
        expected = {**PROFILE, "lr": lr, "tau": tau, "epochs": job.config.optimization.epochs}
        assert hyper(job.config) == expected


def one(name: str, run: str = "*"):
    """The config of a file's training whose run is called so."""
    (job, *_) = [
        j for j in jobs_of(f"fastsuncet sweep configs/paper/{name} --only {run}") if j.command == "train"
    ]
    return job.config


@pytest.mark.parametrize(
    ("config", "unlabeled", "labeled", "views"),
    [  # on each of the paper's 64 GPUs
        (one("in1k_simclr.yaml"), 64, 0, 128),
        (one("in1k_suncet_10pct.yaml"), 44, 40, 128),
        (one("in1k_cross_entropy_1pct.yaml"), 44, 40, 128),
        (load_config(FOLDER / "in1k_swav_suncet.yaml"), 44, 40, 44 * 8 + 40),
        (one("in1k_all_labels.yaml", "*-suncet"), 64, 20, 148),
        (one("in1k_labels_alone.yaml", "*-suncet"), 0, 250, 250),
    ],
)
def test_a_gpu_of_64_has_the_papers_batch(config, unlabeled, labeled, views):
    a = config.resolve(64, *IMAGENET, 128_116 if config.criterion.instance != "none" else None)
    assert (a.local_unlabeled, a.local_labeled, a.samples(0)) == (unlabeled, labeled, views * 64)


def test_the_labels_of_every_run_are_the_papers():
    kinds = {}
    for row in ROWS:
        for command in row.commands:
            for job in jobs_of(command):
                split = job.config.data.split
                labels = Path(split.file).name if split.file else split.fraction or split.kind
                kinds.setdefault((row.number, job.command), set()).add(labels)
    assert kinds[1, "train"] == {"none"} and kinds[1, "finetune"] == {"10percent.txt", "1percent.txt"}
    assert kinds[3, "train"] == kinds[3, "finetune"] == {"10percent.txt"}
    assert kinds[6, "train"] == kinds[13, "finetune"] == {"1percent.txt"}
    p = {0.01, 0.05, 0.1, 0.2, 0.5, 1.0}
    assert kinds[17, "train"] == {"none"}
    assert kinds[17, "finetune"] == kinds[18, "train"] == kinds[23, "finetune"] == p
    assert kinds[27, "train"] == kinds[28, "finetune"] == {"all"}


def test_fine_tuning_has_appendix_bs_numbers():
    for name in SWEEPS:
        for job in (job for job in jobs(name) if job.command == "finetune"):
            f = job.config.finetune
            images = paper_hours.counts(job.config)[2]
            cifar = name.startswith("cifar10")
            epochs = 90 if cifar else {12_811: 60, 128_116: 30, IMAGENET[0]: 15}[images]
            assert (f.epochs, f.batch_size, f.lr) == (epochs, 256 if cifar else 4096, None), name
            assert (f.momentum, f.nesterov, f.weight_decay) == (0.9, True, 0.0)


def test_the_labeled_passes_are_the_same_whatever_the_labeled_share():
    for name, epochs in (("in1k_labeled_share_10pct.yaml", 250), ("in1k_labeled_share_1pct.yaml", 30)):
        for run in runs_of(f"configs/paper/{name}"):
            a = sizes(run.jobs[0].config)
            passes = a.supervised_steps * a.global_labeled
            assert passes == pytest.approx(epochs * 454 * 2560, rel=1e-3)
            assert a.samples(0) == pytest.approx(8192, rel=0.01)
            share = a.global_labeled / a.samples(0)
            assert share == pytest.approx(run.jobs[0].config.criterion.labeled_share, abs=0.012)


def test_runs_that_two_files_share_are_the_same_run():
    shared = [
        ("in1k_transfer.yaml", "in1k_simclr-500ep", "in1k_simclr.yaml"),
        ("in1k_transfer.yaml", "in1k_simclr-1000ep", "in1k_simclr.yaml"),
        ("in1k_transfer.yaml", "in1k_suncet_10pct-500ep", "in1k_suncet_10pct.yaml"),
        ("in1k_npi.yaml", "in1k_suncet_10pct-400ep", "in1k_suncet_10pct.yaml"),
    ]
    for here, run, there in shared:
        ours, theirs = one(here, run), one(there, run)
        assert ours.run_folder == theirs.run_folder
        assert ours.changed_keys(theirs.canonical()) == []


@pytest.mark.parametrize("name", SWEEPS)
def test_no_evaluation_of_a_sweep_is_taken_for_another_one(name):
    marks = [_mark(job) for job in jobs(name) if job.command != "train"]
    assert len(set(marks)) == len(marks)


def test_fine_tunings_on_two_lists_of_labels_are_two():
    command = "fastsuncet sweep configs/paper/in1k_simclr.yaml finetune.epochs=30 --only *-100ep"
    assert len({_mark(job) for job in jobs_of(command) if job.command == "finetune"}) == 2


def test_an_evaluation_that_two_files_share_is_the_same_one():
    ours, theirs = (
        {
            _mark(job)
            for job in jobs(name)
            if job.command == "finetune" and job.config.optimization.epochs == 400
        }
        for name in ("in1k_npi.yaml", "in1k_suncet_10pct.yaml")
    )
    assert ours == theirs != set()


# ----------------------------------------------------------------------------------------------------------- the costs
def trained(command: str) -> float:
    return sum(paper_hours.petaflops(job) for job in jobs_of(command) if job.command == "train")


def test_a_simclr_epoch_costs_what_the_recipe_says():
    # Recipe section 6: 62.7 petaFLOPs an epoch of ImageNet's SimCLR, 390 the CIFAR-10 run.
    epoch = 312 * 8192 * 6 * 4.0916e9 / 1e15
    assert trained("fastsuncet sweep configs/paper/in1k_simclr.yaml --only *-100ep") == pytest.approx(
        100 * epoch, rel=1e-4
    )
    assert trained("fastsuncet sweep configs/paper/cifar10_simclr.yaml") == pytest.approx(390, rel=0.001)


@pytest.mark.parametrize(
    ("epochs", "simclr"), [(100, 145.5), (200, 291), (300, 413.8), (400, 513.8), (500, 613.9)]
)
def test_a_suncet_run_costs_its_equivalent_of_simclr_epochs(epochs, simclr):
    spent = trained(f"fastsuncet sweep configs/paper/in1k_suncet_10pct.yaml --only *-{epochs}ep")
    hundred = trained("fastsuncet sweep configs/paper/in1k_simclr.yaml --only *-100ep")
    assert spent / hundred * 100 == pytest.approx(simclr, abs=0.1)


def test_an_hour_is_8_gpus_at_the_assumed_rate():
    # By construction of the assumption: 100 epochs of SimCLR, 256 million views, in about 12 hours.
    spent = trained("fastsuncet sweep configs/paper/in1k_simclr.yaml --only *-100ep")
    assert hours(spent) == pytest.approx(100 * 312 * 8192 / (8 * 741) / 3600, rel=1e-6)
    assert 11.5 < hours(spent) < 12.5


def test_fine_tuning_and_transfer_are_counted_by_hand():
    encoder = 4_087_136_256 + 2048 * 1000  # multiply-adds of one image and the classifier
    finetune = [
        j for j in jobs_of("fastsuncet sweep configs/paper/in1k_suncet_10pct.yaml") if j.command == "finetune"
    ]
    assert paper_hours.petaflops(finetune[0]) == pytest.approx(30 * 31 * 4096 * 6 * encoder / 1e15, rel=1e-9)
    (transfer,) = [j for j in jobs_of(f"{ROWS[13].commands[0]}") if j.command == "transfer"]
    fits = 57 * 20_000 * 256 * 6 * (3 * 4_087_136_256 + 2048 * (10 + 100 + 20)) / 1e15
    assert paper_hours.petaflops(transfer) == pytest.approx(fits, rel=1e-9)
    cifar = [
        j for j in jobs_of("fastsuncet sweep configs/paper/cifar10_simclr.yaml") if j.command == "finetune"
    ]
    assert [paper_hours.checkpoints(job.config) for job in cifar] == [10] * 6
    one_percent = 10 * 90 * 512 * 6 * (1_297_809_408 + 20_480) / 1e15  # 520 labeled images: 2 batches of 256
    assert paper_hours.petaflops(cifar[0]) == pytest.approx(one_percent, rel=1e-3)


def test_what_rows_share_is_counted_once():
    by_number = {row.number: row for row in ROWS}
    assert cost([by_number[1], by_number[4]]) == cost([by_number[1]])
    assert cost([by_number[7], by_number[8]]) == pytest.approx(cost([by_number[10]]))
    assert cost([by_number[26], by_number[8]]) == pytest.approx(cost([by_number[8]]))
    assert cost(ROWS) < sum(cost([row]) for row in ROWS)


# ------------------------------------------------------------------------------------------- on real images, in small
TINY = [
    "data.kind=digits",
    "data.root=null",
    "data.split.kind=all",
    "data.split.file=null",
    "data.split.fraction=null",
    "data.augmentation.size=16",
    "data.augmentation.blur=0",
    "model.name=resnet_tiny",
    "model.hidden=32",
    "model.output=16",
    "optimization.epochs=11",
    "optimization.warmup=1",
    "meta.precision=fp32",
    "meta.threads=1",
]
LABELS = ["criterion.classes_per_batch=10", "criterion.supervised_imgs_per_class=2"]
UNLABELED = ["criterion.unsupervised_batch_size=64"]


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        (
            "in1k_swav_suncet.yaml",
            [*UNLABELED, *LABELS, "swav.small_size=8", "criterion.supervised_epochs=3"],
            "steps    22 an epoch, 242 in all; SwAV + SuNCEt for the first 66",
        ),
        ("in1k_swav.yaml", [*UNLABELED, "swav.small_size=8"], "steps    22 an epoch, 242 in all; SwAV"),
    ],
)
def test_a_dry_run_on_digits_plans_what_the_page_says(name, overrides, said, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert cli.main(["train", f"configs/paper/{name}", "--dry-run", *TINY, *overrides]) == 0, (
        capsys.readouterr().err
    )
    out = capsys.readouterr().out
    assert said in out and "nothing was trained" in out


@pytest.mark.parametrize(
    ("run", "overrides", "method"),
    [
        ("in1k_cross_entropy_10pct.yaml:*-100ep", [*UNLABELED, *LABELS], "SimCLR + cross-entropy"),
        ("in1k_all_labels.yaml:*-sup_con", [*UNLABELED, *LABELS], "SimCLR + L_sup_out"),
        ("in1k_labels_alone.yaml:*-suncet", LABELS, "SuNCEt"),
        ("in1k_labels_alone.yaml:*-sup_con-batchnorm", LABELS, "L_sup_out"),
        ("cifar10_suncet.yaml:*-p100", [*UNLABELED, *LABELS, "data.download=false"], "SimCLR + SuNCEt"),
        ("cifar10_simclr.yaml:*", [*UNLABELED, "data.download=false"], "SimCLR"),
    ],
)
def test_a_dry_run_of_a_sweeps_run_on_digits_names_its_method(run, overrides, method, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    name, _, pattern = run.partition(":")
    (job, *_) = jobs_of(f"fastsuncet sweep configs/paper/{name} --only {pattern}")
    words = [word.replace(f"{ROOT}/", "") for word in job.arguments]
    assert cli.main([*words, "--dry-run", *TINY, *overrides]) == 0, capsys.readouterr().err
    (steps,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("steps ")]
    assert steps.split("; ")[1].split(" for the first")[0].split(",")[0] == method
