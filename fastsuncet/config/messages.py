"""What is wrong with a config: each problem with its file and line, the key, the value as written, and what is allowed.

For an unknown key the message names the key that was probably meant: by its spelling, in its right section, or by its
name here for users of the authors' code.
"""

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from fastsuncet.config.schema import SECTIONS, VALUES
from fastsuncet.errors import ConfigError

WIDTH = 60  # characters of a value that a message repeats

# Keys of facebookresearch/suncet (both releases) whose name or meaning differs here.
ANCESTOR = {
    "supervised_batch_size": "criterion.supervised_imgs_per_class, counted over all processes",
    "supervised_views": "always 1: every labeled image gives one view",
    "gather_tensors": "always on: the losses contrast across all processes",
    "label_smoothing": "not part of SuNCEt as published (the authors had it at 0)",
    "unique_classes_per_rank": "not offered: all processes share the classes of a batch, as in the paper",
    "color_jitter": "data.augmentation.strength",
    "color_jitter_strength": "data.augmentation.strength",
    "normalize": "data.augmentation.mean and .std (the authors trained without)",
    "dataset": "data.kind",
    "data_seed": "data.split.seed",
    "root_path": "data.root",
    "image_folder": "data.root, with data.train and data.validation below it",
    "subset_path": "data.split.file",
    "unlabeled_frac": "data.split.fraction, which is the labeled share",
    "copy_data": "not needed: files are read where they are",
    "read_checkpoint": "not needed: the same command continues from the newest checkpoint",
    "load_checkpoint": "not needed: the same command continues from the newest checkpoint",
    "model_name": "model.name",
    "output_dim": "model.output",
    "use_pred_head": "not part of SuNCEt as published",
    "use_fp16": "meta.precision: fp16 (or bf16, which needs no loss scaling)",
    "training": "not needed: `fastsuncet train` trains",
}
# Keys that older versions had -> the value that all runs have now.
REMOVED = {"model.batchnorm_communicator": "shared"}


@dataclass(frozen=True)
class Origin:
    """Where a value was written. `override` is the whole argument where it came from the command line."""

    file: str = ""
    line: int = 0
    written: str = ""
    override: str = ""

    def __str__(self) -> str:
        if self.override:
            return "command line"
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One thing to change. `key` is dotted ("criterion.temperature"), or empty for the file as a whole."""

    key: str
    text: str
    origin: Origin = Origin()
    show_value: bool = True

    def __str__(self) -> str:
        value = f": {shorten(self.origin.written)}" if self.show_value and self.origin.written else ""
        subject = shorten(self.origin.override) or (self.key and shorten(self.key) + value)
        head = ": ".join(part for part in (str(self.origin), subject) if part)
        lines = textwrap.wrap(self.text, 100, break_long_words=False, break_on_hyphens=False)
        return "\n      ".join([f"  {head}", *lines])

    def at(self, origin: Origin, show_value: bool = True) -> "Problem":
        """Return the same problem with the place it was written at."""
        return replace(self, origin=origin, show_value=show_value)


class ConfigErrors(ConfigError):
    """Everything that is wrong with a config: `problems` in the order of the files, the command line last."""

    def __init__(self, problems: Iterable[Problem]):
        # A rule and a type can say the same about the same place.
        unique = dict.fromkeys(problems)
        self.problems = sorted(unique, key=lambda p: (bool(p.origin.override), p.origin.file, p.origin.line))
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"{count} in the config\n\n" + "\n".join(map(str, self.problems)))


def shorten(text: str) -> str:
    """Return one line of at most WIDTH characters, without control characters."""
    line = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def words(items: Iterable[object], last: str = "or") -> str:
    """Return a list as in a sentence: a, b or c."""
    *head, tail = [str(item) for item in items]
    return f"{', '.join(head)} {last} {tail}" if head else tail


def as_yaml(value: Any) -> str:
    """Return a default or another plain value as YAML shows it."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(as_yaml, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------------------- what is allowed
def allowed(key: str) -> str:
    """Return what the value of a dotted key must be, in words that follow "must be"."""
    if key in SECTIONS:
        return f"a section with the keys {words(SECTIONS[key], 'and')}"
    kind, metadata, null = VALUES[key].annotation, VALUES[key].metadata, ""
    if type(None) in get_args(kind):
        kind, null = next(part for part in get_args(kind) if part is not type(None)), ", or null"
        metadata = getattr(kind, "__metadata__", ())
    return (metadata[-1].words if metadata else words(get_args(kind))) + null


