"""A file is damaged after it was written: what reads it says which and what to do, or does without it."""

import re

import pytest

from tests.support.checkpoints import HARMS
from tests.support.writers import REFUSALS, WRITERS, images

pytestmark = pytest.mark.slow

CHECKPOINT = r"step_00000002 cannot be used: {}"
SHARD = r"2/000000\.tar.*(Copy the pack here again|is a link that leads out|dmesg)"
WEIGHTS = r"(was changed after|holds no checkpoint|cannot be listed|has 54 GB)"
# The writer of a file, and what is said of damage to it.
FILES = {
    "step_00000002/model.safetensors": ("checkpoint", CHECKPOINT.format(r"model\.safetensors")),
    "step_00000002/train_state.pt": ("checkpoint", CHECKPOINT.format(r"train_state\.pt")),
    "step_00000002/meta.json": ("checkpoint", CHECKPOINT.format(r"meta\.json")),
    "index.npz": ("index", r"index\.npz (cannot be read.* Delete it; |is made anew, because )"),
    "2/index.npz": ("pack", r"2/index\.npz cannot be read"),
    "2/000000.tar": ("pack", SHARD),
    "kernels/code": ("code", None),
    "weights.pth": ("export", rf"weights\.pth {WEIGHTS}"),
    "weights.json": ("export", r"weights\.(json is no record|pth holds no ResNet)"),
    "weights/model.safetensors": ("export folder", rf"model\.safetensors {WEIGHTS}"),
    "weights/fastsuncet.json": ("export folder", r"(fastsuncet\.json is no record|holds no checkpoint)"),
}
# What leaves all that is needed: a last line feed, a byte after the end of a zip, the first name in a tar's header, and
# shards whose own labels and sizes are read where a pack has no index.
HARMLESS = {
    *((file, "truncated") for file in ("weights.json", "weights/fastsuncet.json")),
    *((file, "longer") for file in ("index.npz", "2/index.npz")),
    *(("2/index.npz", harm) for harm in ("missing", "pipe", "endless device", "folder")),
    ("2/000000.tar", "flipped"),
}
ABSENT = {
    ("weights.pth", "folder"),
    *((file, "missing") for file in FILES if "step" not in file and "2/" not in file),
}
ABSENT -= {("weights/model.safetensors", "missing")}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", FILES)
def test_damaged_file_is_named_and_its_content_not_used(tmp_path, capsys, file, harm):
    """The older checkpoint is used, a cache is made anew, and the rest is refused."""
    images()
    name, said = FILES[file]
    writer = WRITERS[name]
    for number in (1, 2):
        writer.write(tmp_path, number)
    capsys.readouterr()
    HARMS[harm](tmp_path / file)
    try:
        found, text = writer.read(tmp_path), ""
    except REFUSALS as error:
        found, text = "refused", str(error)
    text = text + capsys.readouterr().out
    if (file, harm) in HARMLESS:
        assert found == 2
    elif name == "code" or (file, harm) in ABSENT:
        assert (found, text) == (None, "")
    else:
        assert found == (1 if name == "checkpoint" else None if "made anew" in text else "refused")
        assert re.search(said, text), text
    if harm in ("truncated", "longer") and name == "checkpoint" and "meta" not in file:
        assert "bytes were written" in text  # a full disk, and not a broken one
    if harm != "folder" and name not in ("pack", "export"):
        writer.write(tmp_path, 2)
        assert writer.read(tmp_path) == 2
