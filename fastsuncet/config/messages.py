"""Turns what pydantic found into what a person can act on: the key, what it may be, and for an unknown key
the key that was probably meant - by its spelling, in its right section, or by its name here for users of
the authors' code.
"""

import re
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from fastsuncet.config.keys import KEYS, SECTIONS, VALUES, allowed, choices, field_of, is_text
from fastsuncet.config.problems import Problem, words

# Keys of facebookresearch/suncet (both releases) whose name or meaning is another one here.
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


def field_problems(error: ValidationError, values: dict[str, Any]) -> tuple[list[Problem], set[str]]:
    """One problem for each key of `values` that is unknown, missing, or not what it may be; and the keys
    meant by those that are unknown, of which nothing more should be said.
    """
    problems: dict[str, Problem] = {}
    meant: set[str] = set()
    missing: list[str] = []
    for item in error.errors(include_url=False, include_context=False):
        section, name, inside = _locate(item["loc"])
        key = f"{section}.{name}" if section else name
        if name not in SECTIONS[section]:
            text, suggestion = _unknown(section, name)
            meant.add(suggestion)
            problems[key] = Problem(key, text)
        elif item["type"] == "missing" and not inside:
            missing.append(key)
        else:
            problems.setdefault(key, Problem(key, _wrong(key, _value(values, key))))
    for key in missing:
        # A misspelt key is one mistake, not two: its right spelling is not reported as missing as well.
        if key not in meant:
            problems[key] = Problem(key, _missing(key), show_value=False)
    return list(problems.values()), meant - {""}


def _locate(loc: tuple[int | str, ...]) -> tuple[str, str, bool]:
    """(section, name in it, whether the fault lies inside the value of that key: in a list, a {per_rank:
    ...}).
    """
    section, name = "", str(loc[0])
    for part in loc[1:]:
        key = f"{section}.{name}" if section else name
        if key not in SECTIONS:
            return section, name, True
        section, name = key, str(part)
    return section, name, False


def _value(values: Any, key: str) -> Any:
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def _missing(key: str) -> str:
    if key not in SECTIONS:
        return f"is missing; it must be {allowed(key)}"
    required = [f"{key}.{name}" for name, field in SECTIONS[key].items() if field.is_required()]
    return f"the section is missing; at least {words(required, 'and')} must be written"


def _wrong(key: str, value: Any) -> str:
    text = f"must be {allowed(key)}"
    if isinstance(value, str):
        near = get_close_matches(value.lower(), choices(key), 1) if key not in SECTIONS else []
        # Another number is no slip of the finger: resnet101 is not meant to be resnet50.
        if near and re.sub(r"\d", "", near[0]) != re.sub(r"\d", "", value):
            return f"{text}; did you mean {near[0]}?"
        if _reads_as_number(value) and not is_text(key):
            return f"{text}; without the quotes it is a number"
    elif isinstance(value, int | float) and is_text(key):
        return f"{text}; in quotes it is text"
    elif value is None and key not in SECTIONS and not field_of(key).is_required():
        return f"{text}; without the line it is the default, {_plain(field_of(key).default)}"
    return text


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown(section: str, name: str) -> tuple[str, str]:
    """(what to say about a key the section does not have, the dotted key that was probably meant or "")."""
    kind, prefix = ("key", f"{section}.") if section else ("section", "")
    known = list(SECTIONS[section]) if section else [*SECTIONS[""], "base"]
    if not section and name == "base":
        return "base is written at the top of a config file, not on the command line", ""
    if "." in name and name in KEYS:
        above, _, leaf = name.rpartition(".")
        return f"a dot is for the command line; in a file write {leaf}: below {above}:", name
    if elsewhere := [key for key in VALUES if key.endswith(f".{name}")]:
        return f"there is no such key here; {name} is {words(elsewhere)}", elsewhere[0]
    if name in ANCESTOR:
        return f"there is no such key; what facebookresearch/suncet calls {name} is {ANCESTOR[name]}", ""
    if near := get_close_matches(name.lower(), known, 1):
        return f"there is no such {kind}; did you mean {prefix}{near[0]}?", prefix + near[0]
    leaves = {key.rpartition(".")[2]: key for key in VALUES}
    if far := get_close_matches(name.lower(), leaves, 1, 0.75):
        return f"there is no such key; did you mean {leaves[far[0]]}?", leaves[far[0]]
    has = f"{section} has" if section else "the sections are"
    return f"there is no such {kind}; {has} {words(known, 'and')}", ""
