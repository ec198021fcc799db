"""The loader's tools compare equals, and what they recommend is what they measured."""

import contextlib
import json

import numpy as np
import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.data import cpu_count as cores
from pipelines import backend
from tests.support.pictures import write_pictures
from tools import tune_loader
from tools.bench import bench_streams
from tools.gpu import loader as gpu_loader
from tools.tune_loader import Knob, descend, knobs, recommendation

THREADS, DEPTH = Knob("data.decode_threads", (1, 2, 4)), Knob("data.prefetch", (1, 2))
START = {"data.decode_threads": 3, "data.prefetch": 2}
needs_dali = pytest.mark.skipif(backend.dali_problem() is not None, reason="DALI is not installed")
CONFIG = """\
data: {kind: image_folder, root: ., train: images, validation: null, augmentation: {size: 16, blur: 0}}
criterion: {temperature: 0.1, unsupervised_batch_size: 8}
optimization: {epochs: 9, lr: 1.0}
"""


def always() -> bool:
    return True


# -- the search


def test_settings_that_depend_on_each_other_are_found_in_later_passes():
    # Depth pays only with four threads, which the first pass chooses after it has settled the depth.
    table = {(1, 1): 9, (2, 1): 8, (3, 1): 8, (4, 1): 7, (1, 2): 9, (2, 2): 8, (3, 2): 8, (4, 2): 3}

    def measure(values):
        return table[values["data.decode_threads"], values["data.prefetch"]]

    best, rows = descend([DEPTH, THREADS], {**START, "data.prefetch": 1}, measure, 1, always)
    assert best == {"data.decode_threads": 4, "data.prefetch": 2}
    assert {row["pass"] for row in rows} == {1, 2, 3}
    kept = [row for row in rows if row["kept"] and row["pass"] == 3]
    assert {row["key"]: row["value"] for row in kept} == best


def test_the_cheapest_of_the_nearly_fastest_is_kept_and_noise_buys_nothing():
    seconds = {1: 1.02, 2: 1.0, 4: 1.01, 3: 0.995}
    best, _ = descend([THREADS], START, lambda values: seconds[values["data.decode_threads"]], 1, always)
    assert best == {"data.decode_threads": 1, "data.prefetch": 2}


def test_turns_go_round_and_a_figure_is_the_median_of_whole_rounds():
    asked, noise = [], iter([1, 9, 1, 1, 1, 9, 1, 1, 1, 9, 1, 1])

    def measure(values):
        asked.append(values["data.decode_threads"])
        return next(noise)

    seconds = tune_loader.turns(THREADS, START, measure, 3, always)
    assert asked == [1, 2, 4, 3, 2, 4, 3, 1, 4, 3, 1, 2]  # 3 is the config's own
    assert {len(each) for each in seconds.values()} == {3}


def test_a_setting_that_time_ran_out_for_stays_and_is_not_told_of():
    left = [True] * 5

    def in_time():
        return bool(left) and left.pop()

    best, rows = descend(
        [THREADS, DEPTH], START, lambda values: 1 / values["data.decode_threads"], 1, in_time
    )
    assert best == {"data.decode_threads": 4, "data.prefetch": 2}
    assert {row["key"] for row in rows} == {"data.decode_threads"}


def test_a_value_that_fails_is_left_out_and_what_was_measured_is_kept(capsys):
    asked = []

    def measure(values):
        asked.append(values["data.decode_threads"])
        if values["data.decode_threads"] == 2 or (values["data.decode_threads"] == 4 and len(asked) > 4):
            raise RuntimeError("out of memory")
        if values["data.prefetch"] == 1:
            raise MemoryError("no more of it")
        return 1 / values["data.decode_threads"]

    best, rows = descend([THREADS, DEPTH], START, measure, 2, always)
    assert best == START and {row["value"] for row in rows if row["key"] == "data.decode_threads"} == {1, 3}
    assert {row["value"] for row in rows if row["key"] == "data.prefetch"} == {2}
    assert "data.decode_threads: 2 fails and is left out: out of memory" in capsys.readouterr().out


def test_what_a_gpu_has_is_tried_on_a_gpu_alone_and_only_where_files_are_decoded(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)

    def keys(device, *overrides):
        return {
            knob.key: knob for knob in knobs(load_config(str(tmp_path / "run.yaml"), overrides), device, 8)
        }

    common = {"data.decode_threads", "data.prefetch"}
    assert keys("cpu").keys() == common == keys("cuda", "data.backend=torchvision").keys()
    assert keys("cuda", "data.kind=cifar10", "data.train=train").keys() == common
    card = keys("cuda")
    assert card.keys() == common | {"data.hw_decoder_share", "data.decoder_buffers"}
    assert card["data.hw_decoder_share"].values[0] == 0  # the cheapest: a share above 0 costs equal pixels
    assert max(card["data.decode_threads"].values) == 8


