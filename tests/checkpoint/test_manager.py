"""A folder of checkpoints: which are kept, which one is found, and what is said about the others."""

import os
import shutil

import pytest
import torch

from fastsuncet.checkpoint import atomic_files, manager
from fastsuncet.checkpoint import format as snapshot
from fastsuncet.errors import CheckpointError
from tests.support.checkpoints import corrupt, newest, save, steps


def test_nothing_is_found_where_there_has_never_been_a_checkpoint(tmp_path):
    assert newest(tmp_path / "nowhere") == (None, [])
    assert newest(tmp_path) == (None, [])
    (tmp_path / ".tmp-step_00000001").mkdir()  # a first save that was killed
    (tmp_path / "metrics.csv").touch()
    assert newest(tmp_path) == (None, [])


@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "empty", "longer", "zeros"])
@pytest.mark.parametrize("name", ["model.safetensors", "train_state.pt", "meta.json"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path, name, how):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    corrupt(path / name, how)
    step, lines = newest(tmp_path)
    assert step == 1
    assert len(lines) == 2
    assert str(path) in lines[0]
    assert name in lines[0]
    assert "step_00000001" in lines[1]
    if name != "meta.json" and how in ("truncated", "longer"):  # a full disk is told from a broken one
        assert "bytes were written" in lines[0]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        manager.load(path)
    save(tmp_path, 2)  # the run comes by again
    assert newest(tmp_path) == (2, [])


def test_no_flipped_bit_of_meta_json_goes_unnoticed(tmp_path):
    """Numbers, keys and values are still good JSON with a bit flipped; only a changed blank may pass."""
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    meta = manager.load(path).meta
    content = (path / "meta.json").read_bytes()
    noticed = 0
    for index in range(len(content)):
        flipped = bytearray(content)
        flipped[index] ^= 1 << index % 7
        (path / "meta.json").write_bytes(flipped)
        loaded = manager.load_newest(tmp_path, say=lambda line: None)
        if loaded.step == 1:
            noticed += 1
        else:
            assert loaded.meta == meta
    assert noticed > 0.7 * len(content)


def test_a_folder_that_is_gone_is_named_and_the_one_before_is_used(tmp_path):
    save(tmp_path, 1)
    shutil.rmtree(save(tmp_path, 2))
    step, lines = newest(tmp_path)
    assert step == 1
    assert "step_00000002" in lines[0]
    assert "no such folder" in lines[0]


def test_a_renamed_folder_is_not_taken_for_another_step(tmp_path):
    save(tmp_path, 1)
    os.rename(save(tmp_path, 2), tmp_path / "step_00000009")
    (tmp_path / "latest").write_text("step_00000009\n")
    step, lines = newest(tmp_path)
    assert step == 1
    assert "is of step 2" in lines[0]
    assert manager.load(tmp_path / "step_00000009").step == 2  # asked for by name, it is what it is


def test_one_good_checkpoint_is_found_behind_any_number_of_damaged_ones(tmp_path):
    for step in range(1, 6):
        path = save(tmp_path, step)
        if step != 2:
            corrupt(path / "train_state.pt", "truncated")
    step, lines = newest(tmp_path)
    assert step == 2
    assert [f"step_0000000{n}" in line for n, line in zip((5, 4, 3, 2), lines)] == [True] * 4


def test_if_none_is_good_each_is_named_and_nothing_starts_over(tmp_path):
    corrupt(save(tmp_path, 1) / "model.safetensors", "flipped")
    corrupt(save(tmp_path, 2) / "meta.json", "missing")
    with pytest.raises(CheckpointError) as caught:
        newest(tmp_path)
    assert caught.value.exit_code == 5
    message = str(caught.value)
    assert "step_00000001: model.safetensors was changed after it was written" in message
    assert "step_00000002: meta.json cannot be read: No such file or directory" in message
    assert "move the folder away to start over" in message


def test_latest_without_any_checkpoint_is_no_fresh_start(tmp_path):
    shutil.rmtree(save(tmp_path, 7))
    with pytest.raises(CheckpointError, match="step_00000007: there is no such folder"):
        newest(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "../elsewhere/step_00000002",
        "/etc",
        "step_00000002/../../elsewhere",
        "",
        "\0",
        "step_2",
        ".replaced-step_00000002",
    ],
    ids=repr,
)
def test_latest_can_name_a_checkpoint_of_this_folder_and_nothing_else(tmp_path, text):
    save(tmp_path / "elsewhere", 2)
    folder = tmp_path / "run"
    save(folder, 1)
    (folder / "latest").write_text(text)
    step, lines = newest(folder)
    assert step == 1
    assert "not a checkpoint's name" in lines[0]


def test_latest_may_be_missing_or_a_folder(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "latest").unlink()
    assert newest(tmp_path) == (1, [])
    (tmp_path / "latest").mkdir()
    step, lines = newest(tmp_path)
    assert step == 1
    assert "cannot be read" in lines[0]


