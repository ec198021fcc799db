"""What a key of a config means, or all keys of a section, from the schema itself."""

from difflib import get_close_matches
from typing import Any

from fastsuncet.config.messages import allowed, keys_ending_in, nearest_key
from fastsuncet.config.problems import words
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.schema import CONFIG, DEFAULTS, Sections
from fastsuncet.errors import ConfigError


def describe(key: str) -> list[str]:
    """Return the lines about a dotted key, the keys of a section, or the sections for "".

    Raises ConfigError for an unknown key, with the nearest.
    """
    if key in CONFIG.values:
        default = as_yaml(DEFAULTS[key]) if key in DEFAULTS else "none: it must be written"
        facts = {"meaning": meaning(key), "default": default, "allowed": allowed(CONFIG, key)}
        return [key, *(f"  {name:<8} {fact}" for name, fact in facts.items())]
    if key not in CONFIG.sections:
        leaf = key.rpartition(".")[2]
        near = keys_ending_in(CONFIG, leaf) or get_close_matches(key, [*CONFIG.values, *CONFIG.sections], 1)
        near = near or [each for each in [nearest_key(CONFIG, leaf, {})] if each]
        hint = f"did you mean {words(near)}?" if near else "`fastsuncet config` lists the sections"
        raise ConfigError(f"a config has no key {key}; {hint}")
    above = f"{key}." if key else ""
    return [f"{above}{name:<24} {meaning(above + name)}" for name in CONFIG.sections[key]]


def meaning(key: str) -> str:
    """Return what a dotted key or a section is for, on one line."""
    section, _, name = key.rpartition(".")
    field = CONFIG.sections[section][name]
    text = (field.annotation.__doc__ if key in CONFIG.sections else field.description) or ""
    return " ".join(text.split())


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a config file, for editors. No key is required, because a base can have it."""
    schema = Sections.model_json_schema()
    for part in [schema, *schema["$defs"].values()]:
        part.pop("required", None)
    schema["properties"]["base"] = {"type": "string", "description": "another config, which this one changes"}
    return schema
