"""BatchNorm's sums on a communicator of their own: the same bits, another queue, and no start where it could hang."""

import contextlib
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fastsuncet.commands import train as run
from fastsuncet.data.paired_stream import Batch
from fastsuncet.distributed import communicators, launch
from fastsuncet.distributed.communicators import ORDER, batchnorm_group, order_launches
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.models.sync_batchnorm import RankBatchNorm
from fastsuncet.training.step import build, train_step
from tests.support.ranks import run_ranks
from tests.support.runs import assert_equal_to_the_bit, small_config

CPU = torch.device("cpu")
OWN = "model.batchnorm_communicator=own"
FUSED = "model.fused_batchnorm=true"
KINDS = {"shared": (), "own": (OWN,), "shared_fused": (FUSED,), "own_fused": (OWN, FUSED)}


class Heard(TorchDispatchMode):
    """How many collectives went over which process group."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            group = next(
                x for x in args if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
            )
            self.calls[dist.ProcessGroup.unbox(group).group_desc] += 1
        return function(*args, **(kwargs or {}))


def _steps(rank, world_size, folder):
    seen = {}
    for kind, overrides in KINDS.items():
        config = small_config(Path(folder), *overrides)
        model, network, optimizer, setting = build(config, Place(rank, world_size, rank, CPU), 10)
        draw = torch.Generator().manual_seed(rank)
        views = tuple(torch.rand(4, 3, 16, 16, generator=draw) for _ in range(2))
        batch = Batch(0, views, torch.rand(6, 3, 16, 16, generator=draw), torch.arange(6) // 2)
        for _ in range(2):
            with Heard() as heard:
                train_step(network, optimizer, batch, 0.1, setting)
        groups = [m.group for m in model.modules() if isinstance(m, RankBatchNorm)]
        seen[kind] = {
            "state": {k: v.clone() for k, v in model.state_dict().items()},
            "calls": dict(heard.calls),
            "norms": len(groups),
            "groups": len({id(group) for group in groups}),
            "ranks": dist.get_world_size(groups[0]),
            "seconds": [_timeout(group) for group in groups[:1] if group is not None],
        }
    return seen


def _timeout(group):
    return group._get_backend(CPU).options._timeout.total_seconds()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(_steps, 3, str(tmp_path_factory.mktemp("runs")))


def test_a_communicator_of_its_own_changes_no_bit_of_what_is_learned(ranks):
    for seen in ranks:
        for fused in ("", "_fused"):
            for kind in ("shared", "own"):
                assert_equal_to_the_bit(seen[kind + fused]["state"], ranks[0]["shared" + fused]["state"])


def test_batchnorms_sums_and_nothing_else_travel_on_it(ranks):
    for seen in ranks:
        shared, own = seen["shared"], seen["own"]
        assert shared["groups"] == own["groups"] == 1 and own["ranks"] == len(ranks)
        assert set(shared["calls"]) == {"default_pg"}
        assert own["calls"]["batchnorm"] == seen["own_fused"]["calls"]["batchnorm"] == 2 * own["norms"] == 18
        assert sum(own["calls"].values()) == sum(shared["calls"].values())


def test_its_time_out_is_the_runs_and_not_the_backends_own(ranks):
    for seen in ranks:
        assert seen["own"]["seconds"] == [launch.TIMEOUT.total_seconds()] and seen["shared"]["seconds"] == []


def test_one_rank_makes_no_group():
    assert batchnorm_group(Place(0, 1, 0, CPU)) is None


@pytest.mark.parametrize(
    ("version", "found", "words"),
    [
        ((2, 25, 1), "1", r"this is NCCL 2\.25\.1: .* before 2\.26, .*shared needs neither"),
        ((2, 30, 7), None, "is None in the environment, not '1'"),
        ((2, 30, 7), "0", "is '0' in the environment, not '1'.*Set it before the ranks start"),
    ],
)
def test_on_a_card_it_is_refused_where_two_communicators_could_hang(monkeypatch, version, found, words):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setattr(dist, "new_group", lambda **_: pytest.fail("a group was made"))
    monkeypatch.delenv(ORDER, raising=False)
    if found is not None:
        monkeypatch.setenv(ORDER, found)
    with pytest.raises(ConfigError, match=words):
        batchnorm_group(Place(0, 2, 0, torch.device("cuda", 0)))


def test_on_a_card_it_is_nccls_alone_once_launches_are_in_order(monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: communicators.ORDERS_SINCE)
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options))
    monkeypatch.delenv(ORDER, raising=False)
    order_launches()
    batchnorm_group(Place(0, 2, 0, torch.device("cuda", 0)))
    assert made == [{"backend": "nccl", "timeout": launch.TIMEOUT, "group_desc": "batchnorm"}]
    monkeypatch.setenv(ORDER, "0")  # a person's word stands, and is refused above
    order_launches()
    assert os.environ[ORDER] == "0"


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_orders_launches_before_its_ranks_join_and_only_for_two_communicators(
    tmp_path, monkeypatch, kind
):
    found = []

    @contextlib.contextmanager
    def join(device):
        found.append(os.environ.get(ORDER))
        yield

    monkeypatch.delenv(ORDER, raising=False)
    monkeypatch.setattr(launch, "join", join)
    monkeypatch.setattr(run, "train", lambda config, place: None)
    run.run(small_config(tmp_path, *KINDS[kind]), [])
    monkeypatch.setenv(ORDER, "restored")  # so that what was set here is taken back
    assert found == ["1" if OWN in KINDS[kind] else None]
