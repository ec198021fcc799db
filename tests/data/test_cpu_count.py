"""How many cores a process has, and how many threads decode for it by default."""

import os
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.data import cpu_count, paired_stream
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import LABELED, UNLABELED, PairedStream, loader_options
from fastsuncet.distributed.launch import Place
from tests.support.runs import CONFIGS


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Set the number of cores, the container's quota, and the ranks that share them."""

    def set_up(offered: int, quota: str | None = None, ranks: int | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(offered)), raising=False)
        monkeypatch.setattr(cpu_count, "QUOTA", tmp_path / "cpu.max")
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
    assert cpu_count.cores() == expected


@pytest.mark.parametrize(
    ("offered", "ranks", "expected"),
    [(2, None, 2), (16, 1, 16), (128, 8, 16), (192, 4, 16), (32, 8, 4), (2, 4, 1)],
)
def test_decode_threads_are_a_share_of_the_cores_up_to_16(machine, offered, ranks, expected):
    machine(offered, ranks=ranks)
    assert cpu_count.decode_threads(None) == expected
    assert cpu_count.decode_threads(12, streams=2) == 12


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
    assert cpu_count.decode_threads(None) == expected


def test_two_streams_on_a_gpu_share_the_cores_of_their_process(machine):
    machine(16, ranks=1)
    config = load_config(CONFIGS / "digits_demo.yaml")
    assert loader_options(config, Place(0, 1, 0, torch.device("cuda", 0)), streams=2).threads == 8
    assert loader_options(config, Place(0, 1, 0, torch.device("cuda", 0))).threads == 16  # an evaluation
    assert loader_options(config, Place(0, 1, 0, torch.device("cpu")), streams=2).threads == 16


def test_unlabeled_stream_gets_the_threads_of_the_labeled_one_once_supervision_ends(monkeypatch):
    """On the CPU, as if it shared its threads as a GPU does."""
    real = loader_options

    def shared(config, place, streams=1):
        return replace(real(config, place), threads=4 // streams)

    monkeypatch.setattr(paired_stream, "loader_options", shared)
    here = Place(0, 1, 0, torch.device("cpu"))
    config = load_config("digits_demo", ["criterion.supervised_epochs=1"])
    images = open_images(config, here, validation=False)
    arithmetic = config.resolve(1, *images.counts())
    with closing(PairedStream(config, images.train, images.split.indices, arithmetic, here)) as stream:

        def threads() -> dict[str, int]:
            return {role: loader.options.threads for role, loader in stream._loaders.items()}

        stream(arithmetic.supervised_steps - 1)
        assert threads() == {UNLABELED: 2, LABELED: 2}
        assert len(stream(arithmetic.supervised_steps).labeled) == 0
        assert threads() == {UNLABELED: 4}
