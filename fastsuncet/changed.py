"""A run is continued with the config it was started with, or not at all."""

import json
from collections.abc import Collection
from typing import Any

from fastsuncet import contents
from fastsuncet.errors import CheckpointError


def refuse_changed(saved: dict, config: dict, may_change: Collection[str] = ()) -> None:
    """Raises CheckpointError naming every key whose value is not the checkpoint's, with both values.

    `saved` is the config in meta.json, `config` the one of this run (nested dicts). `may_change` lists dotted
    keys, or sections with everything below them, that do not touch the result: "logging", "data.root".
    """
    old, new = _flat(contents.plain_json(saved, "saved")), _flat(contents.plain_json(config, "config"))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        parts = key.split(".")
        if any(".".join(parts[: i + 1]) in may_change for i in range(len(parts))):
            continue
        if key not in old or key not in new or not _same(old[key], new[key]):
            before, now = (json.dumps(side[key]) if key in side else "(not set)" for side in (old, new))
            lines.append(f"{key}: {before} in the checkpoint, {now} now")
    if lines:
        raise CheckpointError(
            "\n  ".join(["the config is not the one this run was started with:", *lines])
            + "\nSet these back to continue the run, or give the new one its own logging.folder."
        )


def _same(old: Any, new: Any) -> bool:
    # To Python 1 == True; in a config they are different answers. 1 and 1.0 are the same one.
    return old == new and isinstance(old, bool) == isinstance(new, bool)


def _flat(config: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
        )
    return flat
