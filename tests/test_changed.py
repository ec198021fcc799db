"""A run is continued with its own config: what changed is named, and what may change may."""

import json

import pytest

from fastsuncet import checkpoint
from fastsuncet.errors import CheckpointError


def test_every_changed_key_is_named_with_both_values():
    saved = {
        "meta": {"seed": 0},
        "criterion": {"temperature": 0.1, "keys": "attached"},
        "data": {"kind": "csv"},
    }
    config = {
        "meta": {"seed": 1},
        "criterion": {"temperature": 0.2, "keys": "attached"},
        "data": {"root": None},
    }
    with pytest.raises(CheckpointError) as caught:
        checkpoint.refuse_changed(saved, config)
    assert str(caught.value).splitlines()[1:-1] == [
        "  criterion.temperature: 0.1 in the checkpoint, 0.2 now",
        '  data.kind: "csv" in the checkpoint, (not set) now',
        "  data.root: (not set) in the checkpoint, null now",
        "  meta.seed: 0 in the checkpoint, 1 now",
    ]


def test_keys_and_sections_that_may_change_may():
    saved = {"logging": {"folder": "a", "every": 10}, "data": {"root": "x", "kind": "csv"}}
    config = {"logging": {"folder": "b", "every": 20}, "data": {"root": "y", "kind": "csv"}}
    checkpoint.refuse_changed(saved, config, ["logging", "data.root"])
    with pytest.raises(CheckpointError, match=r"data.root"):
        checkpoint.refuse_changed(saved, config, ["logging", "data.roo", "dat", "root"])


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (1, 1.0, True),
        (1, True, False),
        (0, False, False),
        ((1, 2), [1, 2], True),
        (None, 0, False),
        ({}, None, False),
    ],
)
def test_values_are_compared_as_a_config_means_them(old, new, same):
    saved = json.loads(json.dumps({"a": {"b": old}}))  # as meta.json gives it back
    if same:
        checkpoint.refuse_changed(saved, {"a": {"b": new}})
    else:
        with pytest.raises(CheckpointError, match=r"a\.b"):
            checkpoint.refuse_changed(saved, {"a": {"b": new}})
