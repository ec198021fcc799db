"""The DALI graphs against torchvision on the same files and parameters: operator by operator, and whole.

Differences are in gray levels of 255. What one DALI graph computes twice is compared to the bit. What DALI and
torchvision compute is compared with a bound: both choose code by the processor, each is right to a level, and rounding
adds up over the operators. The bounds lie between that and the smallest mistake that they must find (a hue of 0.05 left
out, or a crop one pixel off: about 3.5 levels).
"""

import os
import tarfile
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
import nvidia.dali.backend as backend_impl
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def

from pipelines.dali import graphs
from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Augmentation, Center, ViewParams, draw_view
from pipelines.sampling.step_plan import BatchDraws
from tests.support.pictures import texture, write_kinds, write_pictures
from tests.support.streams import evaluation, opened
from tests.support.view_operator import needs_view_operator

EXACT = Augmentation(size=64, color_order="fixed")
STILL = replace(EXACT, flip=0, jitter=0, gray=0, blur=0)
SAMPLE = Path(
    os.environ.get(
        "FASTSUNCET_IMAGENET_SAMPLE",
        Path(__file__).resolve().parents[4] / "shared" / "data" / "imagenet-sample-480.tar",
    )
)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

# Mean levels. After a crop, a color operator multiplies its error and rounds again.
BOUNDS = {"crop": 0.5, "flip": 0.5, "blur": 0.75, "drawn": 2.5}
COLOR_BOUND = 1.75


class GivenViews:
    """A plan of one step: every image of an index once, with views that a test chose."""

    def __init__(self, index: ImageIndex, augmentation: Augmentation, views):
        self.index, self.augmentations, self.views = index, (augmentation,) * len(views), tuple(views)
        self.batch = len(index)

    def __call__(self, step, replaced=None) -> BatchDraws:
        return BatchDraws(step, np.arange(len(self.index)), self.index.labels, self.views)

    def stand_in(self, bad, attempt):
        raise AssertionError("no image is bad")


def levels_of(index, augmentation, views, **options) -> list[torch.Tensor]:
    """Each view of all images, (N, 3, S, S) in gray levels, by the graph itself and not by the view operator."""
    plan = GivenViews(index, augmentation, views)
    return [255 * view.cpu() for view in opened(plan, prefetch=1, view_operator=False, **options)(0)]


def one_by_one(sizes: np.ndarray) -> dict[str, ViewParams]:
    """A view for each operator, all with the same boxes; values alternate over the rows. "drawn" is a training view."""
    n = len(sizes)
    still = draw_view(STILL, sizes, seed=0, step=0, role="c", first_row=0)
    drawn = draw_view(EXACT, sizes, seed=0, step=0, role="c", first_row=0)
    values = {
        "brightness": (0.4, 1.6),
        "contrast": (0.3, 1.7),
        "saturation": (0.3, 1.7),
        "hue": (0.05, 0.1, 0.2, -0.2),
    }
    return {
        "crop": still,
        "flip": replace(still, flip=np.ones(n, bool)),
        "gray": replace(still, gray=np.ones(n, bool)),
        **{name: replace(still, **{name: np.resize(np.float32(each), n)}) for name, each in values.items()},
        "blur": replace(still, sigma=np.resize(np.float32([0.5, 1.0, 2.0]), n)),
        "drawn": replace(drawn, box=still.box),
    }


def compare(index: ImageIndex) -> SimpleNamespace:
    """Every view of `one_by_one` by name, its numbers and its images from DALI and from torchvision."""
    views = one_by_one(index.sizes)
    made = {
        backend: dict(zip(views, levels_of(index, EXACT, list(views.values()), backend=backend)))
        for backend in ("dali", "torchvision")
    }
    return SimpleNamespace(views=views, **made)


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=12, side=90)


@pytest.fixture(scope="module")
def compared(index) -> SimpleNamespace:
    return compare(index)


