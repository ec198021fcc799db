"""Streams of views: any step at any time, the same for any threads and ranks, and bad files by name."""

import cProfile
import errno
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines import torchvision_engine
from pipelines.backend import LoaderOptions
from pipelines.data_errors import LOST, BadImage, DataError
from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.published import pixel_index
from pipelines.loader import open_evaluation_loader
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.step_plan import EvaluationPlan
from tests.support.pictures import texture, unusable_files
from tests.support.streams import SMALL, assert_same, evaluation, needs_dali, opened, unlabeled

CROPS = (SMALL, SMALL, replace(SMALL, size=16, crop_scale=(0.05, 0.14)))  # as SwAV's


def test_loader_views_are_normalized_channels_last_floats_one_per_augmentation(index, reader):
    views = opened(unlabeled(index, augmentations=CROPS), reader)(0)
    assert [tuple(view.shape) for view in views] == [(6, 3, 32, 32), (6, 3, 32, 32), (6, 3, 16, 16)]
    for view in views:
        assert view.dtype == torch.float32 and not view.requires_grad
        assert view.is_contiguous(memory_format=torch.channels_last)
        assert 0 <= view.min() < 0.2 and 0.8 < view.max() <= 1
    normalized = replace(SMALL, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    (scaled,) = opened(unlabeled(index, augmentations=(normalized,)), reader)(0)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (normalized.mean, normalized.std))
    torch.testing.assert_close(scaled, (views[0] - mean) / std, atol=1e-5, rtol=0)


@needs_dali
def test_loader_makes_as_many_calls_for_many_images_as_for_few(index):
    """Of Python functions in the thread that trains: a count is the same on every machine."""
    calls = []
    for batch in (2, 24):
        loader, profiler = opened(unlabeled(index, batch), "dali", view_operator=False), cProfile.Profile()
        loader(0)
        profiler.runcall(loader, 1)
        calls.append(sum(entry.callcount for entry in profiler.getstats()))
    assert calls[0] < 2000 and calls[1] < 1.2 * calls[0]


def test_loader_row_shows_the_image_of_its_visit(tmp_path, reader):
    """Flat images of one color each, in files with unusual names: the color of any crop names the image."""
    (tmp_path / "a").mkdir()
    unusual = ("with space.png", "größe 猫.png", "new\tline'\".png")
    names = [*(os.fsdecode(name.encode()) for name in unusual), *(f"{i}.png" for i in range(5))]
    for i, name in enumerate(sorted(names)):
        Image.new("RGB", (40 + i, 50), (30 * i, 255 - 30 * i, 7 * i)).save(tmp_path / "a" / name)
    still = Augmentation(size=16, jitter=0, gray=0, blur=0)
    loader = opened(unlabeled(image_folder(tmp_path), batch=4, augmentations=(still, still)), reader)
    for step in range(3):
        for view in loader(step):
            shown = (view[:, 0, 8, 8] * 255 / 30).round().long().tolist()
            assert shown == loader.draws(step).indices.tolist()


@pytest.mark.filterwarnings("error:The given NumPy")
def test_loader_pixels_in_memory_give_the_views_of_lossless_files(tmp_path, reader):
    """In any strides: a mapped file's, torch's with the channels moved to the end, OpenCV's with them reversed."""
    (tmp_path / "a").mkdir()
    pixels = np.stack([texture(i, 40, 36) for i in range(8)])
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "a" / f"{i}.png")
    files = image_folder(tmp_path)
    mapped = pixels.copy()
    mapped.flags.writeable = False
    moved, reverse = pixels.transpose(0, 3, 1, 2).copy(), pixels[..., ::-1].copy()
    theirs = opened(unlabeled(files, batch=4), reader)
    for strided in (mapped, moved.transpose(0, 2, 3, 1), reverse[..., ::-1]):
        index = pixel_index(files.files, files.labels, files.classes, strided)
        ours = opened(unlabeled(index, batch=4), reader)
        for step in (0, 1, 5):
            assert_same(ours(step), theirs(step))


