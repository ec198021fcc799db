"""The command line: what it prints, its exit codes, and how soon."""

import errno
import io
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from fastsuncet import cli
from fastsuncet.cli._parser import EXIT_CODES, Parser, overview
from fastsuncet.commands import dry_run, ranks
from fastsuncet.distributed import launch
from fastsuncet.errors import CheckpointError, ConfigError, NumericalError, Preempted
from pipelines.data_errors import BadImage, DataError

ROOT = Path(__file__).parents[2]
GOOD = """\
data: {kind: digits}
criterion: {temperature: 0.1, unsupervised_batch_size: 256}
optimization: {epochs: 100, lr: 1.0}
"""


@pytest.fixture(autouse=True)
def _config(_empty_folder):
    Path("run.yaml").write_text(GOOD)


@pytest.fixture
def trainer(monkeypatch):
    """Replace what trains or makes a plan: record the calls, and raise `trainer.error`."""
    trainer = types.SimpleNamespace(calls=[], error=None)

    def run(config, arguments, **plan):
        trainer.calls.append((config, arguments, plan))
        if trainer.error is not None:
            raise trainer.error

    for name in ("train", "dry_run"):
        module = types.ModuleType(f"fastsuncet.commands.{name}")
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return trainer


def python(code: str, streams: str = "", **options) -> subprocess.CompletedProcess:
    """Run `code` in a process whose streams the shell opens or closes as `streams` says."""
    command = ["sh", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, stderr=subprocess.PIPE, **options)


FOLDER_DATA = "data.kind=image_folder"
MISSING = {
    "data.root": (FOLDER_DATA, "data.root=/nowhere/images"),
    "data.csv": ("data.kind=csv", "data.root=.", "data.csv=labels.csv"),
    "data.split.file": (FOLDER_DATA, "data.root=.", "data.split.kind=names", "data.split.file=ten.txt"),
}


@pytest.mark.slow
def test_train_refuses_a_wrong_config_and_missing_data_before_torch_is_loaded():
    commands = [["train", "run.yaml", *words] for words in (["optimization.lrr=3"], *MISSING.values())]
    before = os.times().children_user
    done = python(
        f"import sys; from fastsuncet.cli import main; print([main(words) for words in {commands}], "
        "sorted({'torch', 'nvidia', 'timm'} & set(sys.modules)))",
        stdout=subprocess.PIPE,
        text=True,
    )
    # CPU seconds, because other processes delay the wall clock.
    assert os.times().children_user - before < 3
    assert done.stdout == "[2, 3, 3, 3] []\n"
    config, *data = done.stderr.split("error: ")[1:]
    assert config == (
        "1 problem in the config\n\n"
        "  command line: optimization.lrr=3\n"
        "      there is no such key; did you mean optimization.lr?\n"
    )
    for (key, (*_, word)), error in zip(MISSING.items(), data, strict=True):
        assert key in error and word.partition("=")[2] in error


def test_no_command_prints_the_overview_and_ends_with_2(capsys):
    for words, code in (["--help"], 0), ([], 2):
        assert cli.main(words) == code
        assert capsys.readouterr() == (overview(cli.COMMANDS) + "\n", "")


def test_command_that_returns_no_number_ends_with_0(monkeypatch):
    """fastsuncet.commands.demo.demo returns its curves."""
    module, asked = types.ModuleType("fastsuncet.commands.demo"), []
    module.demo = lambda folder, **others: asked.append((folder, others)) or [folder]
    monkeypatch.setitem(sys.modules, "fastsuncet.commands.demo", module)
    assert cli.main(["demo", "--seed", "2", "meta.threads=1"]) == 0
    assert asked == [(Path("runs/demo"), {"seed": 2, "overrides": ["meta.threads=1"]})]


