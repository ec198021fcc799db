"""Verdicts are kept for later starts, and read only where they are whole and this user's own."""

import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.tuning import verdicts
from fastsuncet.tuning.trials import Verdict
from pipelines import cuda_compiler
from tests.support.checkpoints import HARMS
from tests.support.pretended import pretend


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path)


KEY = {"path": "x.cu", "shapes": (1, 2)}
KEPT = Verdict("slower", [2.0, 1.0])


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
