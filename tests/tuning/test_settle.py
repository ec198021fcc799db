"""What a run trains with: its checkpoint's choice, a kept one, what wins now, or plain. Real runs and real children."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from fastsuncet.checkpoint import manager
from fastsuncet.commands import train as train_command
from fastsuncet.commands.train import start
from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.data.paired_stream import PairedStream
from fastsuncet.distributed.launch import join
from fastsuncet.errors import CheckpointError, ConfigError, Preempted
from fastsuncet.training.determinism import resolve_precision
from fastsuncet.tuning import processes, record, settle
from fastsuncet.tuning.chooser import Report, Rung
from pipelines.code_cache import cache_folder, make_folder
from tests.support.ranks import run_ranks
from tests.support.runs import (
    Killed,
    assert_equal_to_the_bit,
    final_state,
    kill,
    shorten_tuning,
    small_config,
)

pytestmark = pytest.mark.slow

CHUNKS = Rung("larger chunks", {"criterion.chunk_size": 64})
HOURS = ("optimization.steps=9000000", "meta.speed=auto")


@pytest.fixture(autouse=True)
def _own_cache_and_rung(tmp_path, monkeypatch):
    shorten_tuning(monkeypatch)
    plugin = cache_folder("plugin")  # the one that is compiled already
    make_folder(plugin)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "plugin").symlink_to(plugin)
    monkeypatch.setenv("FASTSUNCET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(settle, "candidates", lambda *_: [CHUNKS])


@pytest.fixture
def no_children(monkeypatch):
    monkeypatch.setattr(processes, "run_child", lambda *_: pytest.fail("a child was started"))


def settled(config: Config) -> settle.Settled:
    with join("cpu") as place:
        return settle.settle(config, place)


def keep(config: Config) -> None:
    """Keep a choice for `config`, as a run that tuned before would."""
    key = record.key(config, config.resolve(1, 1442, 10, 150), "cpu", [CHUNKS])
    record.keep({"chosen": CHUNKS.values, "line": "larger chunks, 2x plain", "key": key, "rungs": []})


def first_line(config: Config) -> dict:
    return json.loads((config.run_folder / "metrics.jsonl").read_text().splitlines()[0])


# ------------------------------------------------------------------------------------------------------- a new run
def test_settle_chooses_what_wins_and_measures_it_once(tmp_path, monkeypatch):
    """Plain's losses go through the rows one by one. The network is so small that they take most of a step."""
    small = ("criterion.unsupervised_batch_size=100", "optimization.warmup=0")
    small += ("data.augmentation.size=8", "model.hidden=8")
    config = small_config(tmp_path, *HOURS, *small).with_values({"criterion.chunk_size": 1})
    found = settled(config)
    assert found.speed["chosen"] == CHUNKS.values, found.speed["rungs"]
    (row, whole) = found.speed["rungs"]
    assert row["won"] and row["gain"] > 1.03 and whole["clock"] == "loop" and whole["problem"] is None
    assert found.line.startswith("larger chunks, ") and found.line == found.speed["line"]
    assert record.applied(config, found.speed).criterion.chunk_size == 64
    monkeypatch.setattr(processes, "run_child", lambda *_: pytest.fail("a child was started"))
    again = settled(config)
    assert again.speed == found.speed and again.line.endswith("measured before")


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("meta.speed=auto",), "plain; the run is too short to tune"),
        ((*HOURS, "meta.speed=plain"), "plain, as configured"),
    ],
)
def test_settle_without_a_child_is_plain_whatever_is_kept(tmp_path, overrides, line):
    config = small_config(tmp_path, *overrides)
    keep(config)
    found = settled(config)
    assert (found.speed, found.line) == (None, line)


def test_settle_fixed_needs_a_choice(tmp_path):
    config = small_config(tmp_path, "meta.speed=fixed")
    with pytest.raises(ConfigError, match="run `fastsuncet tune` with the same config first"):
        settled(config)
    keep(config)
    assert settled(config).speed["chosen"] == CHUNKS.values


