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
    with_dali = {"engine", "graphs", "check_equal"}
    names = {f"pipelines.dali.{name}" for name in with_dali}
    for path in Path(pipelines.__path__[0]).rglob("*.py"):
        if path.stem in with_dali:
            continue
        for node in ast.parse(path.read_text()).body:
            line = ast.unparse(node) if isinstance(node, (ast.Import, ast.ImportFrom)) else ""
            assert "nvidia.dali" not in line and not any(name in line for name in names), f"{path}: {line}"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set the number of cores, the container's quota, and the ranks that share them."""

    def set_up(offered: int, quota: str | None = None, ranks: int | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(offered)), raising=False)
        monkeypatch.setattr(backend, "QUOTA", tmp_path / "cpu.max")
        if quota is not None:
            (tmp_path / "cpu.max").write_text(quota)
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))

    return set_up


@pytest.mark.parametrize(
    ("offered", "quota", "expected"),
    [
        (64, None, 64),
        (64, "max 100000\n", 64),
        (64, "800000 100000\n", 8),
        (4, "800000 100000\n", 4),  # more time than cores
        (64, "50000 100000\n", 1),  # half a core is still one thread
        (64, "what is this\n", 64),
    ],
)
def test_cores_are_limited_by_a_containers_quota(machine, offered, quota, expected):
    machine(offered, quota)
    assert backend.cores() == expected


@pytest.mark.parametrize(
    ("offered", "ranks", "expected"),
    [(2, None, 2), (16, 1, 16), (128, 8, 16), (192, 4, 16), (32, 8, 4), (2, 4, 1)],
)
def test_decode_threads_are_a_share_of_the_cores_up_to_16(machine, offered, ranks, expected):
    machine(offered, ranks=ranks)
    assert backend.decode_threads(None) == expected
    assert backend.decode_threads(12, streams=2) == 12


@pytest.mark.parametrize(
    ("offered", "slurm", "expected"),
    [
        (8, {"SLURM_CPUS_ON_NODE": "64"}, 8),  # a task that is bound to its share
        (64, {"SLURM_CPUS_ON_NODE": "64"}, 8),  # one that is not bound
        (
            64,
            {"SLURM_CPUS_ON_NODE": "64", "TORCHELASTIC_RUN_ID": "77"},
            8,
        ),  # torchrun's, in a task for the node
        (32, {"SLURM_CPUS_ON_NODE": "64", "TORCHELASTIC_RUN_ID": "77"}, 4),
    ],
)
def test_slurm_tasks_decode_on_their_share_of_the_node(machine, monkeypatch, offered, slurm, expected):
    machine(offered, ranks=8)
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    assert backend.decode_threads(None) == expected
