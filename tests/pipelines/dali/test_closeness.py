"""The DALI graphs against torchvision on the same files and parameters: operator by operator, and whole.

Differences are in grey levels of 255. The bounds are those measured with DALI 2.4 on ImageNet images, with
room for other images. By how much a "fast" view differs is stated as well: nobody should take it for "exact".
"""

import contextlib
import os
import tarfile
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

pytest.importorskip("nvidia.dali", reason="these tests hold DALI against torchvision: DALI is not installed")
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def

from pipelines.dali import color, graphs
from pipelines.dali.engine import DaliEngine, ResidentPixels
from pipelines.datasets.folders import image_folder
from pipelines.datasets.index import ImageIndex
from pipelines.loader import open_evaluation_loader, open_loader
from pipelines.sampling.augmentation import Augmentation, Center, ViewParams, draw_view
from pipelines.sampling.step_plan import Visit
from tests.support.pictures import texture, write_kinds, write_pictures

EXACT, FAST, WINDOW_23 = (
    Augmentation(size=96),
    Augmentation(size=96, color="fast"),
    Augmentation(size=96, blur_window=23),
)
SAMPLE = Path(
    os.environ.get(
        "FASTSUNCET_IMAGENET_SAMPLE",
        Path(__file__).resolve().parents[4] / "shared" / "data" / "imagenet-sample-480.tar",
    )
)


class GivenViews:
    """A plan of one step, every image of an index once, with views that a test chose."""

    def __init__(self, index: ImageIndex, augmentations, views):
        self.index, self.augmentations, self.views = index, tuple(augmentations), tuple(views)
        self.batch = len(index)
        self.sampler = None

    def __call__(self, step, replaced=None) -> Visit:
        return Visit(step, np.arange(len(self.index)), self.index.labels, self.views)


def pixels_of(index: ImageIndex, augmentation: Augmentation, views, backend: str) -> list[torch.Tensor]:
    """Each view of all images, (N, 3, S, S) in grey levels."""
    plan = GivenViews(index, [augmentation] * len(views), views)
    loader = open_loader(index, plan, plan.augmentations, threads=1, prefetch=1, backend=backend)
    return [255 * view for view in loader(0)]


def one_by_one(sizes: np.ndarray) -> dict[str, ViewParams]:
    """A view per operator and factor, all from the same boxes; "drawn" ones as training draws them."""
    n = len(sizes)
    still = draw_view(
        replace(EXACT, flip=0, jitter=0, grey=0, blur=0), sizes, seed=0, step=0, role="c", first_row=0
    )
    views = {
        "crop": still,
        "flip": replace(still, flip=np.ones(n, bool)),
        "grey": replace(still, grey=np.ones(n, bool)),
    }
    factors = {
        "brightness": (0.4, 1.6),
        "contrast": (0.3, 1.7),
        "saturation": (0.3, 1.7),
        "hue": (0.05, 0.1, 0.2, -0.2),
        "sigma": (0.1, 0.5, 1.0, 2.0),
    }
    for name, values in factors.items():
        for value in values:
            views[f"{name} {value}"] = replace(still, **{name: np.full(n, value, np.float32)})
    for draw in range(3):
        drawn = draw_view(EXACT, sizes, seed=draw, step=0, role="c", first_row=0)
        views[f"drawn {draw}"] = replace(drawn, box=still.box)
    return views


@dataclass
class Compared:
    """Every view of `one_by_one` in both colour modes, from DALI and from its torchvision twin."""

    views: dict[str, ViewParams]
    dali: dict[str, torch.Tensor]
    fast_dali: dict[str, torch.Tensor]
    twin: dict[str, torch.Tensor]
    fast_twin: dict[str, torch.Tensor]


def compare(index: ImageIndex) -> Compared:
    views = one_by_one(index.sizes)

    def run(augmentation, backend):
        return dict(zip(views, pixels_of(index, augmentation, list(views.values()), backend)))

    return Compared(
        views, run(EXACT, "dali"), run(FAST, "dali"), run(EXACT, "torchvision"), run(FAST, "torchvision")
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=12, side=120)


@pytest.fixture(scope="module")
def compared(index) -> Compared:
    return compare(index)


