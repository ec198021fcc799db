"""Streams of views: any step at any time, the same for any threads and ranks, and bad files by their names."""

import shutil
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import pipelines.loader
from pipelines import backend
from pipelines import torchvision_engine as torchvision_twin
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader, open_evaluation_loader, open_loader
from pipelines.sampling.augmentation import Augmentation, ViewParams
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tests.support.pictures import texture, write_pictures

SMALL = Augmentation(size=32)
TWO_VIEWS = (SMALL, SMALL)
BACKENDS = [
    pytest.param(
        "dali", marks=pytest.mark.skipif(backend.dali_problem() is not None, reason="DALI is not installed")
    ),
    "torchvision",
]


@pytest.fixture(params=BACKENDS)
def reader(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=24, side=48)


def unlabeled(index, batch=6, world_size=1, rank=0, augmentations=TWO_VIEWS, seed=0) -> Plan:
    sampler = UnlabeledSampler(len(index), batch, world_size, seed)
    return Plan(index, sampler, augmentations, seed=seed, role="unlabeled", rank=rank)


def labeled(index, indices, world_size=1, rank=0) -> Plan:
    sampler = ClassSampler(indices, index.labels[indices], 3, 2, world_size, seed=0)
    return Plan(index, sampler, (SMALL,), seed=0, role="labeled", rank=rank)


def opened(plan: Plan, reader: str = "auto", **options) -> Loader:
    options = {"threads": 1, "prefetch": 2, **options}
    return open_loader(plan.index, plan, plan.augmentations, backend=reader, **options)


def assert_same(views: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(views) == len(others)
    assert all(torch.equal(view, other) for view, other in zip(views, others))


# -- what comes out


def test_views_are_channels_last_floats_between_0_and_1_one_per_augmentation(index, reader):
    crops = (SMALL, SMALL, replace(SMALL, size=16, crop_scale=(0.05, 0.14)))
    views = opened(unlabeled(index, augmentations=crops), reader)(0)
    assert [tuple(view.shape) for view in views] == [(6, 3, 32, 32), (6, 3, 32, 32), (6, 3, 16, 16)]
    for view in views:
        assert view.dtype == torch.float32 and not view.requires_grad
        assert view.is_contiguous(memory_format=torch.channels_last)
        assert 0 <= view.min() < 0.2 and 0.8 < view.max() <= 1


def test_mean_and_std_and_half_precision_are_applied_last(index, reader):
    normalised = replace(SMALL, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    (plain,) = opened(unlabeled(index, augmentations=(SMALL,)), reader)(3)
    (scaled,) = opened(unlabeled(index, augmentations=(normalised,)), reader)(3)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (normalised.mean, normalised.std))
    torch.testing.assert_close(scaled, (plain - mean) / std, atol=1e-5, rtol=0)
    (half,) = opened(unlabeled(index, augmentations=(SMALL,)), reader, dtype=torch.float16)(3)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), plain, atol=5e-4, rtol=0)


def test_two_views_of_an_image_differ_and_so_do_steps(index, reader):
    loader = opened(unlabeled(index, batch=24), reader)
    (first, second), (later, _) = loader(0), loader(1)
    assert ((first - second).abs().mean((1, 2, 3)) > 0.02).all()
    order, later_order = (loader.visit(step).indices for step in (0, 1))
    same_image = later[torch.from_numpy(np.argsort(later_order))] - first[torch.from_numpy(np.argsort(order))]
    assert (same_image.abs().mean((1, 2, 3)) > 0.02).all()


def test_a_row_shows_the_image_that_the_visit_names(tmp_path, reader):
    # Flat images of one colour each: whatever is cropped, the colour tells which image it is.
    for i in range(8):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.new("RGB", (40 + i, 50), (30 * i, 255 - 30 * i, 7 * i)).save(tmp_path / "a" / f"{i}.png")
    still = Augmentation(size=16, jitter=0, grey=0, blur=0)
    loader = opened(unlabeled(image_folder(tmp_path), batch=4, augmentations=(still, still)), reader)
    for step in range(3):
        for view in loader(step):
            shown = (view[:, 0, 8, 8] * 255 / 30).round().long().tolist()
            assert shown == loader.visit(step).indices.tolist()


