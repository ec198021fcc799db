"""Turns what pydantic found into what a person can act on: the key, what it may be, and for an unknown key
the key that was probably meant - the nearest by spelling, its real section, or its name here for users of
the authors' code.
"""

from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from fastsuncet.config.problems import Problem, words
from fastsuncet.config.schema import Sections, section_of
from fastsuncet.config.types import Allowed

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


def sections() -> dict[str, dict[str, Any]]:
    """Dotted section -> its fields by name; "" is the top level."""
    found: dict[str, dict[str, Any]] = {}

    def walk(name: str, model: Any) -> None:
        found[name] = dict(model.model_fields)
        for key, field in model.model_fields.items():
            below = section_of(field)
            if below:
                walk(f"{name}.{key}" if name else key, below)

    walk("", Sections)
    return found


SECTIONS = sections()
KEYS = {f"{name}.{key}" if name else key for name, fields in SECTIONS.items() for key in fields}
VALUES = sorted(KEYS - set(SECTIONS))  # every dotted key that holds a value and not a section


def field_of(key: str) -> Any:
    """The pydantic field of a dotted key."""
    section, _, name = key.rpartition(".")
    return SECTIONS[section][name]


def allowed(key: str) -> str:
    """What the value of a dotted key may be, in words."""
    field = field_of(key)
    if key in SECTIONS:
        return f"a section with the keys {words(SECTIONS[key], 'and')}"
    own = next((item.text for item in field.metadata if isinstance(item, Allowed)), None)
    text = own or _in_words(field.annotation)
    return text + (", or null" if type(None) in get_args(field.annotation) else "")


def _in_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return words(get_args(annotation))
    for part in get_args(annotation):
        if isinstance(part, Allowed):
            return part.text
        if part is not type(None) and (text := _in_words(part)):
            return text
    return ""


def choices(key: str) -> list[str]:
    """The words a key can be, empty where it is no choice."""
    annotation = field_of(key).annotation
    parts = [annotation, *get_args(annotation)]
    return [word for part in parts if get_origin(part) is Literal for word in get_args(part)]


def field_problems(error: ValidationError, values: dict[str, Any]) -> tuple[list[Problem], set[str]]:
    """One problem for each key of `values` that is unknown, missing, or not what it may be; and the keys
    meant by those that are unknown, of which nothing more should be said.
    """
    problems: dict[str, Problem] = {}
    meant: set[str] = set()
    missing: list[str] = []
    for item in error.errors(include_url=False, include_context=False):
        section, name, known = _locate(item["loc"])
        key = f"{section}.{name}" if section else name
        if not known:
            text, suggestion = _unknown(section, name)
            meant.add(suggestion)
            problems[key] = Problem(key, text)
        elif item["type"] == "missing":
            missing.append(key)
        else:
            problems.setdefault(key, Problem(key, _wrong(key, _value(values, key))))
    for key in missing:
        # A misspelt key is one mistake, not two: its right spelling is not reported as missing as well.
        if key not in meant:
            problems[key] = Problem(key, _missing(key), show_value=False)
    return list(problems.values()), meant - {""}


def _locate(loc: tuple[int | str, ...]) -> tuple[str, str, bool]:
    """(section, key in it, whether the schema has it). What lies inside a value (a list, a union) is cut
    off.
    """
    section, name = "", str(loc[0])
    for part in loc[1:]:
        key = f"{section}.{name}" if section else name
        if key not in SECTIONS:
            break
        section, name = key, str(part)
    return section, name, name in SECTIONS[section]


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
    near = get_close_matches(str(value).lower(), choices(key), 1) if isinstance(value, str) else []
    if near:
        text += f"; did you mean {near[0]}?"
    elif isinstance(value, str) and _reads_as_number(value):
        text += "; without the quotes it is a number"
    elif value is None and key not in SECTIONS and not field_of(key).is_required():
        text += "; without the line it is the default, " + _plain(field_of(key).default)
    elif isinstance(value, int | float) and field_of(key).annotation in (str, str | None):
        text += "; in quotes it is text"
    return text


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_plain(item) for item in value) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _unknown(section: str, name: str) -> tuple[str, str]:
    """(what to say about a key the section does not have, the dotted key that was probably meant or "")."""
    known = list(SECTIONS[section]) if section else [*SECTIONS[""], "base"]
    if not section and name == "base":
        return "base is written at the top of a config file, not on the command line", ""
    elsewhere = [full for full in VALUES if full.rpartition(".")[2] == name]
    near = get_close_matches(name.lower(), known, 1)
    prefix = f"{section}." if section else ""
    if name in KEYS and "." in name:
        above, _, leaf = name.rpartition(".")
        return f"a dot is for the command line; in a file write {leaf}: below {above}:", name
    if elsewhere:
        return f"there is no such key here; {name} is {words(elsewhere)}", elsewhere[0]
    if near:
        return (
            f"there is no such {'key' if section else 'section'}; did you mean {prefix}{near[0]}?",
            prefix + near[0],
        )
    if name in ANCESTOR:
        return f"there is no such key; what facebookresearch/suncet calls {name} is {ANCESTOR[name]}", ""
    far = get_close_matches(name.lower(), [full.rpartition(".")[2] for full in VALUES], 1, 0.75)
    if far:
        full = next(full for full in VALUES if full.rpartition(".")[2] == far[0])
        return f"there is no such key; did you mean {full}?", full
    where = f"{section} has" if section else "the sections are"
    return f"there is no such {'key' if section else 'section'}; {where} {words(known, 'and')}", ""
