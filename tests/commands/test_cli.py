"""The command line: what it prints, its exit codes, and how soon."""

import errno
import io
import os
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

from fastsuncet import __version__, cli
from fastsuncet.commands import help as texts
from fastsuncet.config import Config
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
    """Replace fastsuncet.commands.train: record the calls, raise `trainer.error`, or return `trainer.code`."""
    module = types.ModuleType("fastsuncet.commands.train")
    module.calls, module.code, module.error = [], 0, None

    def run(config, arguments, *, dry_run):
        module.calls.append((config, arguments, dry_run))
        if module.error is not None:
            raise module.error
        return module.code

    module.run = run
    monkeypatch.setitem(sys.modules, "fastsuncet.commands.train", module)
    return module


def command(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """Run `python -m fastsuncet words...` as a process."""
    return subprocess.run(
        [sys.executable, "-m", "fastsuncet", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        timeout=60,
    )


# ------------------------------------------------------------------------------------------------ as a process
@pytest.mark.slow
def test_train_refuses_a_wrong_config_before_torch_is_loaded():
    code = (
        "import sys; from fastsuncet.cli import main; code = main(['train', 'run.yaml', 'optimization.lrr=3']);"
        "print(code, sorted({'torch', 'nvidia', 'timm'} & set(sys.modules)))"
    )
    before = os.times().children_user
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    # CPU seconds, because other processes delay the wall clock.
    spent = os.times().children_user - before
    assert done.stdout == "2 []\n"
    assert done.stderr == (
        "error: 1 problem in the config\n\n"
        "  command line: optimization.lrr=3\n"
        "      there is no such key; did you mean optimization.lr?\n"
    )
    assert spent < 2


def test_help_ends_with_0_and_no_command_with_2():
    done = command("--help")
    assert (done.returncode, done.stdout, done.stderr) == (0, texts.overview() + "\n", "")
    done = command()
    assert (done.returncode, done.stdout) == (2, texts.overview() + "\n")


def test_data_check_of_missing_images_ends_with_3(capsys):
    Path("run.yaml").write_text(GOOD.replace("digits", "image_folder, root: nowhere"))
    assert cli.main(["data", "check", "run.yaml"]) == 3
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: no data folder nowhere/train\n")


def test_main_prints_no_traceback_for_a_closed_pipe():
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
def test_train_takes_overrides_and_options_in_any_order(words, trainer):
    assert cli.main(["train", *words]) == 0
    ((config, arguments, dry_run),) = trainer.calls
    assert (config.optimization.lr, config.meta.seed, dry_run) == (2.0, 3, True)
    assert arguments == ["train", *words]  # the same command starts the other ranks
    words = [f"{word}=step" if word == "--dry-run" else word for word in words]
    assert cli.main(["train", *words]) == 0
    assert trainer.calls[1][1:] == (["train", *words], "step")


def test_train_returns_the_exit_code_of_the_run(trainer):
    trainer.code = 75
    assert cli.main(["train", "run.yaml"]) == 75
    assert trainer.calls[0][2] is False


def test_train_takes_a_config_whose_path_has_an_equals_sign(trainer):
    Path("lr=3").mkdir()
    Path("lr=3/run.yaml").write_text(GOOD)
    assert cli.main(["train", "./lr=3/run.yaml"]) == 0


TWO_CONFIGS = "expected one config, not 2 (a.yaml, b.yaml). Write changes to it as section.key=value"
CONFIG_NEEDED = "which config? For example: fastsuncet train digits_demo"
EVALUATIONS = " or ".join(f"`fastsuncet evaluate {kind}`" for kind in ("knn", "npi", "linear", "accuracy"))


@pytest.mark.parametrize(
    ("words", "said", "command"),
    [
        ("trian run.yaml", "unknown command trian; did you mean `fastsuncet train`?", ""),
        ("check run.yaml", "unknown command check; did you mean `fastsuncet data check`?", ""),
        ("data", "unknown command data; did you mean `fastsuncet data check` or `fastsuncet data pack`?", ""),
        ("evaluate", f"unknown command evaluate; did you mean {EVALUATIONS}?", ""),
        ("data chekc", "unknown command data; did you mean `fastsuncet data check`?", ""),
        ("run.yaml", "unknown command run.yaml; did you mean `fastsuncet train run.yaml`?", ""),
        ("frobnicate", "unknown command frobnicate", ""),
        ("train", CONFIG_NEEDED, "train"),
        ("train a.yaml b.yaml", TWO_CONFIGS, "train"),
        ("train run.yaml --dryrun", "unknown argument --dryrun; did you mean --dry-run?", "train"),
        ("train run.yaml --dry", "unknown argument --dry; did you mean --dry-run?", "train"),
        ("train run.yaml --dry-run=stp", "unknown argument --dry-run=stp; did you mean --dry-run=step?", "train"),
        ("train run.yaml --zzz", "unknown argument --zzz", "train"),
        ("train run.yaml --lr 3", "unknown argument --lr; write optimization.lr=3 or finetune.lr=3", "train"),
        ("train run.yaml --warm-up=3", "unknown argument --warm-up=3; write optimization.warmup=3", "train"),
        ("train run.yaml --model.stem", "unknown argument --model.stem; write model.stem=VALUE", "train"),
        ("doctor me", "unknown argument me", "doctor"),
        ("preview run.yaml --step -1", "argument --step: must be a whole number, 0 or more, not -1", "preview"),
        ("preview run.yaml --step two", "argument --step: must be a whole number, 0 or more, not two", "preview"),
        ("demo --seed -1", "argument --seed: must be a whole number, 0 or more, not -1", "demo"),
        ("data check . meta.seed=3", ". is a folder, and a folder has no keys to override", "data check"),
    ],
)  # fmt: skip
def test_main_ends_with_2_for_a_wrong_command_line(words, said, command, capsys):
    assert cli.main(words.split()) == 2
    prog = f"fastsuncet {command}".strip()
    assert capsys.readouterr().err == f"error: {said}\nSee `{prog} --help`\n"


@pytest.mark.parametrize("name", list(cli.RUN))
def test_help_of_every_command(name, capsys):
    above, below = texts.help_of(name)
    assert cli.main([*name.split(), "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: fastsuncet {name}")
    assert above in said and below in said and "exit codes:" in below
    assert f"\n  {name} " in texts.overview()
    assert cli.main(["help", *name.split()]) == 0
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("group", ["data", "evaluate"])
def test_help_of_a_group_lists_its_commands(group, capsys):
    assert cli.main([group, "--help"]) == cli.main(["help", group]) == 0
    said = capsys.readouterr().out
    for name in cli.RUN:
        assert (f"\n  {name} " in said) == name.startswith(f"{group} ")


@pytest.mark.parametrize("name", ["", *cli.RUN])
def test_help_fits_100_columns(name, capsys):
    assert cli.main([*name.split(), "--help"]) == cli.main(["help"]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if len(line) > 100] == []


def test_help_examples_run(trainer, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(Config, "require_data", lambda config: None)  # /data/imagenet
    text = "\n".join(texts.TEXTS.values())
    lines = [
        line.strip().split("    ")[0] for line in text.splitlines() if line.startswith("  fastsuncet train ")
    ]
    assert len(lines) >= 4
    for line in lines:
        if "my.yaml" not in line:
            assert cli.main(shlex.split(line)[1:]) == 0


def test_help_exit_codes_are_those_of_the_errors():
    for error in (ConfigError, DataError, NumericalError, CheckpointError, Preempted):
        assert f"\n  {error.exit_code} " in texts.help_of("train")[1]


def test_version_has_one_fact_on_a_line(capsys):
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
def test_main_prints_a_failure_and_returns_its_code(error, code, trainer, capsys):
    trainer.error = error
    assert cli.main(["train", "run.yaml"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EACCES, "Permission denied: runs/x/meta.json. Check the owner and mode of the folder"),
        (errno.EROFS, "Read-only file system: runs/x/meta.json. Check the owner and mode of the folder"),
        (errno.ENOSPC, "No space left on device: runs/x/meta.json. Free some disk space"),
    ],
)
def test_main_explains_os_errors_that_the_user_can_fix(number, said, trainer, capsys):
    trainer.error = OSError(number, os.strerror(number), "runs/x/meta.json")
    assert cli.main(["train", "run.yaml"]) == 5
    assert capsys.readouterr().err == f"error: {said}, or choose another folder\n"


@pytest.mark.parametrize("error", [IndexError("a bug"), OSError(errno.EIO, "Input/output error", "runs/x")])
def test_main_keeps_the_traceback_of_a_bug(error, trainer):
    trainer.error = error
    with pytest.raises(type(error)):
        cli.main(["train", "run.yaml"])


def test_main_prints_a_traceback_if_asked(trainer, capsys, monkeypatch):
    trainer.error = DataError("no such folder")
    monkeypatch.setenv("FASTSUNCET_TRACEBACK", "1")
    assert cli.main(["train", "run.yaml"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("\nerror: no such folder\n")


def test_main_names_the_rank(trainer, capsys, monkeypatch):
    trainer.error = DataError("no such folder")
    monkeypatch.setenv("RANK", "3")
    assert cli.main(["train", "run.yaml"]) == 3
    assert capsys.readouterr().err == "[rank 3] error: no such folder\n"


def test_main_ends_with_130_for_an_interrupt(trainer, capsys):
    trainer.error = KeyboardInterrupt()
    assert cli.main(["train", "run.yaml"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("number", [1, 2])
def test_main_ends_on_sigterm_also_as_process_1(number):
    # The kernel drops a signal that process 1 does not handle. Here os.getpid() returns that number.
    script = (
        f"import os, signal\nos.getpid = lambda: {number}\nfrom fastsuncet import cli\n"
        "cli.main(['version'])\n"
        "assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (os.getpid() != 1)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == (143 if number == 1 else -15), process.stderr


def test_main_prints_names_that_the_encoding_lacks(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: print("wrote \u00e4.png") or 0)
    assert cli.main([]) == 0
    assert stream.buffer.getvalue() == b"wrote \\xe4.png\n"


def test_main_escapes_control_characters_in_a_message(trainer, capsys):
    trainer.error = DataError("bad\x1b[2J.png is missing")
    assert cli.main(["train", "run.yaml"]) == 3
    assert r"bad\x1b[2J.png is missing" in capsys.readouterr().err


MISSING = {
    "data.root": ("data.kind=image_folder", "data.root=/nowhere/images"),
    "data.csv": ("data.kind=csv", "data.root=.", "data.csv=labels.csv"),
    "data.split.file": (
        "data.kind=image_folder",
        "data.root=.",
        "data.split.kind=names",
        "data.split.file=ten.txt",
    ),
}


def test_train_names_missing_data_before_torch_is_imported():
    commands = [["train", "run.yaml", *words] for words in MISSING.values()]
    program = (
        f"import sys; from fastsuncet.cli import main; codes = [main(words) for words in {commands}]; "
        "sys.exit('torch' in sys.modules or codes != [3, 3, 3])"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    for *_, name in MISSING.values():
        assert name in process.stderr and f" {name.partition('=')[2]}" in process.stderr