def test_views_stay_what_they_are_while_later_steps_are_read_and_the_loader_closes(index, reader):
    loader = opened(unlabeled(index), reader)
    views = loader(0)
    copies = [view.clone() for view in views]
    for step in range(1, 6):
        loader(step)
    loader(20)
    loader.close()
    assert_same(views, copies)


@pytest.mark.parametrize("name", ["with space.jpg", "größe 猫.jpg", "new\tline'\".jpg"])
def test_a_file_may_have_any_name(tmp_path, name, reader):
    (tmp_path / "a").mkdir()
    Image.fromarray(texture(0, 40, 40)).save(tmp_path / "a" / name)
    (view, _) = opened(unlabeled(image_folder(tmp_path), batch=1), reader)(0)
    assert view.std() > 0.01


def test_resident_pixels_give_the_views_that_lossless_files_give(tmp_path, reader):
    (tmp_path / "a").mkdir()
    pixels = np.stack([texture(i, 40, 36) for i in range(8)])
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "a" / f"{i}.png")
    files = image_folder(tmp_path)
    resident = replace(files, root=None, pixels=pixels, stamps=None)
    ours, theirs = (opened(unlabeled(index, batch=4), reader) for index in (resident, files))
    for step in (0, 1, 5):
        assert_same(ours(step), theirs(step))


# -- any step, any machine


def test_starting_at_any_step_gives_the_bits_of_a_run_that_came_there(index, reader):
    loader = opened(unlabeled(index), reader)
    run = [[view.clone() for view in loader(step)] for step in range(6)]
    for start in range(6):
        resumed = opened(unlabeled(index), reader)
        for step in range(start, 6):
            assert_same(resumed(step), run[step])
    for step in (4, 0, 3, 3):  # and back and forth in the same loader
        assert_same(loader(step), run[step])


@pytest.mark.parametrize("options", [{"threads": 2}, {"prefetch": 1}, {"prefetch": 4, "threads": 3}])
def test_threads_and_prefetching_change_no_bit(index, reader, options):
    one, other = opened(unlabeled(index), reader), opened(unlabeled(index), reader, **options)
    for step in range(4):
        assert_same(one(step), other(step))


@pytest.mark.parametrize("stream", ["unlabeled", "labeled"])
def test_two_ranks_rows_are_one_processes_rows(index, reader, stream):
    labeled_images = np.arange(0, 24, 2)

    def plan(world_size, rank):
        if stream == "unlabeled":
            return unlabeled(index, 6, world_size, rank)
        return labeled(index, labeled_images, world_size, rank)

    one = opened(plan(1, 0), reader)
    ranks = [opened(plan(2, rank), reader) for rank in range(2)]
    for step in (0, 1, 7):
        joined = [torch.cat(parts) for parts in zip(*(loader(step) for loader in ranks))]
        assert_same(one(step), joined)
        labels = np.concatenate([loader.visit(step).labels for loader in ranks])
        np.testing.assert_array_equal(labels, one.visit(step).labels)


def test_streams_of_other_roles_and_seeds_are_other_streams(index):
    plans = [unlabeled(index), unlabeled(index, seed=1)]
    plans.append(Plan(index, plans[0].sampler, TWO_VIEWS, seed=0, role="other"))
    boxes = [plan(0).views[0].box for plan in plans] + [plans[0](0).views[1].box]
    for i, box in enumerate(boxes):
        assert not any((box == other).all(1).any() for other in boxes[i + 1 :])


def test_the_loader_refuses_augmentations_that_were_not_drawn_for(index):
    plan = unlabeled(index)
    with pytest.raises(ValueError, match="not those that the plan draws for"):
        open_loader(index, plan, (SMALL,))


# -- bad files