@pytest.mark.usefixtures("no_children")
def test_settle_is_plain_with_a_reason_where_the_card_cannot_be_named(tmp_path, monkeypatch):
    """A GPU's name is asked of torch in another process, which really finds none here."""
    monkeypatch.setattr(settle, "device_type", lambda config: "cuda")
    monkeypatch.setattr(settle, "RATE", {"cuda": 1e10})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = settled(small_config(tmp_path, *HOURS)).line
    assert line.startswith("plain; the hardware cannot be named, rank 0: RuntimeError: ")
    monkeypatch.setattr(record, "cards", lambda: 1 / 0)
    with pytest.raises(ConfigError, match="no choice is valid here: the hardware cannot be named"):
        settled(small_config(tmp_path, "meta.speed=fixed"))


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("no home directory")])
def test_settle_needs_no_cache_and_no_child(tmp_path, monkeypatch, capsys, error):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(record, "cache_folder", fails)
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: os.read(-1, 1))  # an OSError
    found = settled(small_config(tmp_path, *HOURS))
    assert found.line == "plain; none of 0 contenders is faster; 1 not usable"
    assert f"the choice cannot be kept for later runs: {error}" in capsys.readouterr().out


def test_settle_refuses_a_written_graph_that_fails_in_a_child(tmp_path, monkeypatch):
    """A capture that hangs on one rank costs its child."""
    monkeypatch.setattr(settle, "device_type", lambda config: "cuda")
    config = small_config(tmp_path, "meta.cuda_graph=true", "meta.speed=plain")
    asked = []

    def measure(config, rung, base, seconds, signals):
        asked.append((config.meta.cuda_graph, rung.values, rung.exact, rung.clock))
        return [Report(), Report(problem="not done after 180 s")] if len(asked) == 1 else [Report()] * 2

    monkeypatch.setattr(processes, "measure", measure)
    with pytest.raises(ConfigError, match=r"rank 1: not done after 180 s\. Remove the line"):
        settled(config)
    assert settled(config)[::2] == (None, "plain, as configured")
    assert asked == [(False, {"meta.cuda_graph": True}, True, None)] * 2


def test_settle_stopped_while_it_tunes_keeps_nothing(tmp_path, monkeypatch):
    def stopped(config, rung, base, seconds, signals):
        signals.requested = "SIGTERM"
        return [Report(problem="stopped by SIGTERM")]

    monkeypatch.setattr(processes, "measure", stopped)
    config = small_config(tmp_path, *HOURS)
    with pytest.raises(Preempted, match="SIGTERM: stopped before the first step"):
        settled(config)
    assert not cache_folder("speed").exists()
    assert json.loads((config.run_folder / "status.json").read_text())["state"] == "preempted"


def test_settle_stopped_on_another_rank_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(settle, "any_rank", lambda stop: True)
    with pytest.raises(Preempted, match="another rank: stopped before the first step"):
        settled(small_config(tmp_path, *HOURS))
    assert not cache_folder("speed").exists()