@pytest.mark.slow
def test_loader_any_start_gives_the_bits_of_a_continuous_run(index, reader):
    """With any number of threads and of steps read ahead. The views survive later steps, and the loader."""
    loader = opened(unlabeled(index, augmentations=CROPS), reader)
    run = [loader(step) for step in range(6)]
    copies = [[view.clone() for view in views] for views in run]
    for start, options in ((0, {"threads": 2}), (1, {"prefetch": 1}), (4, {"prefetch": 4, "threads": 3})):
        resumed = opened(unlabeled(index, augmentations=CROPS), reader, **options)
        for step in range(start, 6):
            assert_same(resumed(step), run[step])
    for step in (4, 0, 3, 3):  # and back and forth in the same loader
        assert_same(loader(step), run[step])
    kept = loader._engine
    loader.use_threads(1)
    assert loader._engine is kept  # it has 1 already
    loader.use_threads(3)
    assert_same(loader(4), run[4])
    assert loader._engine is not kept and loader.options.threads == 3
    loader.close()
    for views, others in zip(run, copies, strict=True):
        assert_same(views, others)


def test_torchvision_engine_reads_ahead_and_each_file_once_a_step(index, monkeypatch):
    threads, read = [], ImageIndex.rgb
    current = threading.current_thread
    monkeypatch.setattr(ImageIndex, "rgb", lambda self, i: threads.append(current()) or read(self, i))
    loader = opened(unlabeled(index), "torchvision", prefetch=2)
    for step in range(3):
        loader(step)
    pool = loader._engine._pool
    pool.shutdown(wait=True)
    # Threads of another test's loader can still be at work; they do not count.
    assert sum(thread in pool._threads for thread in threads) == 6 * 4


def test_torchvision_engine_waits_for_no_gpu(index, monkeypatch):
    """A copy that waits would make each step of a run without DALI wait for the step before it."""
    handed = []
    monkeypatch.setattr(torchvision_engine, "to_device", lambda *given: handed.append(given) or given[0])
    plan = unlabeled(index)
    engine = torchvision_engine.TorchvisionEngine(plan, LoaderOptions(device="gpu"), draws=plan, first_step=0)
    for view, (source, device) in zip(engine.run(), handed, strict=True):
        assert view is source and device == torch.device("cuda", 0)
        assert view.is_contiguous(memory_format=torch.channels_last)


DAMAGE = {  # what happens to a file -> what is said; test_verify.py has further kinds
    "half.jpg": "truncated JPEG",
    "another size": "is 8 x 8 now, in the index",  # its crop would reach over the edge
    # It decodes to the same size, so that nothing else tells it from the image that the index describes.
    "another length": "bytes now, other than in the index: make the index again",
}


def spoil(path: Path, how: str) -> None:
    if how == "another size":
        Image.fromarray(texture(0, 8, 8)).save(path)
    elif how == "another length":
        with Image.open(path) as image:
            image.convert("RGB").save(path, quality=20)
    else:
        path.write_bytes(unusable_files(path.read_bytes())[how])


@pytest.fixture
def own(index, tmp_path) -> ImageIndex:
    """The same images in the test's own folder, indexed before anything was spoiled."""
    root = tmp_path / "own"
    shutil.copytree(index.root, root)
    return replace(index, root=root)


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
def test_loader_bad_file_is_named_at_its_step_or_replaced(own, reader, how):
    plan = unlabeled(own)
    bad = int(plan(2).indices[3])
    spoil(own.path(bad), how)
    loader = opened(plan, reader)
    loader(0), loader(1)  # reading ahead does not disturb the steps before
    with pytest.raises(BadImage) as caught:
        loader(2)
    ((path, reason),) = caught.value.files
    assert path == str(own.path(bad)) and DAMAGE[how] in reason
    assert caught.value.step == 2 and "step 2" in str(caught.value) and path in str(caught.value)
    loader = opened(plan, reader, bad_images=1)
    loader(2)
    assert list(loader.replaced) == [bad] and list(loader.bad.items()) == [(path, reason)]


