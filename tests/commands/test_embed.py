"""Features of a folder: those of the evaluation, complete or absent, continued to the same bits."""

import json
import os
import resource
import sys

import numpy as np
import PIL.Image
import pytest
import torch

from fastsuncet import cli
from fastsuncet.commands import embed as command
from fastsuncet.commands import folder_pass
from fastsuncet.commands.embed import embed
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.evaluation.features import outputs
from pipelines.data_errors import BadImage
from pipelines.datasets.folders import image_tree
from tests.support.exports import save_run

TINY = ("model.name=resnet_tiny", "data.augmentation.size=32")


@pytest.fixture
def run(tmp_path):
    """Return a run of a tiny encoder, with 20 pictures in a tree next to it."""
    save_run(tmp_path / "run", *TINY)
    for i in range(20):
        path = tmp_path / "images" / f"part{i % 3}" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        PIL.Image.effect_noise((40 + i, 50), 60).convert("RGB").save(path)
    return tmp_path / "run"


@pytest.mark.slow
def test_embed_writes_the_features_of_the_evaluation(run, tmp_path, capsys):
    output = tmp_path / "features.npz"
    words = ["embed", str(run), str(tmp_path / "images"), "--output", str(output), "--batch", "8"]
    assert cli.main(words) == 0
    index, encoder = image_tree(tmp_path / "images"), load_encoder(run)
    place = Place(0, 1, 0, torch.device("cpu"))
    expected = outputs(encoder.module, index, np.arange(20), encoder.trained, place, batch=8)
    found = np.load(output)
    np.testing.assert_array_equal(found["features"], expected.numpy())
    assert list(found["files"]) == [index.name(i) for i in range(20)]
    assert json.loads(str(found["about"]))["encoder"]["step"] == 7
    assert not list(tmp_path.glob(".features*"))
    assert cli.main(words) == 2
    assert "features.npz exists" in capsys.readouterr().err
    assert cli.main([*words, "--force"]) == 0


def test_embed_continues_after_an_interruption_to_the_same_bits(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(folder_pass.SAVE_EVERY, "cpu", 1)
    embed(run, tmp_path / "images", tmp_path / "whole.npz", batch=6)
    calls = []

    def stopped(*arguments, **options):
        calls.append(arguments[2][0])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return outputs(*arguments, **options)

    monkeypatch.setattr(folder_pass, "outputs", stopped)
    output = tmp_path / "part.npz"
    with pytest.raises(KeyboardInterrupt):
        embed(run, tmp_path / "images", output, batch=6)
    assert not output.exists()
    embed(run, tmp_path / "images", output, batch=6)
    assert calls == [0, 6, 12, 12, 18] and "continuing after 12 of 20 images" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(output)["features"], np.load(tmp_path / "whole.npz")["features"])


def begin(run, output, patch) -> None:
    """Stop after 12 of 20 images."""
    patch.setitem(folder_pass.SAVE_EVERY, "cpu", 1)

    def stopped(*arguments, **options):
        if arguments[2][0] == 12:
            raise KeyboardInterrupt
        return outputs(*arguments, **options)

    with patch.context() as inner:
        inner.setattr(folder_pass, "outputs", stopped)
        with pytest.raises(KeyboardInterrupt):
            embed(run, run.parent / "images", output, batch=6)


CHANGES = {
    "negative": {"done": -6},
    "too many": {"done": 999},
    "no number": {"done": True},
    "fewer": {"done": 6},
    "other skipped": {"skipped": [[3, "bad"]]},
}
STATES = {"no JSON": b"{", "a list": b"[]", "deep": b"[" * 100_000, "text": b'{"identity": 1, "done": "12"}'}


@pytest.mark.slow
@pytest.mark.parametrize("harm", [*STATES, *CHANGES, "pipe", "bit", "short", "gone"])
def test_embed_starts_over_where_what_was_begun_is_damaged(run, tmp_path, capsys, monkeypatch, harm):
    output, part = tmp_path / "features.npz", tmp_path / ".features.npz.part"
    begin(run, output, monkeypatch)
    state, rows = part / "state.json", part / "rows"
    saved = json.loads(state.read_bytes())
    for name, change in CHANGES.items():
        if harm == name:
            state.write_text(json.dumps(saved | change))
    if harm in STATES:
        state.write_bytes(STATES[harm])
    elif harm == "pipe":
        state.unlink()
        os.mkfifo(state)
    elif harm == "bit":
        content = bytearray(rows.read_bytes())
        content[500] ^= 1
        rows.write_bytes(content)
    elif harm == "short":
        os.truncate(rows, 1000)
    elif harm == "gone":
        rows.unlink()
    embed(run, tmp_path / "images", output, batch=6)
    assert f"starting over: what was begun in {part} is damaged" in capsys.readouterr().out
    embed(run, tmp_path / "images", tmp_path / "whole.npz", batch=6)
    np.testing.assert_array_equal(np.load(output)["features"], np.load(tmp_path / "whole.npz")["features"])


