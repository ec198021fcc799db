"""What follows from proofs and times. Verdicts are kept, and read only where they are whole and this user's own."""

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.tuning import verdicts
from fastsuncet.tuning.verdicts import Verdict, judge
from pipelines import cuda_compiler
from tests.support.checkpoints import HARMS
from tests.support.pretended import pretend


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path)


KEY = {"path": "x.cu", "shapes": (1, 2)}
KEPT = Verdict("slower")


def test_verdict_is_kept_whole_and_for_its_key_only(capsys):
    assert verdicts.read(KEY) is None and capsys.readouterr().out == ""
    verdicts.keep(KEY, KEPT)
    assert verdicts.read(KEY) == KEPT and verdicts.read({**KEY, "shapes": [1, 3]}) is None
    (file,) = verdicts.file_of(KEY).parent.iterdir()
    assert json.loads(file.read_text())["reason"] == "slower"  # a person can read it
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def test_describe_machine_has_the_card_and_its_driver(monkeypatch):
    """With a card and a driver that are pretended: a name that torch lacks would end a run on a GPU."""

    class Driver:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, number):  # noqa: N802
            number._obj.value = 12080

    monkeypatch.undo()  # the fixture's own machine
    card = SimpleNamespace(name="H100", total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    fake = SimpleNamespace(CDLL=Driver, c_int=ctypes.c_int, byref=ctypes.byref)
    monkeypatch.setattr(cuda_compiler, "ctypes", fake)
    # A start with launches that block must not leave "slower" to later ones. A rank sees other GPUs than the next one.
    for name, value in (("CUDA_LAUNCH_BLOCKING", "1"), ("NCCL_ALGO", "Ring"), ("CUDA_VISIBLE_DEVICES", "3")):
        monkeypatch.setenv(name, value)
    found = verdicts.describe_machine(torch.device("cuda", 0))
    assert found["environment"].items() >= {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_ALGO": "Ring"}.items()
    assert "CUDA_VISIBLE_DEVICES" not in found["environment"]
    assert (found["card"], found["memory"], found["cuda"]) == ("H100", 80 << 30, 12080)
    assert found["versions"]["torch"] == torch.__version__ and json.dumps(found)


def link(file):
    file.rename(file.with_suffix(".other"))
    file.symlink_to(file.with_suffix(".other"))


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda file: file.chmod(0o620), "other users can write it (mode 620)"),
        (link, "symbolic links"),
        (HARMS["pipe"], "not a regular file"),
        (lambda file: file.write_bytes(file.read_bytes() + b" " * verdicts.LIMIT), "bytes; at most 65,536"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "delimiter"),
        (lambda file: file.write_bytes(b"[]"), "list indices"),
        (lambda file: file.write_text(file.read_text().replace('"slower"', "7")), "for something else"),
        (lambda file: file.write_text(file.read_text().replace("x.cu", "y.cu")), "for something else"),
    ],
)
def test_verdict_that_is_not_safe_or_not_whole_is_absent_and_said(spoil, problem, capsys):
    verdicts.keep(KEY, KEPT)
    spoil(verdicts.file_of(KEY))
    assert verdicts.read(KEY) is None
    said = capsys.readouterr().out
    assert said.startswith("speed: no verdict kept: ") and problem in said
    # The next trial replaces it.
    verdicts.keep(KEY, KEPT)
    assert verdicts.read(KEY) == KEPT


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("no home directory")])
def test_run_needs_no_folder_for_its_verdicts(monkeypatch, capsys, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(verdicts.code_cache, "cache_folder", fails)
    assert verdicts.read(KEY) is None
    verdicts.keep(KEY, KEPT)
    assert f"x.cu cannot be kept for later runs: {error}" in capsys.readouterr().out


NOISE = (1.0, 1.01, 0.99)


def report(contender: float, noise=NOISE, **more) -> Verdict:
    """Return a rank's report, with the same noise on both sides."""
    return Verdict(base=list(noise), contender=[contender * n for n in noise], **more)


ENDED = Verdict(problem="was killed by SIGKILL", final=False)


TIGHT = [report(0.8, memory_left=0.5), report(0.8, memory_left=0.05)]


@pytest.mark.parametrize(
    ("reports", "won", "problem"),
    [
        pytest.param([report(0.8)], True, None, id="a win"),
        pytest.param([report(1.2)], False, None, id="a loss"),
        pytest.param([report(0.98)], False, None, id="less than the margin"),
        pytest.param([report(0.8, noise=(1.0, 0.7, 1.1))], False, None, id="less than the noise"),
        pytest.param([Verdict(problem="other bits")], False, "other bits", id="a failing proof"),
        pytest.param([report(0.8), ENDED], False, "rank 1: was killed by SIGKILL", id="one rank"),
        pytest.param([ENDED, Verdict(problem="bits")], False, "rank 1: bits", id="the reason first"),
        pytest.param([report(0.8), report(1.1)], False, None, id="the slowest rank counts"),
        pytest.param([report(0.8), report(0.9)], True, None, id="two ranks"),
        pytest.param([report(0.8, memory_left=0.09)], True, None, id="enough memory"),
        pytest.param(TIGHT, False, "leaves 5% of the memory free, 8% are needed", id="too little memory"),
    ],
)
def test_judge(reports, won, problem):
    outcome = judge(reports)
    assert (outcome.won, outcome.problem) == (won, problem)
    assert outcome.final == (problem in (None, "other bits", "rank 1: bits"))
