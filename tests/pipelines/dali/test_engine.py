"""How an engine feeds and runs its graph: the decoder's options, files, streams and memory."""

import contextlib
import os
import resource
import threading
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
from nvidia.dali import Pipeline
from nvidia.dali.plugin.pytorch import feed_ndarray

from pipelines.backend import LoaderOptions
from pipelines.dali import engine
from pipelines.dali.engine import READERS, DaliEngine, PackedImages
from pipelines.data_errors import DataError
from pipelines.datasets.pack import open_pack, write_pack
from pipelines.sampling.augmentation import ViewParams, draw_view
from pipelines.sampling.step_plan import BatchDraws
from tests.support.streams import SMALL, assert_same, opened, unlabeled


def engine_on(device: str, plan, draws=None) -> DaliEngine:
    options = LoaderOptions(device=device, threads=2, prefetch=1, view_operator=False)
    return DaliEngine(plan, options, draws=draws or plan, first_step=0)


def test_packed_images_are_read_in_threads_one_iteration_ahead(index, tmp_path, monkeypatch):
    """Each read waits until as many wait as there are readers: a single thread would wait for ever."""
    write_pack(index, tmp_path / "pack")
    pack, pread = open_pack(tmp_path / "pack").pack, os.pread
    steps = [np.arange(READERS), np.arange(READERS)[::-1]]
    together = threading.Barrier(READERS)

    def read_together(*arguments):
        together.wait(timeout=20)
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", read_together)
    read, reads_ahead = pack.read, threading.Semaphore(0)
    monkeypatch.setattr(pack, "read", lambda i: (read(i), reads_ahead.release())[0])
    images = PackedImages(pack, lambda step: next(iter(steps[step:])))
    first = images(0)
    assert all(reads_ahead.acquire(timeout=20) for _ in range(2 * READERS))  # those of iteration 1 as well
    for found, wanted in zip((first, images(1)), steps):
        content = [index.path(i).read_bytes() for i in wanted]
        assert [np.asarray(image).tobytes() for image in found] == content
    with pytest.raises(StopIteration):
        images(2)


def test_engine_opens_a_batch_of_more_files_than_the_soft_limit(index, monkeypatch):
    """DALI holds all files of a batch open; where the hard limit is too low as well, the message says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    plan = unlabeled(index, batch=24, augmentations=(SMALL,))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))
        views = opened(plan, "dali")(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert_same(views, opened(plan, "dali")(0))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    said = r"a batch of 24 images .* may open 64: raise the hard limit .* to 560"
    with pytest.raises(DataError, match=said):
        opened(plan, "dali")(0)


def test_engine_copies_beside_training_and_waits_for_the_step_before_the_last(index, monkeypatch):
    """The order of calls on streams and events, on stand-ins for them; pixels and DALI are real."""
    calls: list[str] = []

    class Stream(SimpleNamespace):
        device = torch.device("cpu")

        def record_event(self, event):
            assert event == {"blocking": True}  # else a core spins while it waits
            number = sum("records" in call for call in calls)
            calls.append(f"{self.name} records {number}")
            return SimpleNamespace(synchronize=lambda: calls.append(f"host waits for {number}"))

        def wait_stream(self, other):
            calls.append(f"{self.name} waits for {other.name}")

    def copied(output, view, cuda_stream):
        calls.append(f"copy on {cuda_stream.name}")
        return feed_ndarray(output, view)

    @contextlib.contextmanager
    def current(stream):
        calls.append(f"on {stream.name}")
        yield
        calls.append("on training")

    def noted(text, result=lambda _: None):
        return lambda self, stream=None: calls.append(f"{text} {stream.name}") or result(self)

    training = Stream(name="training")
    monkeypatch.setattr(Pipeline, "run", noted("run on", Pipeline.run))
    monkeypatch.setattr(torch.Tensor, "record_stream", noted("kept for"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "Event", dict)
    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr(engine, "feed_ndarray", copied)
    made = engine_on("cpu", unlabeled(index, augmentations=(SMALL,)))
    made._stream = Stream(name="side")
    for _ in range(3):
        made.run()
    work = ["on side", "run on side", "copy on side", "on training"]
    work += ["training waits for side", "kept for training"]
    assert calls == [
        *("training records 0", *work),
        *("training records 1", "host waits for 0", *work),
        *("training records 2", "host waits for 1", *work),
    ]


@pytest.mark.gpu
def test_engine_on_a_gpu_gives_an_image_the_same_pixels_in_every_row(index):
    view = draw_view(SMALL, index.sizes[:1], seed=0, step=0, role="", first_row=0)
    rows = 24
    same = {field.name: np.repeat(getattr(view, field.name), rows, axis=0) for field in fields(view)}
    draws = BatchDraws(0, np.zeros(rows, np.int64), np.zeros(rows, np.int64), (ViewParams(**same),))
    (images,) = engine_on("gpu", unlabeled(index, rows, augmentations=(SMALL,)), lambda _: draws).run()
    assert all(torch.equal(image, images[0]) for image in images)


@pytest.mark.gpu
def test_engine_on_a_gpu_stays_within_two_steps_of_training_and_keeps_its_pixels(index):
    beside, alone = (engine_on("gpu", unlabeled(index)) for _ in range(2))
    expected = [[view.clone() for view in alone.run()] for _ in range(5)]
    found, trained = [], []
    for _ in range(5):
        found.append(beside.run())
        # All but the last step that training has queued are done.
        assert all(event.query() for event in trained[:-1])
        torch.cuda._sleep(200_000_000)  # about a tenth of a second of training
        trained.append(torch.cuda.current_stream().record_event())
    for views, others in zip(found, expected):
        assert_same(views, others)