def mean(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


BOUNDS = {
    "crop": 0.25,
    "flip": 0.25,
    "brightness": 0.6,
    "contrast": 1.2,
    "saturation": 1.2,
    "grey": 1.0,
    "hue": 0.3 + 0.25,  # torchvision's hue of a crop that may differ by as much as crops do
    "sigma": 0.05 + 0.25,
    "drawn": 2.0,
}
CASES = list(one_by_one(np.full((1, 2), 100)))


@pytest.mark.parametrize("case", CASES)
def test_every_operator_is_close_to_torchvisions(compared, case):
    assert mean(compared.dali[case], compared.twin[case]) < BOUNDS[case.split()[0]]


@pytest.mark.parametrize("case", CASES)
def test_the_fast_graph_is_the_linear_maths_of_its_twin(compared, case):
    bound = 0.8 if case == "grey" else 0.4  # grey is torchvision's own in the twin
    assert mean(compared.fast_dali[case], compared.fast_twin[case]) < bound


def test_every_operator_does_what_it_is_asked(compared):
    # Without this, two back-ends that both did nothing would pass for close.
    for case in CASES:
        if case not in ("crop", "sigma 0.1"):
            assert mean(compared.dali[case], compared.dali["crop"]) > 0.4, case


def test_a_resized_crop_is_within_one_level_but_for_the_outermost_pixels(compared):
    difference = (compared.dali["crop"] - compared.twin["crop"]).abs()
    assert difference[:, :, 1:-1, 1:-1].max() <= 1.001
    assert difference.max() < 30


def test_neutral_numbers_leave_every_pixel_as_it_is(compared, index):
    drawn, still = compared.views["drawn 0"], compared.views["crop"]
    idle = (drawn.brightness == 1) & ~drawn.grey & (drawn.sigma == 0) & ~drawn.flip
    for field in fields(ViewParams):
        values = getattr(drawn, field.name).copy()
        values[::2] = getattr(still, field.name)[::2]
        drawn = replace(drawn, **{field.name: values})
    idle[::2] = True
    for augmentation in (EXACT, FAST):
        (mixed,) = pixels_of(index, augmentation, [drawn], "dali")
        assert torch.equal(mixed[idle], compared.dali["crop"][idle])
        assert not torch.equal(mixed[1], compared.dali["crop"][1])


def test_grey_images_have_three_equal_channels(compared):
    grey = compared.dali["grey"]
    assert torch.equal(grey[:, 0], grey[:, 1]) and torch.equal(grey[:, 0], grey[:, 2])


def test_a_flip_is_the_mirror_image_of_the_crop(compared):
    assert torch.equal(compared.dali["flip"], compared.dali["crop"].flip(3))


@pytest.mark.parametrize("sigma", [0.5, 1.0, 2.0])
def test_a_fixed_window_of_23_is_torchvisions_blur_and_the_default_is_near_it(compared, index, sigma):
    view = compared.views[f"sigma {sigma}"]
    dali, twin = (pixels_of(index, WINDOW_23, [view], backend)[0] for backend in ("dali", "torchvision"))
    inner = (
        slice(None),
        slice(None),
        slice(12, -12),
        slice(12, -12),
    )  # crops differ at the border, and blur spreads it
    assert mean(dali, twin) < BOUNDS["sigma"] and (dali - twin)[inner].abs().max() <= 2.001
    assert mean(dali, compared.dali[f"sigma {sigma}"]) < 0.05


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("window", [0, 23])
def test_blur_alone_is_torchvisions(sigma, window):
    image = texture(3, 64, 80)

    @pipeline_def(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
    def blurred():
        source = fn.external_source(lambda: [image], layout="HWC")
        return fn.gaussian_blur(source, sigma=sigma, window_size=window)

    ours = torch.from_dlpack(blurred().run()[0].as_tensor())[0].permute(2, 0, 1).float()
    theirs = v2.functional.gaussian_blur(
        torch.from_numpy(image).permute(2, 0, 1), [23, 23], [sigma, sigma]
    ).float()
    assert mean(ours, theirs) < 0.05 and (ours - theirs).abs().max() <= 2


def test_hue_alone_is_torchvisions_for_every_kind_of_colour():
    # Greys, primaries, and every way for two channels to tie: a case each in any formula for hue.
    levels = np.array([0, 1, 51, 128, 200, 254, 255], np.uint8)
    palette = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), 3).reshape(49, 7, 3)
    turns = np.array([-0.5, -0.2, -0.05, 0.0, 0.1, 1 / 3, 0.5], np.float32)

    @pipeline_def(batch_size=len(turns), num_threads=1, device_id=None, exec_dynamic=True)
    def rotated():
        arrays = [np.stack([palette] * len(turns)), turns]
        image, by = fn.external_source(lambda: arrays, num_outputs=2, layout=["HWC", ""])
        return color.hue(image, by)

    ours = torch.from_dlpack(rotated().run()[0].as_tensor()).permute(0, 3, 1, 2).float()
    image = torch.from_numpy(palette).permute(2, 0, 1)
    theirs = torch.stack([v2.functional.adjust_hue(image, float(by)) for by in turns]).float()
    assert (ours - theirs).abs().max() <= 1 and mean(ours, theirs) < 0.1
    assert torch.equal(ours[3], image.float())


