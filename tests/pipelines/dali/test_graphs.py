"""Views by DALI's operators, by torchvision and by the view operator, of the same files and parameters.

Differences are in gray levels of 255. The view operator has the bits of DALI's operators. What DALI and torchvision
compute is compared with a bound: both choose code by the processor, each is right to a level, and rounding adds up over
the operators. The bounds lie between that and the smallest mistake that they must find (a hue of 0.05 left out, or a
crop one pixel off: about 3.5 levels).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

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
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Augmentation, Center, ViewParams, draw_view
from pipelines.sampling.step_plan import BatchDraws
from tests.support.pictures import texture, write_kinds, write_pictures
from tests.support.streams import evaluation, opened

EXACT = Augmentation(size=64, color_order="fixed")
STILL = replace(EXACT, flip=0, jitter=0, gray=0, blur=0)
COLORED = replace(STILL, jitter=1)
ENGINES = {
    "dali": {"backend": "dali", "view_operator": False},
    "view operator": {"backend": "dali", "view_operator": True},
    "torchvision": {"backend": "torchvision"},
}


class Case(NamedTuple):
    """A view of every image; `bound` is the mean difference of DALI's from torchvision's, in levels.

    The view differs from that of the case `other` by more than two bounds, as two back-ends that both did nothing
    would be close too.
    """

    augmentation: Augmentation
    numbers: ViewParams
    bound: float = 1.75  # after a crop, a factor of the color multiplies its error and rounds again
    other: str = "crop"


def cases(sizes: np.ndarray) -> dict[str, Case]:
    """Views that change one thing, all with the same boxes; values alternate over the rows. And drawn ones."""
    n = len(sizes)

    def draw(augmentation: Augmentation) -> ViewParams:
        return draw_view(augmentation, sizes, seed=0, step=2, role="c", first_row=0)

    still, colored = draw(STILL), draw(replace(COLORED, color_order="random"))
    factors = {"brightness": (0.4, 1.6), "contrast": (0.3, 1.7), "saturation": (0.3, 1.7)}
    factors["hue"] = (0.05, 0.1, 0.2, -0.2)
    blurred = replace(still, sigma=np.resize(np.float32([0.5, 1.0, 2.0]), n))
    return {
        "crop": Case(EXACT, still, 0.5),
        "flip": Case(EXACT, replace(still, flip=np.ones(n, bool)), 0.5),
        "gray": Case(EXACT, replace(still, gray=np.ones(n, bool))),
        **{
            name: Case(EXACT, replace(still, **{name: np.resize(np.float32(values), n)}))
            for name, values in factors.items()
        },
        "blur": Case(EXACT, blurred, 0.75),
        "blur of 23": Case(replace(EXACT, blur_window=23), blurred, 0.75),
        "as drawn": Case(EXACT, replace(draw(EXACT), box=still.box), 2.5),
        "fixed order": Case(COLORED, replace(colored, order=still.order)),
        "random order": Case(replace(COLORED, color_order="random"), colored, other="fixed order"),
        "no color": Case(replace(EXACT, jitter=0), draw(replace(EXACT, jitter=0)), 2.5),
    }


class GivenViews:
    """A plan of one step: every image of an index once, with views that a test chose."""

    def __init__(self, index: ImageIndex, chosen: Sequence[Case]):
        self.index, self.batch = index, len(index)
        self.augmentations = tuple(case.augmentation for case in chosen)
        self.views = tuple(case.numbers for case in chosen)

    def __call__(self, step, replaced=None) -> BatchDraws:
        return BatchDraws(step, np.arange(len(self.index)), self.index.labels, self.views)


def levels_of(index: ImageIndex, chosen: dict[str, Case], **options) -> dict[str, torch.Tensor]:
    """Each view of all images, (N, 3, S, S) in gray levels."""
    loader = opened(GivenViews(index, list(chosen.values())), prefetch=1, **options)
    return {name: 255 * view.cpu() for name, view in zip(chosen, loader(0), strict=True)}


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=12, side=90)


@pytest.fixture(scope="module")
def dalis(index) -> dict[str, torch.Tensor]:
    return levels_of(index, cases(index.sizes), **ENGINES["dali"])


def mean(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


@pytest.mark.slow
def test_graph_every_operator_is_close_to_torchvisions_and_does_something(index, dalis):
    chosen = cases(index.sizes)
    theirs = levels_of(index, chosen, **ENGINES["torchvision"])
    for name, case in chosen.items():
        assert mean(dalis[name], theirs[name]) < case.bound, name
        assert name == "crop" or mean(dalis[name], dalis[case.other]) > 2 * case.bound, name
    difference = (dalis["crop"] - theirs["crop"]).abs()
    assert difference[:, :, 1:-1, 1:-1].max() <= 2.001
    assert difference.max() < 30  # a region of interest inside the resize operator: 40


@pytest.mark.filterwarnings("error:The external source node")
def test_graph_by_the_view_operator_has_the_bits_of_dalis_operators(index, dalis, view_operator):
    chosen = cases(index.sizes)
    for name, made in levels_of(index, chosen, **ENGINES["view operator"]).items():
        assert torch.equal(made, dalis[name]), name
    loader = opened(GivenViews(index, list(chosen.values())), "dali")  # auto
    loader(0)
    assert loader.options.view_operator is True
    names = [getattr(node._op, "schema_name", "") for node in loader._engine._pipeline._ops]
    assert names.count("fastsuncet__View") == len(chosen)


def outputs(function, count: int, *arrays: np.ndarray) -> list[torch.Tensor]:
    """What a function of an image and a number makes in a graph, (N, H, W, C) each."""

    @pipeline_def(
        batch_size=count, num_threads=1, device_id=None, exec_dynamic=True, enable_conditionals=True
    )
    def graph():
        return function(*fn.external_source(lambda: list(arrays), num_outputs=2, layout=["HWC", ""]))

    return [torch.from_dlpack(output.as_tensor()) for output in graph().run()]


def test_graph_blur_of_any_window_is_torchvisions_of_23():
    image, sigmas = texture(3, 64, 80), np.float32([0.1, 0.5, 1.0, 2.0])
    blurred = outputs(
        lambda source, sigma: tuple(graphs.blur(source, sigma, window) for window in ("auto", 23)),
        *(4, np.stack([image] * 4), sigmas),
    )
    source = torch.from_numpy(image).permute(2, 0, 1)
    theirs = torch.stack([v2.functional.gaussian_blur(source, [23, 23], [float(s)] * 2) for s in sigmas])
    for ours in blurred:
        difference = (ours.permute(0, 3, 1, 2).float() - theirs.float()).abs()
        assert difference.mean() < 0.25 and difference.max() <= 2


def test_color_hue_is_torchvisions_for_every_kind_of_color():
    """Grays, primaries, and every way for two channels to tie: each is a case in any formula for hue."""
    levels = np.array([0, 1, 51, 128, 200, 254, 255], np.uint8)
    palette = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), 3).reshape(49, 7, 3)
    turns = np.array([-0.5, -0.2, -0.05, 0.0, 0.1, 1 / 3, 0.5], np.float32)
    (rotated,) = outputs(graphs.hue, len(turns), np.stack([palette] * len(turns)), turns)
    ours, image = rotated.permute(0, 3, 1, 2).float(), torch.from_numpy(palette).permute(2, 0, 1)
    theirs = torch.stack([v2.functional.adjust_hue(image, float(by)) for by in turns]).float()
    assert (ours - theirs).abs().max() <= 1 and mean(ours, theirs) < 0.25
    assert torch.equal(ours[3], image.float())


def test_color_contrast_expression_equals_the_operator_to_the_bit():
    """A GPU uses the expression and a CPU the operator; only here can both be compared."""
    images = np.stack([texture(i, 48, 48) for i in range(6)])

    def both(image, factor):
        gray = fn.color_space_conversion(image, image_type=graphs.types.RGB, output_type=graphs.types.GRAY)
        expression = graphs.contrast_expression(fn.reductions.mean(gray), factor, image)
        return graphs.contrast(image, factor), expression

    operator, expression = outputs(both, 6, images, np.float32([0.2, 0.7, 1.0, 1.3, 1.8, 0.0]))
    assert torch.equal(operator, expression)
    assert torch.equal(operator[2], torch.from_numpy(images[2]))


@pytest.mark.parametrize("upright", [False, True])
@pytest.mark.parametrize("height_width", [(96, 96), (96, 130), (131, 96)])
def test_graph_reads_every_kind_of_file_as_pil_does(tmp_path, height_width, upright):
    index = write_kinds(tmp_path, *height_width, upright=upright)
    ((images,),) = evaluation(index, np.arange(len(index)), "dali", batch=9, size=96, resize=96)
    for i, ours in enumerate(images):
        theirs = v2.CenterCrop(96)(torch.from_numpy(index.rgb(i)).permute(2, 0, 1)).float()
        bound = 1 if index.name(i).endswith("jpg") else 0
        assert (255 * ours - theirs).abs().max() <= bound + 1e-3, index.name(i)


def test_graph_evaluation_view_is_torchvisions_resize_and_center_crop(index, reader):
    theirs = v2.Compose([v2.Resize(88), v2.CenterCrop(80)])
    shown = torch.cat([images for (images,) in evaluation(index, np.arange(len(index)), reader, 5, 80, 88)])
    for i, ours in enumerate(shown):
        with Image.open(index.path(i)) as image:
            reference = v2.functional.pil_to_tensor(theirs(image.convert("RGB"))).float()
        difference = (255 * ours - reference).abs()
        assert difference.mean() < 0.5 and difference.max() <= 2.001, i


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["files", "bytes", "pixels"])
@pytest.mark.parametrize("fused", [False, True])
def test_graph_on_a_gpu_has_every_operator_and_operand_in_its_place(request, monkeypatch, stored, fused):
    """An operator must exist for its device, its images must be there, and its arguments and predicates on the CPU.

    DALI says so when it builds a graph, in part only where there is a driver.
    """
    if fused:
        request.getfixturevalue("view_operator")
        monkeypatch.setattr(graphs, "kernels", lambda *_: b"code")
    pipeline = graphs.views(
        *(lambda _: None,) * 2,
        (EXACT, replace(EXACT, color_order="random"), Center()),
        **{"decode": "mixed", "stored": stored, "view_operator": fused},
        **{"hw_decoder_share": 0.5, "batch_size": 2, "num_threads": 1, "device_id": None},
    )
    pipeline._build_graph()
    registered = {
        "cpu": backend_impl.RegisteredCPUOps(True),
        "gpu": backend_impl.RegisteredGPUOps(True),
        "mixed": backend_impl.RegisteredMixedOps(True),
    }
    arguments = {}  # by operator, those that are no nodes
    for node in pipeline._ops:
        spec, device = node.spec, node._op.device
        name = getattr(node._op, "schema_name", "ExternalSource")
        arguments[name] = node._op._init_args
        assert name in registered[device], f"{name} is no operator of the {device}"
        for i in range(spec.NumInput()):
            place = "gpu" if device == "gpu" and i < spec.NumRegularInput() else "cpu"
            found = spec.InputDevice(i)
            assert found == place, f"{name}: input {spec.InputName(i)} is on the {found}"
    lengths = ["cpu"] if stored == "files" else []
    assert [output.device for output in pipeline._graph_outputs] == ["gpu"] * 3 + lengths
    if fused:
        assert arguments["fastsuncet__View"]["kernels"] == b"code".hex()
    # Of a file that is cut short, a map would end the process by SIGBUS, without a message.
    if stored == "files":
        assert arguments["io__file__Read"]["dont_use_mmap"]
    if stored != "pixels":
        assert arguments["decoders__Image"]["hw_decoder_load"] == 0.5
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="CUDA-capable GPU"):
            pipeline.build()


@pytest.mark.gpu
def test_graph_on_a_gpu_makes_the_cpus_views(index, dalis):
    made = levels_of(index, cases(index.sizes), **ENGINES["dali"], device="gpu")
    # nvJPEG is not libjpeg to the bit; everything after it is the same arithmetic.
    assert all(
        mean(dalis[name], each) < 2.0 and dalis[name].stride() == each.stride() for name, each in made.items()
    )
