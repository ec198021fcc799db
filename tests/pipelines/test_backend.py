"""The choice of a back-end, and what is said where DALI or the right build of it is absent."""

import ast
import sys
from pathlib import Path

import pytest
import torch

import pipelines
from pipelines import backend
from pipelines.data_errors import DataError
from pipelines.output import say_once
from tests.support.streams import assert_same, opened, unlabeled


@pytest.fixture
def without_dali(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # importing it raises ImportError
    say_once.cache_clear()
    yield
    say_once.cache_clear()


def test_backend_auto_without_dali_is_torchvision_and_says_so_once(index, without_dali, capfd):
    loaders = [opened(unlabeled(index)) for _ in range(2)]
    assert [loader.options.backend for loader in loaders] == ["torchvision"] * 2
    output = capfd.readouterr().out
    assert output.count("\n") == 1 and "torchvision reads the images instead" in output
    assert "pip install 'nvidia-dali-cuda1" in output
    assert_same(loaders[0](1), opened(unlabeled(index), "torchvision")(1))


def test_backend_dali_that_is_absent_is_an_error_with_the_command(without_dali):
    with pytest.raises(DataError, match="pip install 'nvidia-dali-cuda1"):
        backend.choose_backend("dali")


@pytest.mark.parametrize(("cuda", "build"), [("13.2", "cuda130"), ("12.8", "cuda120"), (None, "cuda120")])
def test_install_command_names_the_build_for_torchs_cuda(monkeypatch, cuda, build):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"nvidia-dali-{build}" in backend.install_command()


def test_imports_of_pipelines_need_no_dali():
    """Only these modules import DALI, or one of each other, at their top; others import them where they use them."""
    with_dali = {"engine", "graphs", "color", "check_equal"}
    names = {f"pipelines.dali.{name}" for name in with_dali}
    for path in Path(pipelines.__path__[0]).rglob("*.py"):
        if path.stem in with_dali:
            continue
        for node in ast.parse(path.read_text()).body:
            line = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
            assert "nvidia.dali" not in line and not any(name in line for name in names), f"{path}: {line}"