def test_latest_decides_even_if_a_later_step_is_there(tmp_path):
    """A kill between the rename and `latest`: what `latest` names is what the run was told it had."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "latest").write_text("step_00000001\n")
    assert newest(tmp_path) == (1, [])
    corrupt(tmp_path / "step_00000001" / "model.safetensors", "flipped")
    assert newest(tmp_path)[0] == 2


def test_a_symbolic_link_is_neither_followed_nor_removed_with_what_it_points_to(tmp_path):
    outside = save(tmp_path / "elsewhere", 2)
    folder = tmp_path / "run"
    save(folder, 1)
    (folder / "step_00000002").symlink_to(outside)
    (folder / "latest").write_text("step_00000002\n")
    step, lines = newest(folder)
    assert step == 1
    assert "symbolic link" in lines[0]
    save(folder, 3, keep=1)
    save(folder, 2)  # takes the place of the link
    assert manager.load(outside).step == 2
    assert not (folder / "step_00000002").is_symlink()


def test_a_newer_format_is_refused_and_no_older_checkpoint_used_in_its_place(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(snapshot, "FORMAT", 2)
    save(tmp_path, 2)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"has format 2, and fastsuncet .* reads format 1"):
        newest(tmp_path)


def test_expect_sees_meta_and_its_refusal_is_no_reason_to_go_back(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    seen = []
    manager.load_newest(tmp_path, expect=seen.append)
    assert [(meta["step"], meta["ledger"]) for meta in seen] == [(2, {"images": 7})]

    def refuse(meta):
        raise CheckpointError(f"temperature was {meta['config']['criterion']['temperature']}")

    lines = []
    with pytest.raises(CheckpointError, match=r"temperature was 0\.1"):
        manager.load_newest(tmp_path, expect=refuse, say=lines.append)
    assert lines == []


# ------------------------------------------------------------------------------------------ how many are kept


def test_the_newest_are_kept_and_the_older_go(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [3, 4]
    save(tmp_path, 5, keep=1)
    assert steps(tmp_path) == [5]


def test_a_damaged_checkpoint_does_not_count_among_those_kept(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    corrupt(tmp_path / "step_00000003" / "model.safetensors", "flipped")
    lines = []
    save(tmp_path, 4, keep=2, say=lines.append)
    assert steps(tmp_path) == [2, 3, 4]  # 2 and 4 are the good ones
    assert len(lines) == 1
    assert "step_00000003" in lines[0]
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]  # older than two good ones, the damaged one goes as well


def test_damage_done_after_a_checkpoint_was_found_good_is_noticed(tmp_path):
    """What was read back once is not read again, unless its files have changed since."""
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    corrupt(tmp_path / "step_00000003" / "model.safetensors", "flipped")
    save(tmp_path, 4, keep=2, say=lambda line: None)
    assert steps(tmp_path) == [2, 3, 4]


def test_each_checkpoint_is_read_back_once_and_not_at_every_save(tmp_path, monkeypatch):
    verified = []
    verify = snapshot.verify
    monkeypatch.setattr(snapshot, "verify", lambda path, step: verified.append(step) or verify(path, step))
    for step in range(1, 7):
        save(tmp_path, step, keep=2)
    assert sorted(verified) == [2, 3, 4, 5, 6]  # 2 when 3 came and 1 had to go


def test_later_checkpoints_of_a_run_that_was_set_back_are_left_alone_until_it_passes_them(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000010\n")
    save(tmp_path, 12, keep=1)
    assert steps(tmp_path) == [12, 20, 30]
    assert newest(tmp_path) == (12, [])
    save(tmp_path, 32, keep=1)
    assert steps(tmp_path) == [32]


def test_two_writers_in_one_folder_are_refused(tmp_path):
    save(tmp_path, 1)
    with atomic_files.exclusive(tmp_path / ".lock") as held:
        assert held
        with pytest.raises(CheckpointError, match="another process is writing"):
            save(tmp_path, 2)
    save(tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (1, 0)])
def test_a_step_or_a_number_to_keep_that_makes_no_sense_is_refused(tmp_path, step, keep):
    with pytest.raises(ValueError, match="at least 0 and 1"):
        save(tmp_path, step, keep)


@pytest.mark.gpu  # here and not with the other contents: a bare GPU machine may lack what that file imports
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_tensors_on_a_gpu_come_back_with_the_same_bits_on_the_cpu(tmp_path):
    weight = torch.randn(8, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    save(tmp_path, 1, model={"x": weight, "h": weight.half()}, state={"x": weight.bfloat16()})
    loaded = manager.load_newest(tmp_path)
    assert torch.equal(loaded.model["x"], weight.cpu())
    assert torch.equal(loaded.model["h"], weight.half().cpu())
    assert torch.equal(loaded.state["x"], weight.bfloat16().cpu())
    assert loaded.state["x"].device.type == "cpu" and loaded.state["x"].stride() == weight.stride()