def test_loader_replaces_an_allowed_bad_file_and_keeps_the_other_rows(own, index, reader, capfd):
    plan = unlabeled(own)
    bad = int(plan(2).indices[3])
    spoil(own.path(bad), "half.jpg")
    loader, clean = opened(plan, reader, bad_images=1), opened(unlabeled(index), reader)
    later = next(step for step in range(3, 1000) if bad in plan(step).indices)
    for step in [*range(4), later]:
        good = torch.from_numpy(plan(step).indices != bad)
        views, originals = ([view[good] for view in each(step)] for each in (loader, clean))
        assert_same(views, originals)
        assert all(i == loader.replaced[bad] for i in loader.draws(step).indices[~good.numpy()])
        assert (loader.draws(step).labels == own.labels[loader.draws(step).indices]).all()
    assert (~good).any()  # the last step asked for it again
    assert list(loader.bad) == [str(own.path(bad))] and list(loader.replaced) == [bad]
    assert capfd.readouterr().out.count(f"step 2: {own.name(bad)} cannot be decoded") == 1


def test_loader_replaces_a_stand_in_that_is_bad_too(own, reader, monkeypatch):
    plan = unlabeled(own)
    bad = int(plan(0).indices[0])
    both = {bad, plan.stand_in(bad, 0)}
    for i in both:
        spoil(own.path(i), "empty.jpg")
    loader = opened(plan, reader, bad_images=2)
    loader(0)
    assert set(loader.replaced) == both and not set(loader.replaced.values()) & both
    monkeypatch.setattr("pipelines.loader.STAND_IN_ATTEMPTS", 1)
    with pytest.raises(DataError, match="no image can stand in for"):
        opened(plan, reader, bad_images=2)(0)


def test_loader_one_bad_file_more_than_allowed_raises_and_names_all(own, reader):
    plan = unlabeled(own)
    bad = [int(i) for i in (*plan(0).indices[[1, 4]], plan(2).indices[0])]
    for i in bad:
        spoil(own.path(i), "page.jpg")
    for allowed, found in ((0, bad[:2]), (2, bad)):
        loader = opened(plan, reader, bad_images=allowed)
        with pytest.raises(BadImage, match=f"allow more than {allowed}") as caught:
            [loader(step) for step in range(3)]
        assert [path for path, _ in caught.value.files] == [str(own.path(i)) for i in found]


def test_loader_known_bad_files_are_replaced_from_the_start_or_refused(own, reader):
    bad = int(unlabeled(own)(0).indices[0])
    spoil(own.path(bad), "page.jpg")
    found_later = opened(unlabeled(own), reader, bad_images=1)
    found_later(0)
    known = image_folder(own.root)
    assert list(known.bad) == [bad]
    with pytest.raises(BadImage, match="not an image"):
        opened(unlabeled(known), reader)
    loader = opened(unlabeled(known), reader, bad_images=1)
    assert loader.replaced == found_later.replaced
    loader(0)


FAILED = "the device is lost"


@pytest.mark.parametrize(
    ("failure", "decoder_works"),
    [
        ("Can't allocate 9 bytes on device 0.", False),
        ("CUDA allocation failed", False),
        ("View: loading the kernels: CUDA_ERROR_OUT_OF_MEMORY", False),
        ("View: make_views: CUDA_ERROR_ILLEGAL_ADDRESS", False),
        ("CUDA runtime API error cudaErrorUnknown (999)", False),
        (FAILED, False),
        (FAILED, True),
    ],
)
def test_loader_takes_no_file_for_bad_when_memory_or_the_gpu_fails(own, failure, decoder_works, monkeypatch):
    """The decoder, which can meet the same failure, refuses every file by then."""
    plan = unlabeled(own)
    if failure != FAILED:
        spoil(own.path(int(plan(0).indices[0])), "empty.jpg")
    failed = mock.Mock(run=mock.Mock(side_effect=RuntimeError(f"Error in MIXED operator\n{failure}")))
    alone = mock.Mock() if decoder_works else failed
    monkeypatch.setattr("pipelines.verify.engine_of", lambda _: lambda *_, **__: alone)
    loader = opened(plan, bad_images=5)
    loader._start = lambda *_, **__: failed
    with pytest.raises(RuntimeError, match=re.escape(failure)):
        loader(0)
    assert not loader.bad
    loader.options = replace(loader.options, device="gpu")
    kind = torch.OutOfMemoryError if "alloc" in failure or "MEMORY" in failure else RuntimeError
    with pytest.raises(kind, match=re.escape(failure)) as raised:
        loader(0)
    assert raised.type is kind


