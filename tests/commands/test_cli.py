"""The command line: what it says, what it ends with, and how soon."""

import errno
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fastsuncet import __version__, cli
from fastsuncet.commands import help as cli_help
from fastsuncet.errors import CheckpointError, ConfigError, NumericalError, Preempted
from pipelines.data_errors import BadImage, DataError

ROOT = Path(__file__).parents[2]
GOOD = """\
data: {kind: digits}
criterion: {temperature: 0.1, unsupervised_batch_size: 256}
optimization: {epochs: 100, lr: 1.0}
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("FASTSUNCET_TRACEBACK", raising=False)
    Path("run.yaml").write_text(GOOD)


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for fastsuncet.commands.train: records how it was called, and does what `trainer.does` says."""
    module = types.ModuleType("fastsuncet.commands.train")
    module.calls, module.does = [], lambda: 0

    def run(config, arguments, *, dry_run):
        module.calls.append((config, arguments, dry_run))
        return module.does()

    module.run = run
    monkeypatch.setitem(sys.modules, "fastsuncet.commands.train", module)
    return module


def command(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """`python -m fastsuncet words...` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "fastsuncet", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=60,
    )


# ------------------------------------------------------------------------------------------------ as a person meets it
def test_a_wrong_config_is_refused_within_two_seconds_and_before_torch_is_loaded():
    code = (
        "import sys; from fastsuncet.cli import main; code = main(['train', 'run.yaml', 'optimization.lrr=3']);"
        "print(code, sorted({'torch', 'nvidia', 'numpy', 'timm'} & set(sys.modules)))"
    )
    before = os.times().children_user
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    # CPU seconds: the clock on the wall counts the neighbours' work too.
    spent = os.times().children_user - before
    assert done.stdout == "2 []\n"
    assert done.stderr == (
        "error: 1 problem in the config\n\n"
        "  command line: optimization.lrr=3\n"
        "      there is no such key; did you mean optimization.lr?\n"
    )
    assert spent < 2


def test_help_ends_with_0_and_no_command_at_all_with_2():
    done = command("--help")
    assert (done.returncode, done.stdout, done.stderr) == (0, cli_help.OVERVIEW + "\n", "")
    done = command()
    assert (done.returncode, done.stdout) == (2, cli_help.OVERVIEW + "\n")


def test_missing_images_end_with_3_and_name_the_folder():
    Path("run.yaml").write_text(GOOD.replace("digits", "image_folder, root: nowhere"))
    done = command("data", "check", "run.yaml")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "error: no data folder nowhere/train\n"


def test_a_reader_that_goes_away_gets_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)  # what `| head` does once it has read enough
    done = subprocess.run(
        [sys.executable, "-m", "fastsuncet", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


# ------------------------------------------------------------------------------------------------------- what it reads
@pytest.mark.parametrize(
    "words",
    [
        ["run.yaml", "optimization.lr=2", "meta.seed=3", "--dry-run"],
        ["--dry-run", "run.yaml", "optimization.lr=2", "meta.seed=3"],
        ["run.yaml", "optimization.lr=2", "--dry-run", "meta.seed=3"],
        ["optimization.lr=2", "--dry-run", "meta.seed=3", "run.yaml"],
    ],
)
def test_overrides_and_options_come_in_any_order(words, trainer):
    assert cli.main(["train", *words]) == 0
    ((config, arguments, dry_run),) = trainer.calls
    assert (config.optimization.lr, config.meta.seed, dry_run) == (2.0, 3, True)
    assert arguments == ["train", *words]  # the same command starts the other ranks


def test_without_the_option_it_trains_and_returns_the_code_of_the_run(trainer):
    trainer.does = lambda: 75
    assert cli.main(["train", "run.yaml"]) == 75
    assert trainer.calls[0][2] is False


def test_a_config_whose_path_holds_an_equals_sign_is_still_a_config(trainer):
    Path("lr=3").mkdir()
    Path("lr=3/run.yaml").write_text(GOOD)
    assert cli.main(["train", "./lr=3/run.yaml"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["trian", "run.yaml"],
            "there is no command trian; did you mean `fastsuncet train`?\n`fastsuncet --help`",
        ),
        (
            ["check", "run.yaml"],
            "there is no command check; did you mean `fastsuncet data check`?\n`fastsuncet --help`",
        ),
        (
            ["data"],
            "there is no command data; did you mean `fastsuncet data check` or `fastsuncet data pack`?\n"
            "`fastsuncet --help`",
        ),
        (
            ["evaluate", "--help"],
            "there is no command evaluate; did you mean `fastsuncet evaluate knn` or `fastsuncet evaluate npi` or "
            "`fastsuncet evaluate linear` or `fastsuncet evaluate accuracy`?\n`fastsuncet --help`",
        ),
        (
            ["data", "chekc"],
            "there is no command data; did you mean `fastsuncet data check`?\n`fastsuncet --help`",
        ),
        (
            ["run.yaml"],
            "there is no command run.yaml; did you mean `fastsuncet train run.yaml`?\n`fastsuncet --help`",
        ),
        (["frobnicate"], "there is no command frobnicate\n`fastsuncet --help`"),
        (
            ["train"],
            "which config? For example: fastsuncet train configs/digits_demo.yaml\n`fastsuncet train --help`",
        ),
        (
            ["train", "a.yaml", "b.yaml"],
            "one config at a time, not 2 (a.yaml, b.yaml); what to change in it is written section.key=value\n"
            "`fastsuncet train --help`",
        ),
        (
            ["train", "run.yaml", "--dryrun"],
            "--dryrun is not read here; did you mean --dry-run?\n`fastsuncet train --help`",
        ),
        (
            ["train", "run.yaml", "--dry"],
            "--dry is not read here; did you mean --dry-run?\n`fastsuncet train --help`",
        ),
        (["train", "run.yaml", "--zzz"], "--zzz is not read here\n`fastsuncet train --help`"),
        (["doctor", "me"], "me is not read here\n`fastsuncet doctor --help`"),
        (
            ["preview", "run.yaml", "--step", "-1"],
            "--step is a whole number, 0 or more, not -1\n`fastsuncet preview --help`",
        ),
        (
            ["preview", "run.yaml", "--step", "two"],
            "argument --step: invalid int value: 'two'\n`fastsuncet preview --help`",
        ),
        (
            ["data", "check", ".", "meta.seed=3"],
            ". is a folder, and a folder has no keys to override\n`fastsuncet data check --help`",
        ),
    ],
)
def test_a_command_line_that_cannot_be_understood_ends_with_2_and_a_way_on(words, said, capsys):
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"error: {said} shows what there is\n"


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_explains_itself(name, capsys):
    assert cli.main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: fastsuncet {name}")
    assert cli.COMMANDS[name][1].purpose in said
    assert f"\n  {name} " in cli_help.OVERVIEW or f"\n  {name}\n" in cli_help.OVERVIEW


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
def test_help_fits_a_terminal_of_100_columns(name, capsys):
    assert cli.main([*name.split(), "--help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 100] == []


def test_the_examples_in_the_help_are_sound(trainer, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = "\n".join([cli_help.OVERVIEW, *(text.more for _, text in cli.COMMANDS.values())])
    lines = [
        line.strip().split("    ")[0] for line in text.splitlines() if line.startswith("  fastsuncet train ")
    ]
    assert len(lines) >= 4
    for line in lines:
        if "my.yaml" not in line:
            assert cli.main(shlex.split(line)[1:]) == 0


def test_the_exit_codes_in_the_help_are_those_of_the_errors():
    for error in (ConfigError, DataError, NumericalError, CheckpointError, Preempted):
        assert f"\n  {error.exit_code} " in cli_help.EXIT_CODES
    assert cli_help.EXIT_CODES in cli_help.TRAIN.more


def test_version_is_one_fact_a_line(capsys):
    assert cli.main(["version"]) == 0
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert (first, second) == (f"fastsuncet {__version__}", f"python {sys.version.split()[0]}")
    assert any(line.startswith("torch 2.") for line in rest)
    assert cli.main(["--version"]) == 0


# ------------------------------------------------------------------------------------------------------ how it ends
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("no such device"), 2),
        (DataError("no such folder"), 3),
        (BadImage([("a.jpg", "cut short")], 7), 3),
        (NumericalError("nt_xent is nan at step 3"), 4),
        (CheckpointError("the disk is full"), 5),
        (Preempted("stopped by SIGTERM after step 12"), 75),
    ],
)
def test_each_failure_has_its_code_and_its_words_without_a_traceback(error, code, trainer, capsys):
    def fail():
        raise error

    trainer.does = fail
    assert cli.main(["train", "run.yaml"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_a_place_that_is_full_or_forbidden_is_a_message_and_any_other_error_of_a_file_is_a_bug(
    trainer, capsys
):
    def fails(number: int):
        raise OSError(number, os.strerror(number), "runs/x/meta.json")

    for number, advice in (
        (errno.EACCES, "This user may not do that"),
        (errno.EROFS, "This user may not do that"),
        (errno.ENOSPC, "Free some room"),
    ):
        trainer.does = lambda number=number: fails(number)
        assert cli.main(["train", "run.yaml"]) == 5
        said = capsys.readouterr().err
        assert said.startswith("error: [Errno") and "'runs/x/meta.json'. " + advice in said
    trainer.does = lambda: fails(errno.EIO)
    with pytest.raises(OSError):
        cli.main(["train", "run.yaml"])


def test_a_traceback_is_shown_to_who_asks_for_it(trainer, capsys, monkeypatch):
    def fail():
        raise DataError("no such folder")

    trainer.does = fail
    monkeypatch.setenv("FASTSUNCET_TRACEBACK", "1")
    assert cli.main(["train", "run.yaml"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("\nerror: no such folder\n")


def test_one_of_several_ranks_says_which_it_is(trainer, capsys, monkeypatch):
    def fail():
        raise DataError("no such folder")

    trainer.does = fail
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["train", "run.yaml"]) == 3
    assert capsys.readouterr().err == "[rank 3] error: no such folder\n"


def test_an_interrupt_ends_with_130(trainer, capsys):
    def fail():
        raise KeyboardInterrupt

    trainer.does = fail
    assert cli.main(["train", "run.yaml"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_bug_keeps_its_traceback(trainer):
    def fail():
        raise IndexError("a bug")

    trainer.does = fail
    with pytest.raises(IndexError):
        cli.main(["train", "run.yaml"])


@pytest.mark.parametrize("number", [1, 2])
def test_a_signal_that_no_command_asks_for_ends_process_1_of_a_container_too(number):
    # The kernel drops a signal that process 1 does not handle. Here the process is told its number, and looked at.
    script = (
        f"import os, signal\nos.getpid = lambda: {number}\nfrom fastsuncet import cli\n"
        "cli.main(['version'])\n"
        "assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (os.getpid() != 1)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == (143 if number == 1 else -15), process.stderr