def spoil(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "gif":
        Image.fromarray(texture(0, 40, 40)).save(path, format="GIF")
    else:
        contents = {
            "truncated": whole[: len(whole) // 2],
            "stub": whole[:300],
            "empty": b"",
            "random": np.random.default_rng(0).bytes(4000),
            "html": b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
        }
        path.write_bytes(contents[how])


REASONS = {
    "truncated": "truncated JPEG",
    "stub": "",
    "empty": "empty file",
    "missing": "no such file",
    "random": "not an image",
    "gif": "GIF",
    "html": "not an image",
}


@pytest.fixture
def own(index, tmp_path) -> ImageIndex:
    """The same images in a folder of the test's own, indexed before anything was spoiled."""
    root = tmp_path / "own"
    shutil.copytree(index.root, root)
    return replace(index, root=root)


def first_step_with(plan: Plan, image: int, after: int = 0) -> int:
    return next(step for step in range(after, 1000) if image in plan(step).indices)


@pytest.mark.parametrize("how", REASONS)
def test_a_bad_file_ends_the_run_at_its_step_with_its_name_and_the_reason(own, reader, how):
    plan = unlabeled(own)
    bad = int(plan(2).indices[3])
    spoil(own.path(bad), how)
    loader = opened(plan, reader)
    loader(0), loader(1)  # read ahead or not: the step before is not disturbed
    with pytest.raises(BadImage) as caught:
        loader(2)
    ((path, reason),) = caught.value.files
    assert path == str(own.path(bad)) and REASONS[how] in reason
    assert caught.value.step == 2 and "step 2" in str(caught.value) and path in str(caught.value)


def test_all_bad_files_of_a_step_are_named_at_once(own, reader):
    plan = unlabeled(own)
    bad = plan(0).indices[[1, 4]]
    for i in bad:
        spoil(own.path(i), "html")
    with pytest.raises(BadImage) as caught:
        opened(plan, reader)(0)
    assert [path for path, _ in caught.value.files] == [str(own.path(i)) for i in bad]


def test_a_file_exchanged_for_one_of_another_size_is_named(own, reader):
    plan = unlabeled(own)
    bad = int(plan(0).indices[0])
    box = plan(0).views[0].box[0]
    Image.fromarray(texture(0, box[0] + box[2] - 1, 300)).save(own.path(bad))  # the box reaches over its edge
    with pytest.raises(BadImage, match="make it again") as caught:
        opened(plan, reader)(0)
    assert [path for path, _ in caught.value.files] == [str(own.path(bad))]


def test_an_allowed_bad_file_is_replaced_and_the_other_rows_keep_their_bits(own, index, reader, capfd):
    plan = unlabeled(own)
    bad = int(plan(2).indices[3])
    spoil(own.path(bad), "truncated")
    loader, clean = opened(plan, reader, bad_images=1), opened(unlabeled(index), reader)
    later = first_step_with(plan, bad, after=3)
    for step in [*range(5), later]:
        views, originals = loader(step), clean(step)
        good = torch.from_numpy(plan(step).indices != bad)
        assert_same([view[good] for view in views], [view[good] for view in originals])
        replaced = loader.visit(step).indices[~good.numpy()]
        assert all(i == loader.replaced[bad] for i in replaced)
    assert (~good).any()  # the last of these steps asked for it again
    assert list(loader.bad) == [str(own.path(bad))] and list(loader.replaced) == [bad]
    assert capfd.readouterr().out.count(f"step 2: {own.name(bad)} cannot be decoded") == 1


def test_a_stand_in_gets_a_crop_of_its_own_size_and_the_rows_other_draws(own, reader):
    plan = unlabeled(own)
    bad = int(plan(0).indices[0])
    spoil(own.path(bad), "empty")
    loader = opened(plan, reader, bad_images=1)
    shown = loader(0)
    stand_in = loader.replaced[bad]
    # What a run would have shown whose sampler had drawn the stand-in in that row in the first place.
    sampler = plan.sampler
    rows = sampler.rows(0, 0)
    rows[0] = stand_in
    sampler.rows = lambda step, rank: rows
    assert_same(shown, opened(plan, reader)(0))
    for field in fields(ViewParams):
        before, after = (
            getattr(visit.views[0], field.name) for visit in (unlabeled(own)(0), loader.visit(0))
        )
        np.testing.assert_array_equal(before[1:], after[1:])
        if field.name != "box":
            np.testing.assert_array_equal(before, after)


def test_replacements_are_the_same_on_every_rank_and_after_a_restart(own, reader):
    plan = unlabeled(own, 24)
    spoiled = [3, 11]
    for i in spoiled:
        spoil(own.path(i), "empty")
    loader = opened(plan, reader, bad_images=2)
    views = {step: [view.clone() for view in loader(step)] for step in range(3)}
    assert sorted(loader.replaced) == spoiled and not set(loader.replaced.values()) & set(spoiled)
    restarted = opened(plan, reader, bad_images=2)
    assert_same(restarted(1), views[1])
    assert restarted.replaced == loader.replaced
    ranks = [opened(unlabeled(own, 24, 2, rank), reader, bad_images=2) for rank in range(2)]
    joined = [torch.cat(parts) for parts in zip(*(rank(2) for rank in ranks))]
    assert_same(joined, views[2])


def test_a_stand_in_that_is_bad_itself_is_replaced_in_turn(own, reader):
    plan = unlabeled(own)
    bad = int(plan(0).indices[0])
    stand_in = plan.stand_in(bad, 0)
    for i in (bad, stand_in):
        spoil(own.path(i), "empty")
    loader = opened(plan, reader, bad_images=2)
    loader(0)
    assert set(loader.replaced) == {bad, stand_in}
    assert not set(loader.replaced.values()) & {bad, stand_in}


def test_one_bad_file_more_than_allowed_ends_the_run_and_names_them_all(own, reader):
    plan = unlabeled(own)
    bad = [int(plan(step).indices[0]) for step in (0, 1, 2)]
    for i in bad:
        spoil(own.path(i), "empty")
    loader = opened(plan, reader, bad_images=2)
    with pytest.raises(BadImage, match="allow more than 2") as caught:
        [loader(step) for step in range(3)]
    assert {path for path, _ in caught.value.files} == {str(own.path(i)) for i in bad}


def test_a_labeled_stand_in_is_a_labeled_image_of_the_same_class(own, reader):
    few = np.arange(0, 24, 2)  # four labeled images of each of three classes
    plan = labeled(own, few)
    bad = int(plan(0).indices[0])
    spoil(own.path(bad), "empty")
    loader = opened(plan, reader, bad_images=1)
    loader(0)
    stand_in = loader.replaced[bad]
    assert stand_in in few and stand_in != bad
    np.testing.assert_array_equal(loader.visit(0).labels, plan(0).labels)


def test_a_stand_in_of_another_class_comes_with_its_own_label_and_size(index):
    plan = labeled(index, np.arange(24))
    bad = int(plan(0).indices[0])
    other = int(np.flatnonzero(index.labels != index.labels[bad])[0])
    visit = plan(0, {bad: other})
    assert visit.indices[0] == other and visit.labels[0] == index.labels[other]
    top, left, height, width = visit.views[0].box[0]
    assert top + height <= index.sizes[other, 0] and left + width <= index.sizes[other, 1]


def test_stand_ins_come_from_the_class_while_it_has_any_and_then_from_the_stream(index):
    few = np.arange(0, 24, 2)
    plan = labeled(index, few)
    bad = int(few[0])
    early = {plan.stand_in(bad, attempt) for attempt in range(16)}
    late = {plan.stand_in(bad, attempt) for attempt in range(16, 200)}
    assert (index.labels[list(early)] == index.labels[bad]).all() and len(early) > 1
    assert late == set(few.tolist())
    assert {unlabeled(index).stand_in(bad, attempt) for attempt in range(400)} == set(range(24))
    assert len({unlabeled(index).stand_in(image, 0) for image in range(24)}) > 8  # each has its own


def test_files_known_to_be_bad_are_replaced_from_the_start_or_refused_at_once(own, reader):
    plan = unlabeled(own)
    bad = int(plan(0).indices[0])
    spoil(own.path(bad), "html")
    known = image_folder(own.root)
    assert list(known.bad) == [bad]
    with pytest.raises(BadImage, match="not an image"):
        opened(unlabeled(known), reader)
    loader = opened(unlabeled(known), reader, bad_images=1)
    assert loader.replaced[bad] == opened_replacement(own, reader, bad)
    loader(0)


def opened_replacement(index: ImageIndex, reader: str, bad: int) -> int:
    loader = opened(unlabeled(index), reader, bad_images=1)
    loader(first_step_with(unlabeled(index), bad))
    return loader.replaced[bad]


class FailingEngine:
    def __init__(self, *_, **__):
        pass

    def run(self):
        raise RuntimeError("the device is lost")


def test_a_failure_that_no_file_is_to_blame_for_is_passed_on(index, reader, monkeypatch):
    def lost(path):
        raise RuntimeError("the device is lost")

    healthy = opened(unlabeled(index), reader, bad_images=5)
    for decode in (healthy._decode, lost):  # the files are good; the decoder may have failed as well
        loader = Loader(index, unlabeled(index), reader, FailingEngine, decode, bad_images=5)
        with pytest.raises(RuntimeError, match="the device is lost"):
            loader(0)
        assert not loader.bad


# -- evaluation


def test_an_evaluation_shows_every_image_once_in_order_and_again(index, reader):
    indices = np.arange(23)[::-1].copy()
    loader = open_evaluation_loader(index, indices, 8, 32, 36, threads=1, backend=reader)
    assert len(loader) == 3
    rounds = [list(loader) for _ in range(2)]
    for batches in rounds:
        assert [len(images) for images, _, _ in batches] == [8, 8, 7]
        np.testing.assert_array_equal(torch.cat([i for _, _, i in batches]).numpy(), indices)
        np.testing.assert_array_equal(torch.cat([y for _, y, _ in batches]).numpy(), index.labels[indices])
        for images, labels, _ in batches:
            assert images.shape[1:] == (3, 32, 32) and labels.dtype == torch.int64
            assert images.is_contiguous(memory_format=torch.channels_last)
    assert_same([images for images, _, _ in rounds[0]], [images for images, _, _ in rounds[1]])


def test_an_evaluation_can_be_left_early_and_started_anew(index, reader):
    loader = open_evaluation_loader(index, np.arange(20), 5, 32, 32, threads=1, prefetch=3, backend=reader)
    first = next(iter(loader))[0].clone()
    assert torch.equal(next(iter(loader))[0], first)
    assert [len(images) for images, _, _ in loader] == [5, 5, 5, 5]


def test_an_evaluation_leaves_resident_images_of_the_target_size_as_they_are(reader):
    pixels = np.random.default_rng(0).integers(0, 256, (7, 32, 32, 3), dtype=np.uint8)
    index = ImageIndex(
        None, [f"{i}" for i in range(7)], np.arange(7) % 2, ("a", "b"), np.full((7, 2), 32, np.int32), pixels
    )
    loader = open_evaluation_loader(index, np.arange(7), 4, 32, 32, threads=1, backend=reader)
    shown = torch.cat([images for images, _, _ in loader]).permute(0, 2, 3, 1)
    torch.testing.assert_close(255 * shown, torch.from_numpy(pixels).float(), atol=1e-4, rtol=0)


def test_an_evaluation_never_passes_over_a_bad_image(own, reader):
    spoil(own.path(9), "truncated")
    loader = open_evaluation_loader(own, np.arange(12), 4, 32, 32, threads=1, backend=reader)
    with pytest.raises(BadImage, match="truncated") as caught:
        list(loader)
    assert caught.value.step is None  # a batch of an evaluation is no training step
    spoil(own.path(9), "html")
    known = image_folder(own.root)
    with pytest.raises(BadImage, match="not an image"):
        open_evaluation_loader(known, np.arange(12), 4, 32, 32, backend=reader)
    assert len(list(open_evaluation_loader(known, np.arange(9), 4, 32, 32, threads=1, backend=reader))) == 3


# -- back-ends and devices


@pytest.fixture
def without_dali(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # importing it now raises ImportError
    monkeypatch.setattr(backend, "_say_once", backend._say_once.__wrapped__)


def test_without_dali_auto_is_torchvision_and_says_so_with_the_command(index, without_dali, capfd):
    loader = opened(unlabeled(index))
    assert loader.backend == "torchvision"
    said = capfd.readouterr().out
    assert said.count("\n") == 1 and "torchvision reads the images instead" in said
    assert "pip install 'nvidia-dali-cuda1" in said
    assert_same(loader(1), opened(unlabeled(index), "torchvision")(1))


def test_without_dali_asking_for_it_is_an_error_with_the_command(index, without_dali):
    with pytest.raises(DataError, match="pip install 'nvidia-dali-cuda1"):
        opened(unlabeled(index), "dali")


@pytest.mark.parametrize(("cuda", "build"), [("13.2", "cuda130"), ("12.8", "cuda120"), (None, "cuda120")])
def test_the_command_names_the_build_that_goes_with_torchs_cuda(monkeypatch, cuda, build):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert f"nvidia-dali-{build}" in backend.install_command()


def test_the_line_about_the_fallback_is_said_once(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    backend._say_once.cache_clear()
    assert [backend.choose_backend("auto") for _ in range(3)] == ["torchvision"] * 3
    assert capfd.readouterr().out.count("torchvision reads the images") == 1
    backend._say_once.cache_clear()


def test_a_gpu_that_is_not_there_is_one_clear_error(index, reader, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DataError, match="no NVIDIA GPU with a working driver"):
        opened(unlabeled(index), reader, device="gpu")


@pytest.mark.skipif(backend.dali_problem() is not None, reason="DALI is not installed")
def test_on_a_gpu_a_step_is_handed_over_on_the_stream_that_torch_works_on(index, monkeypatch):
    from nvidia.dali import Pipeline

    expected = opened(unlabeled(index), "dali")(1)
    loader = opened(unlabeled(index), "dali")
    loader(0)
    outputs, asked = Pipeline.outputs, []
    monkeypatch.setattr(Pipeline, "outputs", lambda self, stream: asked.append(stream) or outputs(self))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of GPU {device}")
    loader._engine._device, loader._engine._device_id = "gpu", 3
    assert_same(loader(1), expected)
    assert asked == ["the stream of GPU 3"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, '"cpu" or "gpu"'),
        ({"dtype": torch.float64}, "float32 or"),
        ({"reader": "pil"}, '"auto"'),
        ({"threads": 0}, "threads is a number of 1 or more"),
        ({"prefetch": 0}, "prefetch is a number of 1 or more"),
    ],
)
def test_values_that_name_nothing_are_refused(index, options, words):
    with pytest.raises(ValueError, match=words):
        opened(unlabeled(index), **options)


def test_a_rank_beyond_the_samplers_is_refused(index):
    with pytest.raises(ValueError, match="rank 2 is not one of"):
        unlabeled(index, world_size=2, rank=2)


def test_the_twin_reads_ahead_and_no_file_twice_for_a_step(index, monkeypatch):
    read = []
    read_rgb = torchvision_twin.read_rgb
    me = threading.current_thread
    monkeypatch.setattr(torchvision_twin, "read_rgb", lambda path: read.append(me()) or read_rgb(path))
    loader = opened(unlabeled(index), "torchvision", prefetch=2)
    for step in range(3):
        loader(step)
    pool = loader._engine._pool
    pool.shutdown(wait=True)
    # Another test's loader may still be finishing what it had begun: its threads do not count.
    assert sum(thread in pool._threads for thread in read) == 6 * 4


def test_importing_the_loader_imports_no_dali():
    source = Path(pipelines.loader.__file__).parent
    for module in ("loader", "plan", "params", "probe", "backend", "torchvision_twin"):
        lines = (source / f"{module}.py").read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import", "from")) and "dali" in line], module