def test_contrast_as_an_expression_is_bit_for_bit_contrast_as_an_operator():
    # A GPU takes the expression and a CPU the operator; this is where the two can be held against each other.
    images = np.stack([texture(i, 48, 48) for i in range(6)])
    factors = np.array([0.2, 0.7, 1.0, 1.3, 1.8, 0.0], np.float32)

    @pipeline_def(batch_size=6, num_threads=1, device_id=None, exec_dynamic=True)
    def both():
        image, factor = fn.external_source(lambda: [images, factors], num_outputs=2, layout=["HWC", ""])
        grey = fn.color_space_conversion(image, image_type=graphs.types.RGB, output_type=graphs.types.GRAY)
        return color.contrast(image, factor), color.about(fn.reductions.mean(grey), factor, image)

    operator, expression = (torch.from_dlpack(output.as_tensor()) for output in both().run())
    assert torch.equal(operator, expression)
    assert torch.equal(operator[2], torch.from_numpy(images[2]))


def test_fast_differs_from_exact_as_documented(compared):
    fast, twin = compared.fast_dali, compared.twin
    for case in ("brightness 0.4", "saturation 0.3", "grey"):
        assert mean(fast[case], twin[case]) < 1.2  # the same maths in both modes
    for case in ("contrast 0.3", "hue 0.1", "hue 0.2", "hue -0.2"):
        assert 2 < mean(fast[case], twin[case]) < 30  # not torchvision's
    # Same sense of rotation: the fast hue is nearer to its own sign than to the opposite one.
    assert mean(fast["hue 0.2"], twin["hue 0.2"]) < mean(fast["hue 0.2"], twin["hue -0.2"])


# -- kinds of file


@pytest.mark.parametrize("height_width", [(96, 96), (96, 130), (131, 96)])
def test_every_kind_of_file_is_read_as_pil_reads_it(tmp_path, height_width):
    index = write_kinds(tmp_path, *height_width)
    center = open_evaluation_loader(index, np.arange(len(index)), 8, 96, 96, threads=1, backend="dali")
    ((images, _, _),) = center
    for i, ours in enumerate(images):
        with Image.open(index.path(i)) as image:
            theirs = v2.functional.pil_to_tensor(v2.CenterCrop(96)(image.convert("RGB"))).float()
        bound = 1 if index.name(i).endswith("cmyk.jpg") else 0
        assert (255 * ours - theirs).abs().max() <= bound + 1e-3, index.name(i)


# -- evaluation


def test_the_evaluation_view_is_torchvisions_resize_and_center_crop(index):
    theirs = v2.Compose([v2.Resize(88), v2.CenterCrop(80)])
    for backend in ("dali", "torchvision"):
        loader = open_evaluation_loader(index, np.arange(len(index)), 5, 80, 88, threads=1, backend=backend)
        for images, _, indices in loader:
            for ours, i in zip(images, indices.tolist()):
                with Image.open(index.path(i)) as image:
                    reference = v2.functional.pil_to_tensor(theirs(image.convert("RGB"))).float()
                difference = (255 * ours - reference).abs()
                assert difference.mean() < 0.25 and difference.max() <= 2.001, (backend, i)


# -- real photographs, where they are


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> ImageIndex:
    if not SAMPLE.exists():
        pytest.skip(f"no {SAMPLE.name}: set FASTSUNCET_IMAGENET_SAMPLE to a tar of ImageNet's JPEG files")
    root = tmp_path_factory.mktemp("photographs")
    (root / "all").mkdir()
    with tarfile.open(SAMPLE) as archive:
        for member in [member for member in archive if member.isfile()][::60]:
            (root / "all" / Path(member.name).name).write_bytes(archive.extractfile(member).read())
    return image_folder(root)


