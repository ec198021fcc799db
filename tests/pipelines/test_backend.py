"""The choice of a back-end and of threads, and what is said where DALI or the right build of it is absent."""

import ast
import os
import sys
from pathlib import Path

import pytest
import torch

import pipelines
from pipelines import backend
from pipelines.data_errors import DataError
from pipelines.output import say_once
from tests.support.streams import assert_same, opened, unlabeled


def test_backend_without_dali_is_torchvision_and_says_so_once_or_an_error(index, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # importing it raises ImportError
    say_once.cache_clear()
    loaders = [opened(unlabeled(index)) for _ in range(2)]
    assert [loader.options.backend for loader in loaders] == ["torchvision"] * 2
    output = capfd.readouterr().out
    assert output.count("\n") == 1 and "torchvision reads the images instead" in output
    assert "pip install 'nvidia-dali-cuda1" in output
    assert_same(loaders[0](1), opened(unlabeled(index), "torchvision")(1))
    with pytest.raises(DataError, match="pip install 'nvidia-dali-cuda1"):
        backend.choose_backend("dali")


@pytest.mark.parametrize(("cuda", "build"), [("13.2", "cuda130"), ("12.8", "cuda120"), (None, "cuda120")])
def test_install_command_names_the_build_for_torchs_cuda(monkeypatch, cuda, build):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"nvidia-dali-{build}" in backend.install_command()


def test_imports_of_pipelines_need_no_dali():
    """Only these modules import DALI, or one of each other, at their top; others import them where they use them."""
    with_dali = {"engine", "graphs", "check_equal"}
    names = {f"pipelines.dali.{name}" for name in with_dali}
    for path in Path(pipelines.__path__[0]).rglob("*.py"):
        if path.stem in with_dali:
            continue
        for node in ast.parse(path.read_text()).body:
            line = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
            assert "nvidia.dali" not in line and not any(name in line for name in names), f"{path}: {line}"


@pytest.mark.parametrize(
    ("offered", "quota", "environment", "cores", "threads"),
    [
        (64, None, {}, 64, 16),
        (64, "max 100000\n", {}, 64, 16),
        (64, "800000 100000\n", {}, 8, 8),
        (4, "800000 100000\n", {}, 4, 4),  # more time than cores
        (64, "50000 100000\n", {}, 1, 1),  # half a core is still one thread
        (64, "what is this\n", {}, 64, 16),
        (32, None, {"LOCAL_WORLD_SIZE": "8"}, 32, 4),
        (4, None, {"LOCAL_WORLD_SIZE": ""}, 4, 4),
        (4, None, {"LOCAL_WORLD_SIZE": "0"}, 4, 4),
        (2, None, {"LOCAL_WORLD_SIZE": "4"}, 2, 1),
        # A Slurm task that is bound to its share of the node, one that is not, and torchrun's in a task for the node.
        (8, None, {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "64"}, 8, 8),
        (64, None, {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "64"}, 64, 8),
        (64, None, {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "64", "TORCHELASTIC_RUN_ID": "7"}, 64, 8),
        (32, None, {"LOCAL_WORLD_SIZE": "8", "SLURM_CPUS_ON_NODE": "64", "TORCHELASTIC_RUN_ID": "7"}, 32, 4),
    ],
)
def test_decode_threads_are_a_share_of_the_cores_up_to_16(
    monkeypatch, tmp_path, offered, quota, environment, cores, threads
):
    """Cores are limited by a container's quota, and shared by the ranks of a machine or of a node of Slurm's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(offered)), raising=False)
    monkeypatch.setattr(backend, "QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert backend.cores() == cores
    assert backend.decode_threads(None) == threads and backend.decode_threads(12, streams=2) == 12
