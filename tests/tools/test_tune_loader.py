"""tune_loader measures a config's loader settings in turns and recommends what it measured."""

import contextlib
import json

import pytest
import torch

from fastsuncet.config import load_config
from fastsuncet.data import cpu_count
from pipelines import backend
from tests.support.pictures import write_pictures
from tools import tune_loader
from tools.tune_loader import candidates, descend, measure_values, recommendation

THREADS, PREFETCH = "data.decode_threads", "data.prefetch"
TRIED = {THREADS: (1, 2, 4), PREFETCH: (1, 2)}
START = {THREADS: 3, PREFETCH: 2}
CONFIG = """\
data: {kind: image_folder, root: ., train: images, validation: null, augmentation: {size: 16, blur: 0}}
criterion: {temperature: 0.1, unsupervised_batch_size: 8}
optimization: {epochs: 9, lr: 1.0}
"""


def always() -> bool:
    return True


def test_descend_finds_settings_that_depend_on_each_other_in_later_passes():
    # A prefetch of 2 helps only with four threads, which the first pass chooses after the prefetch.
    table = {(1, 1): 9, (2, 1): 8, (3, 1): 8, (4, 1): 7, (1, 2): 9, (2, 2): 8, (3, 2): 8, (4, 2): 3}
    tried = {PREFETCH: (1, 2), THREADS: (1, 2, 4)}
    best, points = descend(tried, START | {PREFETCH: 1}, lambda v: table[v[THREADS], v[PREFETCH]], 1, always)
    assert best == {THREADS: 4, PREFETCH: 2}
    assert {point["pass"] for point in points} == {1, 2, 3}
    kept = [point for point in points if point["kept"] and point["pass"] == 3]
    assert {point["key"]: point["value"] for point in kept} == best


def test_descend_keeps_the_cheapest_of_the_nearly_fastest():
    seconds = {1: 1.02, 2: 1.0, 4: 1.01, 3: 0.995}
    best, _ = descend({THREADS: (1, 2, 4)}, START, lambda values: seconds[values[THREADS]], 1, always)
    assert best == {THREADS: 1, PREFETCH: 2}


def test_values_take_turns_together_with_the_configs_own():
    asked = []

    def measure(values):
        asked.append(values[THREADS])
        return 1.0

    seconds = measure_values(THREADS, (1, 2, 4), START, measure, 3, always)
    assert asked == [1, 2, 4, 3, 2, 4, 3, 1, 4, 3, 1, 2]
    assert {len(each) for each in seconds.values()} == {3}


def test_setting_without_time_for_all_its_values_keeps_its_value():
    left = [True] * 5
    best, points = descend(TRIED, START, lambda v: 1 / v[THREADS], 1, lambda: bool(left) and left.pop())
    assert best == {THREADS: 4, PREFETCH: 2}
    assert {point["key"] for point in points} == {THREADS}


def test_value_that_fails_is_left_out_and_the_others_are_kept(capsys):
    asked = []

    def measure(values):
        asked.append(values[THREADS])
        if values[THREADS] == 2 or (values[THREADS] == 4 and len(asked) > 4):
            raise RuntimeError("out of memory")
        if values[PREFETCH] == 1:
            raise MemoryError("no memory")
        return 1 / values[THREADS]

    best, points = descend(TRIED, START, measure, 2, always)
    assert best == START
    assert {(p["key"], p["value"]) for p in points} == {(THREADS, 1), (THREADS, 3), (PREFETCH, 2)}
    assert "left out: data.decode_threads=2 fails: out of memory" in capsys.readouterr().out


def test_candidates_of_a_gpu_are_tried_only_there_and_only_for_files(tmp_path):
    (tmp_path / "run.yaml").write_text(CONFIG)

    def keys(device, *overrides):
        return candidates(load_config(str(tmp_path / "run.yaml"), overrides), device, 8)

    common = {THREADS, PREFETCH}
    assert keys("cpu").keys() == common == keys("cuda", "data.backend=torchvision").keys()
    assert keys("cuda", "data.kind=cifar10", "data.train=train").keys() == common
    gpu = keys("cuda")
    assert gpu.keys() == common | {"data.hw_decoder_share", "data.decoder_buffers"}
    assert gpu["data.hw_decoder_share"][0] == 0  # the cheapest: a share above 0 gives up equal pixels
    assert max(gpu[THREADS]) == 8


def test_recommendation_is_valid_in_a_config_and_warns_about_the_share(tmp_path):
    values = {THREADS: 4, "data.hw_decoder_share": 0.65, "data.decoder_buffers": "largest"}
    text = recommendation(values)
    assert "other pixels" in text and "#" not in recommendation({**values, "data.hw_decoder_share": 0.0})
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "run.yaml").write_text(f"base: base.yaml\n{text}\n")
    data = load_config(str(tmp_path / "run.yaml")).data
    assert (data.decode_threads, data.hw_decoder_share, data.decoder_buffers) == (4, 0.65, "largest")


@pytest.mark.skipif(backend.dali_problem() is not None, reason="DALI is not installed")
def test_tune_loader_writes_what_it_prints(tmp_path, monkeypatch, capsys):
    write_pictures(tmp_path / "images", count=12, side=24)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune_loader, "candidates", lambda *_: {PREFETCH: (1, 2)})
    words = ["run.yaml", "--device", "cpu", "--steps", "1", "--rounds", "1", "--json", "report.json"]
    assert tune_loader.main([*words, "data.decode_threads=1"]) == 0
    printed, report = capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())
    assert all(min(point["seconds"]) > 0 for point in report["points"])
    assert report["not_tried"] == [] and report["device"] == "cpu" and report["processes"] == 1
    assert f"data:\n  prefetch: {report['recommended'][PREFETCH]}\n" in printed
    assert tune_loader.main([*words, "--minutes", "0"]) == 0
    assert "not measured, because the time was up: data.prefetch" in capsys.readouterr().out


def test_default_threads_are_the_share_of_one_process_of_the_machine(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(CONFIG)

    @contextlib.contextmanager
    def measuring(path, *_):
        yield load_config(path), "cpu", lambda values: 1 / values[THREADS]

    monkeypatch.setattr(tune_loader, "measuring", measuring)
    monkeypatch.setattr(tune_loader, "cores", lambda: 64)
    monkeypatch.setattr(cpu_count, "cores", lambda: 64)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert tune_loader.main([str(tmp_path / "run.yaml"), "--rounds", "1"]) == 0
    assert "decode_threads: 8\n" in capsys.readouterr().out