def test_real_photographs_are_as_close(photographs):
    compared = compare(photographs)
    for case in CASES:
        assert mean(compared.dali[case], compared.twin[case]) < BOUNDS[case.split()[0]], case
    test_fast_differs_from_exact_as_documented(compared)


# -- the GPU's graph


def test_dali_accepts_the_gpus_graph_up_to_the_driver():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the next test runs the graph")
    for resident in (False, True):
        pipeline = graphs.views(
            lambda _: None,
            lambda _: None,
            (Augmentation(), Augmentation(color="fast"), Center()),
            decode="mixed",
            resident=resident,
            dtype="float16",
            images_stream=12345 if resident else None,
            batch_size=2,
            num_threads=1,
            device_id=None,
        )
        # Every operator and its inputs' places are checked as the graph is defined; only then the driver is
        # missed.
        with pytest.raises(RuntimeError, match="CUDA-capable GPU"):
            pipeline.build()


def asked_of(operator: str, monkeypatch, **options) -> list[dict]:
    """The arguments of every call of a DALI operator while the graph of the views is defined."""
    module = fn.decoders if operator == "image" else fn
    real, calls = getattr(module, operator), []
    monkeypatch.setattr(module, operator, lambda *a, **k: (calls.append(k), real(*a, **k))[1])
    pipeline = graphs.views(
        lambda _: None,
        lambda _: None,
        (EXACT,),
        decode="mixed",
        dtype="float32",
        batch_size=2,
        num_threads=1,
        device_id=None,
        **options,
    )
    with contextlib.suppress(RuntimeError):  # no driver; the graph is defined by then
        pipeline.build()
    return calls


def test_one_decoder_serves_every_row_of_a_batch_unless_asked_otherwise(monkeypatch):
    (call,) = asked_of("image", monkeypatch, resident=False)
    assert call["hw_decoder_load"] == 0
    (call,) = asked_of("image", monkeypatch, resident=False, hw_decoder_load=0.5)
    assert call["hw_decoder_load"] == 0.5


def test_dali_is_told_the_stream_on_which_resident_pixels_are_gathered(monkeypatch):
    images, _arrays = asked_of("external_source", monkeypatch, resident=True, images_stream=12345)
    assert images["cuda_stream"] == 12345


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_reading_resident_pixels_ahead_waits_for_no_training():
    pixels = np.random.default_rng(0).integers(0, 256, (10, 8, 8, 3), np.uint8)
    stored, wanted = ResidentPixels(pixels, "gpu", 0), np.array([7, 0, 7])
    stored(wanted)  # the first call allocates
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of training
    trained = torch.cuda.Event()
    trained.record()
    gathered = stored(wanted)
    stored.stream.synchronize()
    assert not trained.query()
    np.testing.assert_array_equal(gathered.cpu().numpy(), pixels[wanted])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_an_image_has_the_same_pixels_in_every_row_of_a_batch(index):
    view = draw_view(EXACT, index.sizes[:1], seed=0, step=0, role="", first_row=0)
    rows = 32
    same = {field.name: np.repeat(getattr(view, field.name), rows, axis=0) for field in fields(view)}
    visit = Visit(0, np.zeros(rows, np.int64), np.zeros(rows, np.int64), (ViewParams(**same),))
    engine = DaliEngine(
        index,
        (EXACT,),
        visit=lambda _: visit,
        first_step=0,
        batch=rows,
        device="gpu",
        device_id=0,
        threads=2,
        prefetch=1,
        dtype=torch.float32,
    )
    (images,) = engine.run()
    assert all(torch.equal(image, images[0]) for image in images)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_gpu_makes_the_cpus_views(index):
    views = list(one_by_one(index.sizes).values())
    for augmentation in (EXACT, FAST, WINDOW_23):
        plan = GivenViews(index, [augmentation] * len(views), views)
        opened = partial(open_loader, index, plan, plan.augmentations, threads=2, backend="dali")
        for cpu, gpu in zip(opened(device="cpu")(0), opened(device="gpu")(0)):
            assert gpu.is_cuda and gpu.stride() == cpu.stride()
            # nvJPEG is not libjpeg to the bit; everything behind it is the same maths.
            assert mean(255 * cpu, 255 * gpu.cpu()) < 2.0
