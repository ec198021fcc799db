"""Features of a folder: those of the evaluation, complete or absent, continued to the same bits."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

import fastsuncet
from fastsuncet.commands import embed as command
from fastsuncet.commands.embed import embed
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.evaluation.features import outputs
from pipelines import atomic_files
from pipelines.datasets.folders import image_tree
from tests.support.checkpoints import HARMS
from tests.support.colors import ALONE

pytestmark = pytest.mark.slow

IMAGES, OUTPUT = Path("photos"), Path("features.npz")


def begin(run: Path, patch: pytest.MonkeyPatch) -> np.ndarray:
    """Stop after 8 of 12 images; return the features of all of them."""
    patch.setitem(command.SAVE_EVERY, "cpu", 1)
    embed(run, IMAGES, Path("whole.npz"), batch=4)

    def stopped(*arguments, **options):
        if arguments[2][0] == 8:
            raise KeyboardInterrupt
        return outputs(*arguments, **options)

    with patch.context() as inner:
        inner.setattr(command, "outputs", stopped)
        with pytest.raises(KeyboardInterrupt):
            embed(run, IMAGES, OUTPUT, batch=4)
    assert not OUTPUT.exists()
    return np.load("whole.npz")["features"]


def test_embed_writes_the_features_of_the_evaluation(run, run_cli):
    line = f"embed {run} {IMAGES} --output {OUTPUT} --batch 8"
    assert "\n12 of 12 images\n" in f"\n{run_cli(line)}"
    index, encoder = image_tree(IMAGES), load_encoder(run)
    config = encoder.trained.with_values({"data.backend": "auto"})  # as the command reads other images
    expected = outputs(encoder.module, index, np.arange(12), config, ALONE, batch=8)
    found = np.load(OUTPUT)
    np.testing.assert_array_equal(found["features"], expected.numpy())
    assert list(found["files"]) == [index.name(i) for i in range(12)]
    assert json.loads(str(found["about"]))["encoder"]["step"] == 7
    assert not list(Path().glob(".features*"))
    assert "features.npz exists" in run_cli(line, code=2) and run_cli(line, "--force")


def test_embed_skips_bad_images(run, capsys, monkeypatch):
    """In blocks, the first of a bad one alone."""
    monkeypatch.setitem(command.SAVE_EVERY, "cpu", 1)
    few = IMAGES / "part0"
    (few / "a.png").write_bytes(b"no image")
    embed(run, few, OUTPUT, batch=1, skip_bad=True)
    found, printed = np.load(OUTPUT), capsys.readouterr().out
    assert found["files"][0] == "a.png" and len(found["files"]) == 7
    assert np.isnan(found["features"][0]).all() and np.isfinite(found["features"][1:]).all()
    assert "1 image that cannot be decoded; their features are NaN" in printed and "a.png: not an" in printed
    assert "wrote features.npz: 6 images" in printed
    names, features = fastsuncet.embed(run, few, batch=1, skip_bad=True)
    assert names == list(found["files"])
    np.testing.assert_array_equal(features, found["features"])


@pytest.mark.parametrize(
    ("harm", "name", "computed"),
    [
        *(
            (None, "", [8]),
            ("flipped", "rows", [0, 8]),
            ("empty", "rows", [0, 4, 8]),
            ("missing", "rows", [0, 4, 8]),
        ),
        *((harm, "done", [0, 4, 8]) for harm in ("flipped", "empty", "missing")),
    ],
)
def test_embed_continues_to_the_same_bits(run, capsys, monkeypatch, harm, name, computed):
    """It computes what was damaged again, and no more."""
    whole, calls = begin(run, monkeypatch), []
    if harm:
        (path,) = Path(".features.npz.part").glob(f"*/{name}")
        HARMS[harm](path)
    monkeypatch.setattr(command, "outputs", lambda *a, **b: calls.append(a[2][0]) or outputs(*a, **b))
    embed(run, IMAGES, OUTPUT, batch=4)
    assert calls == computed
    assert ("continuing after 8 of 12 images" in capsys.readouterr().out) == (name != "done")
    np.testing.assert_array_equal(np.load(OUTPUT)["features"], whole)


def test_embed_on_a_full_disk_keeps_what_is_done(run, capsys, monkeypatch):
    monkeypatch.setitem(command.SAVE_EVERY, "cpu", 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        patch.setattr(command, "set_determinism", lambda *_: resource.setrlimit(  # for what is written from here on
            resource.RLIMIT_FSIZE, (4 * 64 * 10, limits[1])))  # fmt: skip
        try:
            with pytest.raises(CheckpointError, match=r"features\.npz cannot be written.*File too large"):
                embed(run, IMAGES, OUTPUT, batch=4)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    embed(run, IMAGES, OUTPUT, batch=4)
    assert "continuing after 8 of 12 images" in capsys.readouterr().out


def test_embed_never_replaces_a_file_that_appears_while_it_runs(run, monkeypatch):
    save = command._save
    monkeypatch.setattr(command, "_save", lambda *a, **b: save(*a, **b) or OUTPUT.write_text("mine"))
    with pytest.raises(ConfigError, match=r"features\.npz exists"):
        embed(run, IMAGES, OUTPUT)
    assert OUTPUT.read_text() == "mine"
    embed(run, IMAGES, OUTPUT, force=True)
    assert np.load(OUTPUT)["features"].shape == (12, 64)


def test_embed_starts_over_for_other_images(run, capsys, monkeypatch):
    begin(run, monkeypatch)
    (IMAGES / "part0" / "red0.png").unlink()
    embed(run, IMAGES, OUTPUT, batch=4)
    assert "is of other images" in capsys.readouterr().out
    features = np.load(OUTPUT)["features"]
    assert features.shape == (11, 64) and features.any(axis=1).all()


def test_embed_writes_parquet(run, run_cli, monkeypatch):
    line = f"embed {run} photos --output features.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(command, "find_spec", lambda name: None)
        assert "needs pyarrow: pip install pyarrow" in run_cli(line, code=2)
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    run_cli(line)
    embed(run, IMAGES, OUTPUT)
    rows, arrays = parquet.read_table("features.parquet"), np.load(OUTPUT)
    assert rows["file"].to_pylist() == list(arrays["files"])
    np.testing.assert_array_equal(np.array(rows["features"].to_pylist(), np.float32), arrays["features"])


def test_embed_refuses_what_it_cannot_do(run, run_cli, monkeypatch):
    line = f"embed {run} photos --output features.npz"
    assert "must end in .npz or .parquet" in run_cli(f"embed {run} photos --output features.csv", code=2)
    torch.save(load_encoder(run).module.state_dict(), "weights.pth")
    assert "does not say which pixels" in run_cli("embed weights.pth photos --output features.npz", code=2)
    with monkeypatch.context() as patch:
        patch.setattr(command, "MOST_NAMES", 4 * 12 * 16 - 1)
        said = run_cli(line, code=2)
    assert "12 names of up to 16 characters take " in said and " a .parquet file" in said
    (part := Path(".features.npz.part")).mkdir()
    with atomic_files.exclusive(part / ".lock"):
        assert "another process is writing features.npz" in run_cli(line, code=5)
    atomic_files.remove(part)
    part.write_text("in the way")
    assert "features.npz cannot be written" in run_cli(line, code=5)