def _parts(kind: Any) -> list[Any]:
    """Return a type and all the types it is made of."""
    below = [] if get_origin(kind) is Literal else get_args(kind)
    return [kind, *(part for inner in below for part in _parts(inner))]


def _wrong(key: str, value: Any) -> str:
    text = f"must be {allowed(key)}"
    if key in SECTIONS:
        return text
    field = VALUES[key]
    parts = _parts(field.annotation)
    if isinstance(value, str):
        choices = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
        near = get_close_matches(value.lower(), choices, 1)
        # A word that differs only in its number is no typing error: resnet101 does not mean resnet50.
        if near and re.sub(r"\d", "", near[0]) != re.sub(r"\d", "", value):
            return f"{text}; did you mean {near[0]}?"
        if str not in parts and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.I):
            return f"{text}; without the quotes it is a number"
    elif isinstance(value, int | float) and str in parts:
        return f"{text}; in quotes it is text"
    elif value is None and not field.is_required():
        return f"{text}; without the line it is the default, {as_yaml(field.default)}"
    return text


def _missing(key: str) -> str:
    if key not in SECTIONS:
        return f"is missing; it must be {allowed(key)}"
    required = [f"{key}.{name}" for name, field in SECTIONS[key].items() if field.is_required()]
    return f"the section is missing; at least {words(required, 'and')} must be written"


def _unknown(section: str, name: str) -> tuple[str, str]:
    """Return what to say about a key that the section does not have, and the key that was probably meant or ""."""
    if not section and name == "base":
        return "base is written at the top of a config file, not on the command line", ""
    if "." in name and (name in VALUES or name in SECTIONS):
        above, _, leaf = name.rpartition(".")
        return f"a dot is for the command line; in a file write {leaf}: below {above}:", name
    if elsewhere := sorted(key for key in VALUES if key.endswith(f".{name}")):
        return f"there is no such key here; {name} is {words(elsewhere)}", elsewhere[0]
    if f"{section}.{name}" in REMOVED:
        return (
            f"there is no such key any more: this version has only {REMOVED[f'{section}.{name}']}. Remove the line",
            "",
        )
    if name in ANCESTOR:
        return f"there is no such key; what facebookresearch/suncet calls {name} is {ANCESTOR[name]}", ""
    prefix = f"{section}." if section else ""
    known = {key: f"{prefix}{key}" for key in [*SECTIONS[section], *([] if section else ["base"])]}
    leaves = {key.rpartition(".")[2]: key for key in sorted(VALUES)}
    for names, similarity in ((known, 0.6), (leaves, 0.75)):
        if near := get_close_matches(name.lower(), names, 1, similarity):
            meant = names[near[0]]
            return f"there is no such {'key' if '.' in meant else 'section'}; did you mean {meant}?", meant
    if section:
        return f"there is no such key; {section} has {words(known, 'and')}", ""
    return f"there is no such section; the sections are {words(known, 'and')}", ""


# ------------------------------------------------------------------------------------------------- pydantic's errors
def field_problems(error: ValidationError, values: dict[str, Any]) -> tuple[list[Problem], set[str]]:
    """Return a problem for each key of `values` that is unknown, missing or not allowed, and the keys that were meant
    by unknown ones, of which nothing more should be said.
    """
    problems: dict[str, Problem] = {}
    meant: set[str] = set()
    missing: list[str] = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        loc = [str(part) for part in item["loc"]]
        section, name, value = "", "", values
        for part in loc:
            section, name = f"{section}.{name}".strip("."), part
            value = value.get(part) if isinstance(value, dict) else None
            if f"{section}.{name}".strip(".") not in SECTIONS or name not in SECTIONS[section]:
                break
        key = f"{section}.{name}".strip(".")
        if name not in SECTIONS[section]:
            text, suggestion = _unknown(section, name)
            problems[key] = Problem(key, text)
            meant |= {suggestion} - {""}
        elif item["type"] == "missing" and name == loc[-1]:
            missing.append(key)
        else:
            problems.setdefault(key, Problem(key, _wrong(key, value)))
    # A misspelled key is one mistake, not two: its right spelling is not reported as missing as well.
    problems |= {key: Problem(key, _missing(key), show_value=False) for key in missing if key not in meant}
    return list(problems.values()), meant
