"""How many cores a process has, and how many threads decode for it when nobody said."""

import os

import pytest

from fastsuncet.data import cpu_count as cores


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets how many cores the system offers, what the container's quota says, and how many ranks share it."""

    def set_up(offered: int, quota: str | None = None, ranks: int | None = None) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(offered)), raising=False)
        monkeypatch.setattr(cores, "QUOTA", tmp_path / "cpu.max")
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
def test_a_containers_quota_counts_where_it_is_less_than_its_cores(machine, offered, quota, expected):
    machine(offered, quota)
    assert cores.cores() == expected


@pytest.mark.parametrize(
    ("offered", "ranks", "expected"),
    [(2, None, 2), (16, 1, 16), (128, 8, 16), (192, 4, 16), (32, 8, 4), (2, 4, 1)],
)
def test_the_ranks_of_a_machine_share_its_cores_and_none_takes_more_than_sixteen(
    machine, offered, ranks, expected
):
    machine(offered, ranks=ranks)
    assert cores.decode_threads(None) == expected


def test_a_number_that_was_asked_for_is_taken(machine):
    machine(4, ranks=4)
    assert cores.decode_threads(12) == 12