def test_loader_prepares_a_step_again_that_failed_for_a_moment(own, reader, capsys):
    """Once: the next failure of good files is the decoder's."""
    expected, loader = opened(unlabeled(own), reader)(0), opened(unlabeled(own), reader)
    start, failed = loader._start, mock.Mock(side_effect=RuntimeError("a file server without an answer"))
    engines = iter([lambda: mock.Mock(run=failed)])
    loader._start = lambda *plan, **more: next(engines, lambda: start(*plan, **more))()
    assert_same(loader(0), expected)
    assert "each of its images can: they are read again" in capsys.readouterr().out
    loader._start, loader._engine = lambda *_, **__: mock.Mock(run=failed), None
    with pytest.raises(RuntimeError, match="without an answer"):
        loader(1)
    assert failed.call_count == 3 and not loader.bad


@pytest.mark.parametrize("failure", ["one stale file", "unmounted"])
def test_loader_takes_no_file_for_bad_when_the_disk_fails(own, reader, failure, monkeypatch):
    plan = unlabeled(own)
    loader = opened(plan, reader, bad_images=5)
    if failure == "unmounted":
        shutil.move(own.root, own.root.with_name("elsewhere"))
        own.root.mkdir()
    else:
        path = own.path(int(plan(0).indices[0]))
        spoil(path, "empty.jpg")
        stale = mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle"))
        monkeypatch.setattr("pipelines.datasets.image_headers._readable_by_pil", stale)
    with pytest.raises(OSError) as raised:
        loader(0)
    assert raised.value.errno in LOST and not loader.bad
    assert raised.value.filename == str(own.root if failure == "unmounted" else path)


def test_evaluation_shows_every_image_once_in_order_and_can_be_repeated(index, reader):
    indices = np.arange(23)[::-1].copy()
    next(evaluation(index, indices, reader, batch=8, resize=36))  # leaving early does no harm
    rounds = [[shown for (shown,) in evaluation(index, indices, reader, 8, 32, 36)] for _ in range(2)]
    for batches in rounds:
        assert [tuple(shown.shape) for shown in batches] == [(n, 3, 32, 32) for n in (8, 8, 7)]
        assert all(shown.is_contiguous(memory_format=torch.channels_last) for shown in batches)
    assert_same(*rounds)
    ((alone,),) = evaluation(index, indices[9:10], reader, 1, 32, 36)
    assert torch.equal(alone[0], rounds[0][1][1])  # an image's place in a batch does not count


def test_evaluation_shares_no_batch_between_two_decoders(index, monkeypatch):
    opened_with = mock.Mock()
    monkeypatch.setattr("pipelines.loader.Loader", opened_with)
    plan = EvaluationPlan(index, np.arange(3), 2, ())
    next(open_evaluation_loader(plan, LoaderOptions(threads=7, hw_decoder_share=0.5)))
    assert opened_with.call_args.args == (plan, LoaderOptions(threads=7))


def test_evaluation_leaves_images_in_memory_of_the_target_size_unchanged(reader):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    sizes = np.full((7, 2), 32, np.int32)
    index = ImageIndex(None, [f"{i}" for i in range(7)], np.arange(7) % 2, ("a", "b"), sizes, pixels)
    shown = torch.cat([images for (images,) in evaluation(index, np.arange(7), reader)]).permute(0, 2, 3, 1)
    torch.testing.assert_close(255 * shown, torch.from_numpy(pixels).float(), atol=1e-4, rtol=0)


def test_evaluation_never_skips_a_bad_image(own, reader):
    spoil(own.path(9), "half.jpg")
    with pytest.raises(BadImage, match="truncated") as caught:
        list(evaluation(own, np.arange(12), reader))
    assert caught.value.step is None  # a batch of an evaluation is not a training step
    assert "allow more" not in str(caught.value), "an evaluation replaces no image"
    spoil(own.path(9), "page.jpg")
    known = image_folder(own.root)
    with pytest.raises(BadImage, match="not an image") as caught:
        next(evaluation(known, np.arange(12), reader))
    assert [path for path, _ in caught.value.files] == [str(own.path(9))]
    assert len(list(evaluation(known, np.arange(9), reader))) == 3  # it is not asked for


def test_loader_without_a_gpu_raises_one_clear_error(index, reader, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DataError, match="no NVIDIA GPU with a working driver"):
        opened(unlabeled(index), reader, device="gpu")