# ---------------------------------------------------------------------------------------------------- a resumed run
def test_settle_of_a_finished_run_leaves_its_status(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    train_command.run(config, [])
    status = config.run_folder / "status.json"
    before = status.read_text()

    def stopped(config, place, signals):
        signals.requested = "SIGTERM"

    monkeypatch.setattr(settle, "_settle", stopped)
    with pytest.raises(Preempted):
        settled(config)
    assert json.loads(before)["state"] == "done" and status.read_text() == before


def test_precision_that_was_chosen_is_used_where_auto_is_written(tmp_path):
    config = small_config(tmp_path, "meta.precision=auto")
    with join("cpu") as place:
        other = "bf16" if resolve_precision(config, place.device)[0].meta.precision == "fp32" else "fp32"
        images = open_images(config, place, validation=False)
        config.run_folder.mkdir(parents=True)
        chosen = settle.Settled({"chosen": {"meta.precision": other}, "line": other}, images, other)
        assert start(config, place, images, config.run_folder, chosen).task.config.meta.precision == other


def test_run_uses_the_choice_and_its_resume_obeys_the_checkpoint(tmp_path, monkeypatch):
    """A run that was killed and continued without the cache equals one that was not killed, and not a plain one."""
    real = PairedStream.__call__

    def killed_at_7(stream, step, supervised=True):
        return kill() if step == 7 else real(stream, step, supervised)

    whole, resumed = (small_config(tmp_path / name, "meta.speed=fixed") for name in ("whole", "resumed"))
    keep(whole)
    train_command.run(whole, [])
    with monkeypatch.context() as patch:
        patch.setattr(PairedStream, "__call__", killed_at_7)
        with pytest.raises(Killed):
            train_command.run(resumed, [])
    shutil.rmtree(cache_folder("speed"))
    train_command.run(resumed, [])
    assert_equal_to_the_bit(final_state(resumed), final_state(whole))
    for config in (whole, resumed):
        meta = manager.load_newest(config.run_folder / "checkpoints").meta
        assert meta["speed"]["chosen"] == first_line(config)["speed"]["chosen"] == CHUNKS.values
        assert meta["config"] == config.canonical()
        assert '"chosen": {"criterion.chunk_size": 64}' in (config.run_folder / "config.yaml").read_text()
    plain = small_config(tmp_path / "plain", "meta.speed=plain")
    train_command.run(plain, [])
    ours, theirs = (final_state(config)[0] for config in (plain, whole))
    assert not all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert first_line(plain)["speed"] is None


def test_resume_refuses_a_written_switch_that_contradicts_the_choice(tmp_path):
    config = small_config(tmp_path, "meta.speed=fixed", "optimization.steps=3", "optimization.warmup=0")
    keep(config)
    train_command.run(config, [])
    words = ("meta.speed=fixed", "optimization.steps=3", "optimization.warmup=0", "criterion.chunk_size=32")
    with pytest.raises(CheckpointError, match="chunk_size: 64 in the checkpoint, chosen by tuning; 32 now"):
        train_command.run(small_config(tmp_path, *words), [])
    with pytest.raises(CheckpointError, match="continue it by `fastsuncet train`"), join("cpu") as place:
        train_command.train(config, place)


def test_resume_of_a_run_without_a_choice_stays_plain(tmp_path):
    """Checkpoints of earlier versions have no record, whatever is kept now."""
    config = small_config(tmp_path, "meta.speed=fixed", "optimization.steps=3", "optimization.warmup=0")
    with join("cpu") as place:
        train_command.train(config, place)
    assert "speed" not in manager.load_newest(config.run_folder / "checkpoints").meta
    keep(config)
    assert settled(config)[::2] == (None, "plain, as in the checkpoint")


# ---------------------------------------------------------------------------------------------------------- the cache
def test_cached_is_only_for_the_same_hardware_and_sound_files(tmp_path, monkeypatch):
    config = small_config(tmp_path)
    keep(config)
    key = record.key(config, config.resolve(1, 1442, 10, 150), "cpu", [CHUNKS])
    assert record.cached(key)["chosen"] == CHUNKS.values
    (file,) = cache_folder("speed").iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(record, "processor", lambda: "another processor")
        assert record.cached(record.key(config, config.resolve(1, 1442, 10, 150), "cpu", [CHUNKS])) is None
    bigger = config.with_values({"criterion.unsupervised_batch_size": 300})
    assert record.cached(record.key(bigger, bigger.resolve(1, 1442, 10, 150), "cpu", [CHUNKS])) is None
    for content in (b"", b"[]", file.read_bytes().replace(b'"ranks": 1', b'"ranks": 2')):
        file.write_bytes(content)
        assert record.cached(key) is None


def ranks_key(rank: int, world_size: int, folder: str, differ: bool) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "processor", lambda: f"processor {rank if differ else 0}")
        config = small_config(Path(folder))
        try:
            record.key(config, config.resolve(world_size, 1442, 10, 150), "cpu", [CHUNKS])
        except record.NoKey:
            return False
        return True


@pytest.mark.parametrize("differ", [True, False])
def test_key_needs_ranks_on_the_same_hardware(tmp_path, differ):
    assert run_ranks(ranks_key, 2, str(tmp_path), differ) == [not differ] * 2
