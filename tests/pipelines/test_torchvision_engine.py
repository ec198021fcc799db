"""The torchvision engine reads ahead. Its pixels are compared with DALI's in dali/test_graphs.py."""

import threading

from pipelines import torchvision_engine
from tests.support.pictures import write_pictures
from tests.support.streams import opened, unlabeled


def test_torchvision_engine_reads_ahead_and_each_file_once_a_step(tmp_path, monkeypatch):
    threads = []
    read_rgb = torchvision_engine.read_rgb
    monkeypatch.setattr(
        torchvision_engine,
        "read_rgb",
        lambda path: threads.append(threading.current_thread()) or read_rgb(path),
    )
    loader = opened(unlabeled(write_pictures(tmp_path, count=12, side=40)), "torchvision", prefetch=2)
    for step in range(3):
        loader(step)
    pool = loader._engine._pool
    pool.shutdown(wait=True)
    # Threads of another test's loader can still be at work; they do not count.
    assert sum(thread in pool._threads for thread in threads) == 6 * 4
