"""What a config says of a GPU's decoders reaches them, and does nothing anywhere else."""

import contextlib
from functools import partial

import numpy as np
import pytest
import torch

import fastsuncet.data.paired_stream
from fastsuncet.config import load_config
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.launch import join
from pipelines import backend
from pipelines.datasets.index import ImageIndex
from pipelines.loader import open_evaluation_loader
from tests.pipelines.test_loader import BACKENDS, SMALL, assert_same, opened, unlabeled
from tests.support.pictures import write_pictures

pytestmark = pytest.mark.skipif(backend.dali_problem() is not None, reason="DALI is not installed")
SETTINGS = {"hw_decoder_share": 0.5, "decoder_buffers": "largest"}


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> ImageIndex:
    return write_pictures(tmp_path_factory.mktemp("pictures"), count=12, side=40)


@pytest.fixture
def decoder(monkeypatch) -> list[dict]:
    """The options of every image decoder that is made, on a GPU that need not be there."""
    from pipelines.dali.graphs import fn

    real, calls = fn.decoders.image, []
    monkeypatch.setattr(fn.decoders, "image", lambda *a, **k: (calls.append(k), real(*a, **k))[1])
    return calls


def engine(index: ImageIndex, device: str, **options) -> None:
    from pipelines.dali.engine import DaliEngine

    plan = unlabeled(index)
    pace = {"threads": 1, "prefetch": 1, "dtype": torch.float32, "device_id": 0}
    with contextlib.suppress(RuntimeError):  # no driver; the graph is defined by then
        DaliEngine(index, (SMALL,), visit=plan, first_step=0, batch=6, device=device, **pace, **options)


def test_the_largest_image_of_the_index_sizes_the_buffers_of_a_gpus_decoders_alone(index, decoder):
    engine(index, "gpu", **SETTINGS)
    engine(index, "gpu", hw_decoder_share=0.0, decoder_buffers="largest")
    engine(index, "gpu")
    engine(index, "cpu", **SETTINGS)
    both, padding, default, cpu = decoder
    (height, width), pixels = index.sizes.max(0).tolist(), int(index.sizes.prod(1).max())
    hints = {"preallocate_height_hint": height, "preallocate_width_hint": width}
    assert both["device"] == "mixed" and both["hw_decoder_load"] == 0.5
    # Small pictures: DALI's own is more.
    assert both["device_memory_padding"] == both["host_memory_padding"] == 16 << 20 > 6 * pixels
    assert {**both, "hw_decoder_load": 0.0} == padding | hints and not hints.keys() & padding.keys()
    assert default["hw_decoder_load"] == 0 and not [
        key for key in default if "padding" in key or "hint" in key
    ]
    assert cpu.keys() == default.keys() and cpu["device"] == "cpu"


def test_buffers_follow_the_pixels_and_stay_within_what_dali_can_count():
    from pipelines.dali.engine import buffers

    mixed, huge = np.array([[3000, 10], [2000, 2500]], np.int32), np.array([[30_000, 40_000]], np.int32)
    assert buffers(mixed, "gpu", 0.0, "largest")["device_memory_padding"] == 6 * 2000 * 2500
    assert buffers(huge, "gpu", 0.0, "largest")["host_memory_padding"] == 2**31 - 1


@pytest.mark.parametrize("reader", BACKENDS)
def test_a_decoder_that_is_not_there_changes_no_bit(index, reader):
    plain, asked = opened(unlabeled(index), reader), opened(unlabeled(index), reader, **SETTINGS)
    for step in range(2):
        assert_same(plain(step), asked(step))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hw_decoder_share": 1.5}, "hw_decoder_share is a number from 0 to 1, not 1.5"),
        ({"hw_decoder_share": -0.1}, "from 0 to 1"),
        ({"decoder_buffers": "large"}, 'decoder_buffers is "grown" or "largest"'),
    ],
)
def test_other_values_are_refused_before_anything_is_opened(index, options, words):
    with pytest.raises(ValueError, match=words):
        opened(unlabeled(index), **options)


def test_the_configs_settings_are_training_s_and_never_an_evaluation_s(index, tmp_path, monkeypatch, decoder):
    (tmp_path / "run.yaml").write_text(
        f"data: {{kind: image_folder, root: {index.root}, train: ., validation: null, split: {{kind: all}}, "
        "hw_decoder_share: 0.5, decoder_buffers: largest, augmentation: {size: 16, blur: 0}}\n"
        "criterion: {temperature: 0.1, unsupervised_batch_size: 4, classes_per_batch: 2, "
        "supervised_imgs_per_class: 2, supervised_epochs: all}\noptimization: {epochs: 1, lr: 1.0}\n"
    )
    config, told = load_config(str(tmp_path / "run.yaml")), []
    real = fastsuncet.data.paired_stream.open_loader
    monkeypatch.setattr(
        fastsuncet.data.paired_stream, "open_loader", lambda *a, **k: (told.append(k), real(*a, **k))[1]
    )
    labeled = np.arange(len(index))
    with join("cpu") as place:
        PairedStream(config, index, labeled, config.resolve(1, len(index), 3, len(index)), place).close()
    assert len(told) == 2 and all(SETTINGS.items() <= options.items() for options in told)
    evaluation = partial(open_evaluation_loader, index, labeled, 4, 32, 32, threads=1, backend="dali")
    next(iter(evaluation()))
    assert [call["hw_decoder_load"] for call in decoder] == [0]