def test_command_of_one_process_runs_on_rank_0_only(monkeypatch, capsys):
    """Under torchrun its ranks would write to the same files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert cli.main(["--version"]) == 0
    out, err = capsys.readouterr()
    assert out.count("fastsuncet ") == 1 and os.environ["WORLD_SIZE"] == "1"
    assert err == "[rank 1] `fastsuncet version` takes one process: only rank 0 runs it\n"


def test_main_prints_no_traceback_for_a_closed_pipe():
    reading, writing = os.pipe()
    os.close(reading)  # what `| head` does once it has read enough
    done = python("import sys; from fastsuncet.cli import main; sys.exit(main(['--help']))", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(("lost", "left"), [("stderr", "out"), ("stdout", "err")])
def test_main_goes_on_with_the_stream_that_is_left(monkeypatch, capsys, lost, left):
    for words, code in (["configs"], 0), (["config", "zzz"], 2):
        monkeypatch.setattr(sys, lost, None)
        assert cli.main(words) == code and None not in (sys.stdout, sys.stderr)
    assert "error: zzz: there is no such section" in getattr(capsys.readouterr(), left)


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["<&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_process_gives_no_file_of_a_run_the_number_of_a_stream_that_is_missing(closed):
    code = (
        "import os, sys; from fastsuncet import cli\n"
        "def work(arguments):\n"
        "    with open('file', 'w') as file:\n"
        "        assert file.fileno() > 2 and os.get_inheritable(2)\n"
        "        os.write(2, b'of a library'); print('said', file=sys.stderr); return 3\n"
        "cli._dispatch = work; sys.exit(cli.main())"
    )
    assert python(code, closed).returncode == 3 and Path("file").read_bytes() == b""


def test_main_without_docstrings_says_what_to_leave_out(monkeypatch, run_cli):
    monkeypatch.setattr(sys, "flags", mock.Mock(optimize=2))
    assert run_cli("--help", code=2).startswith("error: Python runs with -OO or PYTHONOPTIMIZE=2")


def test_train_takes_overrides_options_and_a_path_in_any_order(run_cli, trainer):
    Path("lr=3").mkdir()
    shutil.copy("run.yaml", "lr=3")
    for line in (
        "train run.yaml optimization.lr=2 meta.seed=3 --dry-run",
        "train --dry-run run.yaml optimization.lr=2 meta.seed=3",
        "train run.yaml optimization.lr=2 --dry-run meta.seed=3",
        "train optimization.lr=2 --dry-run=step meta.seed=3 ./lr=3/run.yaml",
    ):
        run_cli(line)
        config, arguments, plan = trainer.calls.pop()
        assert (config.optimization.lr, config.meta.seed) == (2.0, 3) and not trainer.calls
        assert plan["steps"] == ("--dry-run=step" in line)
        assert arguments == line.split()  # the same command starts the other ranks


TWO_CONFIGS = (
    "expected one config, not 2 (a.yaml, b.yaml). "
    "Write a change to it as section.key=value, in quotes if it has spaces"
)
SETTING = "a setting is section.key=value, and CUDA_VISIBLE_DEVICES=0,1 shows a command two GPUs"


def test_main_ends_with_2_for_a_wrong_command_line(run_cli):
    for words, said, command in (
        ("trian run.yaml", "unknown command trian; did you mean `fastsuncet train`?", ""),
        ("dta check run.yaml", "unknown command dta; did you mean `fastsuncet data check`?", ""),
        ("check run.yaml", "unknown command check; did you mean `fastsuncet data check`?", ""),
        ("data", "unknown command data; did you mean `fastsuncet data check` or `fastsuncet data pack`?", ""),
        ("evaluate", "the following arguments are required: KIND, CONFIG", "evaluate"),
        ("frobnicate", "unknown command frobnicate", ""),
        ("train", "which config? For example: fastsuncet train digits_demo", "train"),
        ("train ", "which config? For example: fastsuncet train  digits_demo", "train"),  # an empty "$CONFIG"
        ("train a.yaml b.yaml", TWO_CONFIGS, "train"),
        ("train run.yaml --dryrun", "unknown argument --dryrun; did you mean --dry-run?", "train"),
        ("train run.yaml --gpus=1", f"unknown argument --gpus=1; {SETTING}", "train"),
        (f"embed a b --output {241 * 'x'}", "argument --output: a name has at most 240 bytes", "embed"),
        ("doctor me", "unknown argument me", "doctor"),
        ("train in1k_10pct --show-config", "--show-config goes with --dry-run", "train"),
        ("embed a b --output c.npz --batch 0", "argument --batch: must be a whole number, 1 or more, not 0", "embed"),
        ("init photos --hours 0,5", "argument --hours: invalid float value: '0,5'", "init"),
        ("preview run.yaml --step -1", "argument --step: must be a whole number, 0 or more, not -1", "preview"),
        ("data check . meta.seed=3", ". is a folder, and a folder has no keys to override", "data check"),
    ):  # fmt: skip
        prog = f"fastsuncet {command}".strip()
        assert run_cli(*words.split(" "), code=2) == f"error: {said}\nSee `{prog} --help`\n"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_a_command_is_its_docstring(name, run_cli):
    first, *parts = Parser(name).module.__doc__.strip().split("\n\n")
    said = run_cli(*name.split(), "--help")
    assert said.startswith(f"usage: fastsuncet {name}") and "exit codes:" in said
    assert all(" ".join(part.split()) in " ".join(said.split()) for part in (first, *parts))
    assert f"  {name:<11} {first}\n" in overview(cli.COMMANDS)
    assert max(map(len, [*said.splitlines(), *overview(cli.COMMANDS).splitlines()])) <= 80
    assert run_cli("help", *name.split()) == said


def test_help_of_a_group_lists_its_commands(capsys):
    assert cli.main(["data", "--help"]) == cli.main(["help", "data"]) == 0
    said = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert (f"\n  {name} " in said) == name.startswith("data ")


def test_every_path_of_a_command_line_takes_a_tilde():
    """argparse hands on `--output=~/x.pth` as it is, and a shell does not expand it."""
    for name in cli.COMMANDS:
        for action in Parser(name)._actions:
            if action.metavar in ("FILE", "PATH", "DIR", "FOLDER", "RUN") and action.type is not None:
                assert action.type("~/x.pth") == Path.home() / "x.pth", (name, action.dest)


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), FILE)


FILE, MOVE = "runs/x/meta.json", "or choose another folder"
FOLDER = f"{FILE}. Check the owner and mode of the folder, {MOVE}"
LOST = (
    f"{FILE}. The disk, the file server or its mount failed: see the system's log (dmesg). When it works again, so "
    "does the same command"
)
FULL = f"No space left on device: {FILE}. Free some disk space, {MOVE}"
NCCL = "Cuda failure 2 'out of memory'"
GPU = "`nvidia-smi` shows what other programs take; with CUDA_VISIBLE_DEVICES= in front a command computes on the CPU"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("no such device"), 2, "no such device"),
        (DataError("bad\x1b[2J.png is missing"), 3, r"bad\x1b[2J.png is missing"),
        (BadImage([("a.jpg", "cut short")], 7), 3, str(BadImage([("a.jpg", "cut short")], 7))),
        (NumericalError("nt_xent is nan at step 3"), 4, "nt_xent is nan at step 3"),
        (CheckpointError("the disk is full"), 5, "the disk is full"),
        (Preempted("stopped by SIGTERM after step 12"), 75, "stopped by SIGTERM after step 12"),
        (os_error(errno.EACCES), 5, f"Permission denied: {FOLDER}"),
        (os_error(errno.EROFS), 5, f"Read-only file system: {FOLDER}"),
        (os_error(errno.ENOSPC), 5, FULL),
        (os_error(errno.EIO), 5, f"Input/output error: {LOST}"),
        (os_error(errno.ESTALE), 5, f"Stale file handle: {LOST}"),
        (torch.OutOfMemoryError("No room. Tried 2 GiB. GPU 0 has"), 2, f"No room. Tried 2 GiB. {GPU}"),
        (RuntimeError("CUDA error: out of memory\nCompile"), 2, f"CUDA error: out of memory. {GPU}"),
        (RuntimeError(f"in a call\n{NCCL}"), 2, f"{NCCL}. {GPU}"),
    ],
)
def test_main_prints_a_failure_and_returns_its_code(error, code, said, trainer, run_cli, monkeypatch):
    """With the rank and the traceback where these are asked for; a control character never."""
    trainer.error = error
    assert run_cli("train run.yaml", code=code) == f"error: {said}\n"
    assert f"\n  {code} " in EXIT_CODES
    monkeypatch.setenv("FASTSUNCET_TRACEBACK", "1")
    monkeypatch.setenv("RANK", "3")
    traced = run_cli("train run.yaml", code=code)
    assert traced.startswith("Traceback") and traced.endswith(f"\n[rank 3] error: {said}\n")


def test_main_keeps_the_traceback_of_a_bug(trainer, monkeypatch, capsys):
    no_memory = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    for trainer.error in (IndexError("a bug"), os_error(errno.EBADF), no_memory):
        with pytest.raises(type(trainer.error)):
            cli.main(["train", "run.yaml"])
    # A rank of a job prints it too, and its group does not abort the interpreter's end.
    monkeypatch.setattr(sys, "argv", ["fastsuncet", "train", "run.yaml"])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(cli.os, "_exit", ended := mock.Mock())
    assert cli.main() == 1 and "can't allocate memory" in capsys.readouterr().err and ended.called


@pytest.mark.parametrize("number", [1, 2])
def test_main_ends_on_sigterm_also_as_process_1(number):
    # The kernel drops a signal that process 1 does not handle. Here os.getpid() returns that number.
    script = (
        f"import os, signal\nos.getpid = lambda: {number}\nfrom fastsuncet import cli\n"
        "cli.main(['version'])\n"
        "assert (signal.getsignal(signal.SIGTERM) is signal.SIG_DFL) == (os.getpid() != 1)\n"
        "signal.raise_signal(signal.SIGTERM)\n"
    )
    process = python(script)
    assert process.returncode == (143 if number == 1 else -15), process.stderr


def test_main_prints_names_that_the_encoding_lacks(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(cli, "_dispatch", lambda arguments: print("wrote \u00e4.png") or 0)
    assert cli.main([]) == 0
    assert stream.buffer.getvalue() == b"wrote \\xe4.png\n"


@pytest.mark.parametrize("code", [0, 75])
def test_command_on_several_gpus_ends_with_the_code_of_its_ranks(tmp_path, monkeypatch, run_cli, code):
    started = []
    for module in (ranks, dry_run):
        monkeypatch.setattr(module, "should_start_ranks", lambda device: True)
    monkeypatch.setattr(launch, "start_ranks", lambda *given: started.append(given) or code)
    for line, status in (
        ("train digits_demo", "runs/digits_demo/status.json"),
        ("train digits_demo --dry-run=step", "/dev/null"),
        ("tune digits_demo --output fast.yaml", ".preempted-fast.json"),
        ("evaluate knn digits_demo", "/dev/null"),
        ("finetune digits_demo --step 3", "runs/digits_demo/finetune/.preempted.json"),
        ("transfer digits_demo transfer.root=.", "runs/digits_demo/transfer/status-1-of-1.json"),
    ):
        run_cli(line, code=code)
        arguments, path = started.pop()
        assert arguments == line.split() and Path(path).match(status) and not started
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_completion_of_a_line(run_cli):
    completion = run_cli("completion bash")
    for line, words in (
        ("fin", ["finetune"]),
        ("evaluate k", ["knn"]),
        ("train in1k_10", ["in1k_10pct", "in1k_10pct_authors", "in1k_10pct_paws", "in1k_10pct_paws_small"]),
        ("train --dry", ["--dry-run", "--dry-run=step"]),
        ("train run.yaml optimization.trust", ["optimization.trust_coefficient="]),
        ("export run --to t", ["torchvision", "timm"]),
        ("predict digits_d", ["digits_demo"]),
        ("data p", ["pack"]),
        ("config optimization.trust", ["optimization.trust_coefficient"]),
    ):
        call = f"COMP_WORDS=(fastsuncet {line}); COMP_CWORD={len(line.split())}; _fastsuncet"
        script = f'{completion}\n{call}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == words and done.stderr == ""