def test_the_recommended_lines_are_a_config_s_and_say_what_a_share_costs(tmp_path):
    values = {"data.decode_threads": 4, "data.hw_decoder_share": 0.65, "data.decoder_buffers": "largest"}
    text = recommendation(values)
    assert "bits" in text and "#" not in recommendation({**values, "data.hw_decoder_share": 0.0})
    (tmp_path / "run.yaml").write_text(CONFIG.replace("data: {", "base: base.yaml\nignored: {"))
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "run.yaml").write_text(f"base: base.yaml\n{text}\n")
    data = load_config(str(tmp_path / "run.yaml")).data
    assert (data.decode_threads, data.hw_decoder_share, data.decoder_buffers) == (4, 0.65, "largest")


@needs_dali
def test_tuning_measures_a_config_and_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    write_pictures(tmp_path / "images", count=12, side=24)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_loader, "knobs", lambda *_: [Knob("data.prefetch", (1, 2))])
    words = ["run.yaml", "--device", "cpu", "--steps", "1", "--rounds", "1", "--json", "report.json"]
    assert tune_loader.main([*words, "data.decode_threads=1"]) == 0
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert all(min(row["seconds_a_step"]) > 0 for row in report["points"])
    assert report["not_tried"] == [] and report["device"] == "cpu" and report["processes"] == 1
    assert f"data:\n  prefetch: {report['recommended']['data.prefetch']}\n" in printed
    assert tune_loader.main([*words, "--minutes", "0"]) == 0
    assert "not measured, for want of time: data.prefetch" in capsys.readouterr().out


def test_threads_that_nobody_asked_for_are_a_process_s_share_of_the_machine_as_in_the_run(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "run.yaml").write_text(CONFIG)

    @contextlib.contextmanager
    def measuring(path, *_):  # each thread is a gain to one process alone
        yield load_config(path), "cpu", lambda values: 1 / values["data.decode_threads"]

    monkeypatch.setattr(tune_loader, "measuring", measuring)
    monkeypatch.setattr(tune_loader, "cores", lambda: 64)
    monkeypatch.setattr(cores, "cores", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert tune_loader.main([str(tmp_path / "run.yaml"), "--rounds", "1"]) == 0
    assert "decode_threads: 8\n" in capsys.readouterr().out


# -- one pipeline or two


@needs_dali
def test_one_pipeline_for_both_streams_gives_their_pixels_and_a_difference_ends_the_bench(
    tmp_path, monkeypatch
):
    write_pictures(tmp_path, count=12, side=40)
    setting = bench_streams.Setting(str(tmp_path), unlabeled=4, classes=2, size=16)
    bench_streams.require_the_same_pixels(setting)
    first, second, labeled = next(bench_streams.batches(bench_streams.ONE, setting))
    assert first.shape == second.shape == labeled.shape == (4, 3, 16, 16)
    assert all(view.is_contiguous(memory_format=torch.channels_last) for view in (first, second, labeled))
    real = bench_streams.numbers

    def spoiled(arrays, step):
        flips = [array for array in arrays if array.dtype == np.int32 and array.ndim == 1]
        return [1 - array if step == 2 and array is flips[-1] else array for array in arrays]

    monkeypatch.setattr(bench_streams, "numbers", lambda *asked: spoiled(real(*asked), asked[2]))
    with pytest.raises(AssertionError, match="step 2: one pipeline gives other pixels than two"):
        bench_streams.require_the_same_pixels(setting)


@needs_dali
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs it")
def test_one_pipeline_can_be_defined_for_a_gpu_where_all_that_is_missing_is_the_driver(tmp_path):
    write_pictures(tmp_path, count=12, side=40)
    plans = bench_streams.plans(bench_streams.Setting(str(tmp_path), unlabeled=4, classes=2, size=16))
    with pytest.raises(RuntimeError, match=r"CUDA|NVIDIA"):
        next(bench_streams.joined(*plans, 1, "gpu"))


@needs_dali
def test_images_in_other_rows_are_compared_and_a_difference_is_counted(tmp_path, monkeypatch):
    index = write_pictures(tmp_path, count=6, side=24)
    asked = (index, np.arange(6), "cpu", 0.0, 1)
    assert gpu_loader.another_row(*asked) == "equal to the bit"
    real, calls = gpu_loader.host, []

    def spoiled(outputs):
        images = list(real(outputs))
        calls.append(images)
        if len(calls) == 2:
            images[0] = np.clip(images[0].astype(int) + 3, 3, 255).astype(np.uint8)
        return iter(images)

    monkeypatch.setattr(gpu_loader, "host", spoiled)
    assert gpu_loader.another_row(*asked) == "1 of 6 differ, by up to 3"
