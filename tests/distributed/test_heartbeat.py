"""A rank that hangs is named, and the job ends with an exit code that says to run it again."""

import json
import linecache
import os
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from fastsuncet.cli import main
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed import heartbeat
from fastsuncet.distributed.heartbeat import Heartbeat
from fastsuncet.errors import HungError
from pipelines.data_errors import DataError
from tests.support.ranks import start_forked, started_by_an_agent
from tests.support.runs import CONFIGS, SMALL, TINY, tiny_config

pytestmark = pytest.mark.slow


@pytest.fixture
def hearts(monkeypatch):
    """Two ranks of one process, and what each of them says and ends with."""
    store, found = dist.HashStore(), []
    monkeypatch.setattr(heartbeat, "_get_default_store", lambda: store)
    monkeypatch.setattr(heartbeat, "world_size", lambda: 2)
    monkeypatch.setattr(Heartbeat, "period", 0.2)
    for number in range(2):
        monkeypatch.setattr(heartbeat, "rank", lambda number=number: number)
        said, ended = [], []
        found.append((Heartbeat(1.5, said.append, ended.append), said, ended))
    return found


def wait_for_end(ended: list[Exception]) -> None:
    end = time.monotonic() + 30
    while not ended:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_heartbeat_names_the_rank_that_is_behind_and_where_it_is(hearts):
    (one, said, ended), (other, said_too, ended_too) = hearts
    with one, other:
        for heart in (one, other):
            heart.at(6, "reads images")
        one.at(6, "trains")  # and waits there for the other
        wait_for_end(ended)
        assert (said_too, ended_too) == ([], [])  # one speaks
        wait_for_end(ended_too)
    for text in (said[0], str(ended[0])):
        assert "waiting for rank 1 (reads images after step 6, in " in text
        assert "rank 0" not in text
    assert "no step for 2 s (meta.timeout)" in str(ended[0]) and "same command continues" in str(ended[0])
    assert len(ended_too) == 1


def test_heartbeat_names_a_rank_that_posts_no_longer(hearts):
    (one, _, ended), (other, _, _) = hearts
    with one:
        with other:
            other.at(6, "trains")
            one.at(6, "trains")
            time.sleep(0.5)
        wait_for_end(ended)
    assert "waiting for rank 1 (no sign of life; last seen where it trains after step 6" in str(ended[0])


def test_heartbeat_ends_with_rank_0_where_its_process_held_the_store(hearts, monkeypatch):
    lost = SimpleNamespace(set=mock.Mock(side_effect=dist.DistNetworkError("Connection reset by peer")))
    monkeypatch.setattr(heartbeat, "_get_default_store", lambda: SimpleNamespace(clone=lambda: lost))
    one, _, ended = hearts[1]
    with one:
        wait_for_end(ended)
    assert "rank 0 has ended" in str(ended[0]) and ended[0].exit_code == 1


def test_heartbeat_names_the_process_that_holds_the_store_and_is_stopped(hearts, monkeypatch):
    answer = threading.Event()
    stopped = SimpleNamespace(set=lambda *_: answer.wait())
    monkeypatch.setattr(heartbeat, "_get_default_store", lambda: SimpleNamespace(clone=lambda: stopped))
    one, said, ended = hearts[1]
    with one:
        wait_for_end(ended)
        answer.set()
    for text in (said[0], str(ended[0])):
        assert "waiting for rank 0 (its process, through which ranks meet, does not answer)" in text


def test_heartbeat_names_a_rank_that_never_posted_from_the_first_line_on(hearts):
    (one, said, ended), _ = hearts
    with one:
        wait_for_end(ended)
    assert "waiting for rank 1 (no sign of life yet); meta.timeout ends the job after 2 s" in said[0]
    assert "waiting for rank 1 (no sign of life yet). Nothing was saved" in str(ended[0])


def test_heartbeat_of_ranks_that_make_steps_says_nothing(hearts):
    with hearts[0][0], hearts[1][0]:
        for step in range(40):
            for heart, _, _ in hearts:
                heart.at(step, "trains")
            time.sleep(0.05)
    assert [(said, ended) for _, said, ended in hearts] == [([], []), ([], [])]


def test_heartbeat_begins_at_once_where_the_store_is_gone(monkeypatch):
    """kill -9 of the agent while its ranks start: torch tries to connect for minutes, and they must hear a SIGTERM."""
    connecting, given_up = [], threading.Event()

    def clone():
        connecting.append(threading.current_thread())
        given_up.wait(60)

    monkeypatch.setattr(heartbeat, "_get_default_store", lambda: SimpleNamespace(clone=clone))
    monkeypatch.setattr(heartbeat, "world_size", lambda: 2)
    monkeypatch.setattr(Heartbeat, "period", 0.1)
    with Heartbeat(60.0, print, print) as heart:
        pass
    assert connecting == [heart._thread] and heart._thread.is_alive()
    given_up.set()
    heart._thread.join()


def test_heartbeat_posts_without_reading_a_file(hearts, monkeypatch):
    """The disk can be what hangs, also that of the program."""
    read = []
    for name in ("checkcache", "getline", "getlines"):
        monkeypatch.setattr(linecache, name, lambda *given, **_: read.append(given) or "")
    (heart, _, _), posts = hearts[0], {}
    heart.store = heartbeat._get_default_store()
    heart._exchange(posts, 0.0, read=True)
    assert b", heartbeat.py:" in posts[0][0] and read == []


def test_end_hung_ends_the_process_where_the_disk_hangs_too(monkeypatch, capsys):
    codes, answer = [], threading.Event()
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(heartbeat, "RECORD", 0.1)
    heartbeat.end_hung(HungError("no step"), answer.wait)
    assert codes == [124] and capsys.readouterr().err == "[rank 0] error: no step\n"
    answer.set()


# ------------------------------------------------------------------------------------------------- real ranks
def rank_main(rank: int, folder: str, port: int, error: str) -> None:
    """Train as the command does; at step 5 rank 1 hangs, or ends with an error while rank 0 waits as for a GPU."""
    started_by_an_agent(rank, port)
    os.dup2(os.open(f"{folder}/output {rank}", os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    Heartbeat.period, read = 0.5, PairedStream.__call__

    def reading(stream, step, supervised=True):
        if step == 5 and error and rank == 1:
            raise DataError(error)
        if step == 5 and (error or rank == 1):
            time.sleep(300)
        return read(stream, step, supervised)

    PairedStream.__call__ = reading
    overrides = [*SMALL, *TINY, f"logging.folder={folder}", "meta.timeout=5", "meta.device=cpu"]
    sys.exit(main(["train", str(CONFIGS / "digits_demo.yaml"), *overrides]))


@pytest.mark.parametrize(
    ("error", "codes", "message"),
    [
        ("", [124, 124], "waiting for rank 1 (reads images after step 5, in reading, test_heartbeat.py"),
        ("a bad image", [1, 3], "rank 1 has ended, and this one with it; its message has the reason"),
    ],
)
def test_rank_that_hangs_or_fails_ends_the_job_with_its_name(tmp_path, error, codes, message):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [start_forked(rank_main, rank, str(tmp_path), store.port, error) for rank in (0, 1)]
    for process in ranks:
        process.join(120)
    output = (tmp_path / "output 0").read_text()
    assert [process.exitcode for process in ranks] == codes, output
    shown = next(line for line in output.splitlines() if line.startswith("[rank 0] error:"))
    assert message in shown and ("meta.timeout" in shown) == (not error)
    status = json.loads((tiny_config(tmp_path).run_folder / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", codes[0])
    assert message in status["message"]
