"""Lays a config file on its base and the command line's overrides on both, remembering where every value
came from.
"""

import copy
import os
from pathlib import Path
from typing import Any

from fastsuncet.config.keys import SECTIONS, VALUES
from fastsuncet.config.problems import ConfigErrors, Origin, Problem
from fastsuncet.config.reader import Document, Key, read_file, read_override

Layers = tuple[dict[str, Any], dict[Key, Origin]]  # values, and the origin of each


def read_layers(shown: str, overrides: list[str]) -> tuple[Layers, list[Problem]]:
    """The values of a file, its base and `overrides`, the last word winning, and the problems met on the way.

    Raises ConfigErrors where nothing can be read: no file, no YAML, no sections.
    """
    path = Path(shown).expanduser()
    document = read_file(path, shown)
    problems = list(document.problems)
    layers = _with_base(document, path, problems)
    for argument in overrides:
        try:
            key, over = read_override(argument)
        except ConfigErrors as error:
            problems += error.problems
            continue
        layers = _override(layers, key, over, argument)
    return _named(layers, path.stem, shown), problems


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`: sections merge key by key at every level, anything else is replaced whole."""
    merged = dict(base)
    for name, value in over.items():
        below = merged.get(name)
        merged[name] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _with_base(document: Document, path: Path, problems: list[Problem]) -> Layers:
    values, origins = _sections_of(document), dict(document.origins)
    base, at = values.pop("base", None), origins.pop(("base",), None)
    if at is None:
        return values, origins
    if not isinstance(base, str) or not base:
        text = "must be the name of another config file, such as base.yaml"
        raise ConfigErrors([*problems, Problem("base", text, at)])
    base = os.path.expanduser(base)
    # normpath and not resolve(): a message calls the file what its reader would type.
    shown = os.path.normpath(os.path.join(os.path.dirname(document.file), base))
    below = read_file(path.parent / base, shown, at)
    problems += below.problems
    base_values = _sections_of(below)
    if "base" in base_values:
        text = f"{shown} has a base of its own, {base_values['base']}; one level is all there is"
        raise ConfigErrors([*problems, Problem("base", text, at)])
    return merge(base_values, values), {**below.origins, **origins}


def _sections_of(document: Document) -> dict[str, Any]:
    """The values of a document. An empty section (`logging:` and nothing below it) is one without keys."""
    if document.values is None:
        text = "the file is empty; a config has at least the sections data, criterion and optimization"
        raise ConfigErrors([Problem("", text, Origin(document.file))])
    if not isinstance(document.values, dict):
        text = "this is not a config: it has sections such as data: with indented lines key: value"
        raise ConfigErrors([Problem("", text, Origin(document.file, 1))])
    values = copy.deepcopy(document.values)
    for section in sorted(filter(None, SECTIONS)):
        *above, name = section.split(".")
        holder: Any = values
        for part in above:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and name in holder and holder[name] is None:
            holder[name] = {}
    return values


def _override(layers: Layers, key: Key, over: Document, argument: str) -> Layers:
    values, origins = layers
    nested: Any = {} if over.values is None and ".".join(key) in SECTIONS else over.values
    for name in reversed(key):
        nested = {name: nested}
    origin = Origin(override=argument)
    # Sections above the key keep the line they stand on: what is missing there is not the override's doing.
    # A value above it does not: `...batch_size.per_rank=44` replaces the whole of it.
    above = [key[:length] for length in range(1, len(key)) if ".".join(key[:length]) in VALUES]
    mine = dict.fromkeys([*above, key, *((*key, *below) for below in over.origins)], origin)
    return merge(values, nested), {**origins, **mine}


def _named(layers: Layers, stem: str, shown: str) -> Layers:
    """The run is named after its config file, unless it has a name."""
    values, origins = layers
    logging = values.get("logging", {})
    if isinstance(logging, dict) and logging.get("write_tag") is None:
        values = {**values, "logging": {**logging, "write_tag": stem}}
        origin = Origin(shown, written=f"{stem} (from the name of the file)")
        origins = {**origins, ("logging", "write_tag"): origin}
    return values, origins