def mean(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


def require_close(compared: SimpleNamespace) -> None:
    for case in compared.views:
        bound = BOUNDS.get(case, COLOR_BOUND)
        assert mean(compared.dali[case], compared.torchvision[case]) < bound, case
        # Two back-ends that both did nothing would be close too.
        assert case == "crop" or mean(compared.dali[case], compared.dali["crop"]) > 2 * bound, case


# -- every operator


def test_graph_random_order_of_the_factors_is_torchvisions(index):
    augmentation = replace(EXACT, color_order="random", jitter=1, gray=0, blur=0)
    view = draw_view(augmentation, index.sizes, seed=0, step=2, role="c", first_row=0)
    ours, theirs = (
        levels_of(index, augmentation, [view], backend=each)[0] for each in ("dali", "torchvision")
    )
    (fixed,) = levels_of(index, EXACT, [view], backend="dali")
    assert mean(ours, theirs) < COLOR_BOUND < mean(ours, fixed) / 2


@pytest.mark.slow
def test_graph_every_operator_is_close_to_torchvisions_and_does_something(compared):
    require_close(compared)


def test_graph_crop_differs_by_two_levels_but_at_the_border(compared):
    difference = (compared.dali["crop"] - compared.torchvision["crop"]).abs()
    assert difference[:, :, 1:-1, 1:-1].max() <= 2.001
    assert difference.max() < 30  # a region of interest inside the resize operator: 40


def test_graph_neutral_numbers_change_no_pixel(compared, index):
    drawn, still = compared.views["drawn"], compared.views["crop"]
    idle = (drawn.brightness == 1) & ~drawn.gray & (drawn.sigma == 0) & ~drawn.flip
    for field in fields(ViewParams):
        values = getattr(drawn, field.name).copy()
        values[::2] = getattr(still, field.name)[::2]
        drawn = replace(drawn, **{field.name: values})
    idle[::2] = True
    (mixed,) = levels_of(index, EXACT, [drawn], backend="dali")
    assert torch.equal(mixed[idle], compared.dali["crop"][idle])
    assert not torch.equal(mixed[~idle], compared.dali["crop"][~idle])


def test_graph_flip_mirrors_the_crop_and_gray_has_equal_channels(compared):
    assert torch.equal(compared.dali["flip"], compared.dali["crop"].flip(3))
    gray = compared.dali["gray"]
    assert torch.equal(gray[:, 0], gray[:, 1]) and torch.equal(gray[:, 0], gray[:, 2])


def test_graph_blur_of_any_window_is_torchvisions_of_23():
    image, sigmas, windows = texture(3, 64, 80), np.float32([0.1, 0.5, 1.0, 2.0]), ("auto", 23)

    @pipeline_def(batch_size=4, num_threads=1, device_id=None, exec_dynamic=True, enable_conditionals=True)
    def blurred():
        arrays = [np.stack([image] * 4), sigmas]
        source, sigma = fn.external_source(lambda: arrays, num_outputs=2, layout=["HWC", ""])
        return tuple(graphs.blur(source, sigma, window) for window in windows)

    source = torch.from_numpy(image).permute(2, 0, 1)
    theirs = torch.stack([v2.functional.gaussian_blur(source, [23, 23], [float(s)] * 2) for s in sigmas])
    for output in blurred().run():
        ours = torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2).float()
        assert mean(ours, theirs.float()) < 0.25 and (ours - theirs.float()).abs().max() <= 2


def test_color_hue_is_torchvisions_for_every_kind_of_color():
    """Grays, primaries, and every way for two channels to tie: each is a case in any formula for hue."""
    levels = np.array([0, 1, 51, 128, 200, 254, 255], np.uint8)
    palette = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), 3).reshape(49, 7, 3)
    turns = np.array([-0.5, -0.2, -0.05, 0.0, 0.1, 1 / 3, 0.5], np.float32)

    @pipeline_def(batch_size=len(turns), num_threads=1, device_id=None, exec_dynamic=True)
    def rotated():
        arrays = [np.stack([palette] * len(turns)), turns]
        image, by = fn.external_source(lambda: arrays, num_outputs=2, layout=["HWC", ""])
        return graphs.hue(image, by)

    ours = torch.from_dlpack(rotated().run()[0].as_tensor()).permute(0, 3, 1, 2).float()
    image = torch.from_numpy(palette).permute(2, 0, 1)
    theirs = torch.stack([v2.functional.adjust_hue(image, float(by)) for by in turns]).float()
    assert (ours - theirs).abs().max() <= 1 and mean(ours, theirs) < 0.25
    assert torch.equal(ours[3], image.float())


def test_color_contrast_expression_equals_the_operator_to_the_bit():
    """A GPU uses the expression and a CPU the operator; only here can both be compared."""
    images = np.stack([texture(i, 48, 48) for i in range(6)])
    factors = np.array([0.2, 0.7, 1.0, 1.3, 1.8, 0.0], np.float32)

    @pipeline_def(batch_size=6, num_threads=1, device_id=None, exec_dynamic=True)
    def both():
        image, factor = fn.external_source(lambda: [images, factors], num_outputs=2, layout=["HWC", ""])
        gray = fn.color_space_conversion(image, image_type=graphs.types.RGB, output_type=graphs.types.GRAY)
        mean_gray = fn.reductions.mean(gray)
        return graphs.contrast(image, factor), graphs.contrast_expression(mean_gray, factor, image)

    operator, expression = (torch.from_dlpack(output.as_tensor()) for output in both().run())
    assert torch.equal(operator, expression)
    assert torch.equal(operator[2], torch.from_numpy(images[2]))