@pytest.mark.slow
def test_embed_on_a_full_disk_keeps_what_is_done(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(folder_pass.SAVE_EVERY, "cpu", 1)
    output, limits = tmp_path / "features.npz", resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        patch.setattr(folder_pass, "set_determinism", lambda *_: resource.setrlimit(  # for what is written from here on
            resource.RLIMIT_FSIZE, (4 * 64 * 14, limits[1])))  # fmt: skip
        try:
            with pytest.raises(CheckpointError, match=r"features\.npz cannot be written.*File too large"):
                embed(run, tmp_path / "images", output, batch=6)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    embed(run, tmp_path / "images", output, batch=6)
    assert "continuing after 12 of 20 images" in capsys.readouterr().out


@pytest.mark.slow
def test_embed_never_replaces_a_file_that_appears_while_it_runs(run, tmp_path, monkeypatch):
    output, save = tmp_path / "features.npz", command._save
    monkeypatch.setattr(command, "_save", lambda *given: save(*given) or output.write_text("mine"))
    with pytest.raises(ConfigError, match=r"features\.npz exists"):
        embed(run, tmp_path / "images", output)
    assert output.read_text() == "mine"
    embed(run, tmp_path / "images", output, force=True)
    assert np.load(output)["features"].shape == (20, 64)


def test_embed_starts_over_for_other_images(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(folder_pass.SAVE_EVERY, "cpu", 1)
    output = tmp_path / "features.npz"
    with monkeypatch.context() as patch:
        patch.setattr(command, "_save", lambda *_: sys.exit("killed"))
        with pytest.raises(SystemExit):
            embed(run, tmp_path / "images", output)
    hidden = (tmp_path / "images" / "part0" / "0.png").rename(tmp_path / "0.png")
    with monkeypatch.context() as patch:
        patch.setattr(folder_pass, "outputs", lambda *_, **__: sys.exit("killed before the first save"))
        with pytest.raises(SystemExit):
            embed(run, tmp_path / "images", output)
    assert "has other images" in capsys.readouterr().out
    hidden.rename(tmp_path / "images" / "part0" / "0.png")
    embed(run, tmp_path / "images", output)
    features = np.load(output)["features"]
    assert features.shape == (20, 64) and features.any(axis=1).all()


def test_embed_writes_parquet(run, tmp_path, monkeypatch):
    images = tmp_path / "images"
    with monkeypatch.context() as patch:
        patch.setattr(folder_pass, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="needs pyarrow: pip install pyarrow"):
            embed(run, images, tmp_path / "features.parquet")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    for name in ("features.parquet", "features.npz"):
        embed(run, images, tmp_path / name)
    table, arrays = parquet.read_table(tmp_path / "features.parquet"), np.load(tmp_path / "features.npz")
    assert table["file"].to_pylist() == list(arrays["files"])
    np.testing.assert_array_equal(np.array(table["features"].to_pylist(), np.float32), arrays["features"])


def test_embed_refuses_names_that_make_a_huge_array(run, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "MOST_NAMES", 4 * 20 * 12 - 1)
    with pytest.raises(ConfigError, match=r"20 names of up to 12 characters take .* write a \.parquet file"):
        embed(run, tmp_path / "images", tmp_path / "features.npz")


def test_embed_refuses_what_it_cannot_do(run, tmp_path):
    with pytest.raises(ConfigError, match=r"must end in \.npz or \.parquet"):
        embed(run, tmp_path / "images", tmp_path / "features.csv")
    torch.save(load_encoder(run).module.state_dict(), tmp_path / "weights.pth")
    with pytest.raises(ConfigError, match="does not say which pixels"):
        embed(tmp_path / "weights.pth", tmp_path / "images", tmp_path / "features.npz")
    (tmp_path / "images" / "bad.png").write_bytes(b"no image")
    with pytest.raises(BadImage, match=r"bad\.png"):
        embed(run, tmp_path / "images", tmp_path / "features.npz")
    (tmp_path / "images" / "bad.png").unlink()
    (tmp_path / ".features.npz.part").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"features\.npz cannot be written"):
        embed(run, tmp_path / "images", tmp_path / "features.npz")
