"""A folder of checkpoints: which are kept, which one is found, and what is said about the others."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from fastsuncet.checkpoint import format, manager
from fastsuncet.checkpoint.format import META, MODEL
from fastsuncet.errors import CheckpointError
from pipelines import atomic_files
from tests.support.checkpoints import HARMS, content, newest, save, steps


def test_load_newest_names_a_folder_that_is_gone(tmp_path):
    save(tmp_path, 1)
    shutil.rmtree(save(tmp_path, 2))
    step, lines = newest(tmp_path)
    assert step == 1 and "step_00000002 cannot be used: meta.json cannot be read: No such file" in lines[0]
    shutil.rmtree(tmp_path / "step_00000001")
    with pytest.raises(CheckpointError, match=r"step_00000002: meta\.json cannot be read"):
        newest(tmp_path)  # `latest` without a checkpoint is not a fresh start


def test_load_newest_does_not_take_a_renamed_folder_for_another_step(tmp_path):
    save(tmp_path, 1)
    os.rename(save(tmp_path, 2), tmp_path / "step_00000009")
    (tmp_path / "latest").write_text("step_00000009\n")
    step, lines = newest(tmp_path)
    assert step == 1 and "is of step 2" in lines[0]
    assert manager.load(tmp_path / "step_00000009").step == 2  # named by the user, it is what it is


def test_load_newest_names_each_damaged_one_and_stops_if_none_is_good(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
    for step in (3, 4, 5):
        HARMS["truncated"](tmp_path / f"step_0000000{step}" / "train_state.pt")
    step, lines = newest(tmp_path)
    assert step == 2
    assert [f"step_0000000{n}" in line for n, line in zip((5, 4, 3, 2), lines)] == [True] * 4
    HARMS["flipped"](tmp_path / "step_00000001" / "model.safetensors")
    HARMS["missing"](tmp_path / "step_00000002" / "meta.json")
    with pytest.raises(CheckpointError) as caught:
        newest(tmp_path)
    message = str(caught.value)
    assert "step_00000001: model.safetensors was changed after it was written" in message
    assert "step_00000002: meta.json cannot be read: No such file or directory" in message
    assert "move the folder away to start over" in message
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*Not a directory.*in its place"):
        newest(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"File exists.*in its place"):
        save(tmp_path / "file", 1)


def test_latest_can_be_missing_or_wrong_and_names_nothing_outside(tmp_path):
    save(tmp_path / "elsewhere", 2)
    folder = tmp_path / "run"
    latest = save(folder, 1).with_name("latest")
    for text in ("../elsewhere/step_00000002", "/etc", "", "\0", "step_2", ".replaced-step_00000002"):
        latest.write_text(text)
        step, lines = newest(folder)
        assert step == 1 and f"names no checkpoint ({text!r})" in lines[0]
    latest.unlink()
    assert newest(folder) == (1, [])
    latest.mkdir()
    step, lines = newest(folder)
    assert step == 1 and "cannot be read" in lines[0]


def test_save_and_load_never_follow_a_symbolic_link(tmp_path):
    outside = save(tmp_path / "elsewhere", 2)
    folder = tmp_path / "run"
    save(folder, 1)
    (folder / "step_00000002").symlink_to(outside)
    (folder / "latest").write_text("step_00000002\n")
    step, lines = newest(folder)
    assert step == 1 and "symbolic link" in lines[0]
    save(folder, 3, keep=1)
    save(folder, 2)  # takes the place of the link
    assert manager.load(outside).step == 2
    assert not (folder / "step_00000002").is_symlink()


def test_save_keeps_the_newest_and_does_not_count_a_damaged_one(tmp_path):
    for step in (0, 1, 2, 3):
        save(tmp_path, step, keep=3)
    assert steps(tmp_path) == [1, 2, 3]
    HARMS["flipped"](tmp_path / "step_00000003" / "model.safetensors")
    lines = []
    save(tmp_path, 4, keep=2, say=lines.append)
    assert steps(tmp_path) == [2, 3, 4]  # 2 and 4 are the good ones
    assert len(lines) == 1 and "step_00000003" in lines[0]
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]  # older than two good ones, the damaged one goes as well


def test_checkpoint_of_a_stop_takes_no_place_and_goes_with_the_next_good_one(tmp_path):
    def stop(step):
        save(tmp_path, step, keep=2, meta=content(step)["meta"] | {"scheduled": False})

    for step in (10, 20):
        save(tmp_path, step, keep=2)
    stop(25)
    assert steps(tmp_path) == [10, 20, 25]
    stop(27)
    assert steps(tmp_path) == [10, 20, 27]
    save(tmp_path, 30, keep=2)
    assert steps(tmp_path) == [20, 30]
    stop(35)
    stop(37)
    HARMS["flipped"](tmp_path / "step_00000037" / "model.safetensors")
    stop(39)
    assert steps(tmp_path) == [20, 30, 39]
    save(tmp_path, 40, keep=3)
    assert steps(tmp_path) == [20, 30, 40]


def test_save_reads_each_checkpoint_back_once_unless_it_changes(tmp_path, monkeypatch):
    verified = []
    verify = format.verify
    monkeypatch.setattr(format, "verify", lambda path, step: verified.append(step) or verify(path, step))
    for step in range(1, 7):
        save(tmp_path, step, keep=2)
    assert sorted(verified) == [2, 3, 4, 5, 6]  # 2 when 3 came and 1 had to go
    HARMS["flipped"](tmp_path / "step_00000006" / "model.safetensors")
    save(tmp_path, 7, keep=2, say=lambda line: None)
    assert steps(tmp_path) == [5, 6, 7]  # the damage was noticed


def test_save_leaves_later_steps_until_the_run_passes_them(tmp_path):
    """And `latest` decides: killed between the rename and `latest`, a run continues from the one that it knew of."""
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000010\n")
    assert newest(tmp_path) == (10, [])
    save(tmp_path, 12, keep=1)
    assert steps(tmp_path) == [12, 20, 30]
    HARMS["flipped"](tmp_path / "step_00000012" / "model.safetensors")
    assert newest(tmp_path)[0] == 30
    save(tmp_path, 32, keep=1)
    assert steps(tmp_path) == [32]


def test_save_refuses_a_second_writer_in_the_folder(tmp_path):
    save(tmp_path, 1)
    with atomic_files.exclusive(tmp_path / ".lock") as held:
        assert held
        with pytest.raises(CheckpointError, match="another process is writing"):
            save(tmp_path, 2)
    assert steps(tmp_path) == [1]


def test_require_room_refuses_a_small_disk_and_a_folder_that_is_a_file(tmp_path, monkeypatch):
    manager.require_room(tmp_path / "checkpoints", 1000)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be written: .*in its place"):
        manager.require_room(tmp_path / "file", 1000)
    monkeypatch.setattr(manager.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1500))
    with pytest.raises(CheckpointError, match=r"of this run is 0.0 MB and needs twice that"):
        manager.require_room(tmp_path / "checkpoints", 1000)


@pytest.mark.gpu  # here and not with the other tensors: a bare GPU machine can lack what that file imports
def test_save_of_tensors_on_a_gpu_gives_the_same_bits_on_the_cpu(tmp_path):
    weight = torch.randn(8, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    save(tmp_path, 1, model={"x": weight, "h": weight.half()}, state={"x": weight.bfloat16()})
    loaded = manager.load_newest(tmp_path)
    assert torch.equal(loaded.model["x"], weight.cpu())
    assert torch.equal(loaded.model["h"], weight.half().cpu())
    assert torch.equal(loaded.state["x"], weight.bfloat16().cpu())
    assert loaded.state["x"].device.type == "cpu" and loaded.state["x"].stride() == weight.stride()


def test_newest_meta_passes_over_damaged_metas_and_reads_no_weights(tmp_path):
    assert manager.newest_meta(tmp_path / "none") is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_00000003" / META).write_text("{")
    (tmp_path / "step_00000002" / MODEL).unlink()
    (tmp_path / "step_00000009").symlink_to(tmp_path / "step_00000001")
    assert manager.newest_meta(tmp_path)["step"] == 2
    for step in (1, 2):
        (tmp_path / f"step_0000000{step}" / META).unlink()
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        manager.newest_meta(tmp_path)