# -- files, and the evaluation view


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("height_width", [(96, 96), (96, 130), (131, 96)])
def test_graph_reads_every_kind_of_file_as_pil_does(tmp_path, height_width, upright):
    index = write_kinds(tmp_path, *height_width, upright=upright)
    ((images,),) = evaluation(index, np.arange(len(index)), "dali", batch=8, size=96, resize=96)
    for i, ours in enumerate(images):
        theirs = v2.CenterCrop(96)(torch.from_numpy(index.rgb(i)).permute(2, 0, 1)).float()
        bound = 1 if index.name(i).endswith("jpg") else 0
        assert (255 * ours - theirs).abs().max() <= bound + 1e-3, index.name(i)


@pytest.mark.parametrize("backend", ["dali", "torchvision"])
def test_graph_evaluation_view_is_torchvisions_resize_and_center_crop(index, backend):
    theirs = v2.Compose([v2.Resize(88), v2.CenterCrop(80)])
    shown = torch.cat([images for (images,) in evaluation(index, np.arange(len(index)), backend, 5, 80, 88)])
    for i, ours in enumerate(shown):
        with Image.open(index.path(i)) as image:
            reference = v2.functional.pil_to_tensor(theirs(image.convert("RGB"))).float()
        difference = (255 * ours - reference).abs()
        assert difference.mean() < 0.5 and difference.max() <= 2.001, i


def test_graph_is_as_close_on_photographs(tmp_path):
    if not SAMPLE.exists():
        pytest.skip(f"no {SAMPLE.name}: set FASTSUNCET_IMAGENET_SAMPLE to a tar of ImageNet's JPEG files")
    (tmp_path / "all").mkdir()
    with tarfile.open(SAMPLE) as archive:
        for member in [member for member in archive if member.isfile()][::60]:
            (tmp_path / "all" / Path(member.name).name).write_bytes(archive.extractfile(member).read())
    require_close(compare(image_folder(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["files", "pixels"])
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=needs_view_operator)])
def test_graph_on_a_gpu_has_every_operator_and_operand_in_its_place(request, monkeypatch, stored, fused):
    """DALI itself would say so only where there is a driver.

    An operator must exist for its device, its images must be there, and its arguments and predicates on the CPU.
    """
    if fused:
        request.getfixturevalue("view_operator")
        monkeypatch.setattr(graphs, "kernels", lambda *_: b"code")
    pipeline = graphs.views(
        *(lambda _: None,) * 2,
        (EXACT, replace(EXACT, color_order="random"), Center()),
        **{"decode": "mixed", "stored": stored, "view_operator": fused},
        **{"batch_size": 2, "num_threads": 1, "device_id": 0},
    )
    pipeline._build_graph()
    registered = {
        "cpu": backend_impl.RegisteredCPUOps(True),
        "gpu": backend_impl.RegisteredGPUOps(True),
        "mixed": backend_impl.RegisteredMixedOps(True),
    }
    names = []
    for node in pipeline._ops:
        spec, device = node.spec, node._op.device
        names.append(getattr(node._op, "schema_name", "ExternalSource"))
        assert names[-1] in registered[device], f"{names[-1]} is no operator of the {device}"
        for i in range(spec.NumInput()):
            place = "gpu" if device == "gpu" and i < spec.NumRegularInput() else "cpu"
            assert spec.InputDevice(i) == place, (
                f"{names[-1]}: input {spec.InputName(i)} is on the {spec.InputDevice(i)}"
            )
    lengths = ["cpu"] if stored == "files" else []
    assert [output.device for output in pipeline._graph_outputs] == ["gpu"] * 3 + lengths
    # Without the view operator a view is made of many passes over memory.
    of_files = ("ExternalSource", "io__file__Read", "decoders__Image", "_Shape")
    of_views = [name for name in names if name not in of_files]
    one = ["Slice", "Resize", "fastsuncet__View"] * 2 + ["Resize", "Slice", "CropMirrorNormalize"]
    assert (sorted(of_views) == sorted(one)) == fused


@pytest.mark.gpu
@gpu
def test_graph_on_a_gpu_makes_the_cpus_views(index):
    views = list(one_by_one(index.sizes).values())
    for augmentation in (EXACT, replace(EXACT, blur_window=23)):
        made = [levels_of(index, augmentation, views, backend="dali", device=each) for each in ("cpu", "gpu")]
        # nvJPEG is not libjpeg to the bit; everything after it is the same arithmetic.
        assert all(mean(cpu, gpu) < 2.0 and cpu.stride() == gpu.stride() for cpu, gpu in zip(*made))
