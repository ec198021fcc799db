"""What a key means and what is allowed, by the schema, and what to say about a key that is wrong or missing."""

from dataclasses import astuple
from difflib import get_close_matches
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError

from fastsuncet.config.problems import Problem, words
from fastsuncet.config.reader import Document, as_yaml
from fastsuncet.config.schema import CONFIG, DEFAULTS, Schema, Sections, flat
from fastsuncet.errors import ConfigError
from pipelines.sampling.augmentation import Allowed

# Keys of facebookresearch/suncet (both releases) that have another name here.
ANCESTOR = {
    "supervised_batch_size": "criterion.supervised_imgs_per_class, counted over all processes",
    "color_jitter": "data.augmentation.strength",
    "color_jitter_strength": "data.augmentation.strength",
    "normalize": "data.augmentation.mean and .std (the authors trained without)",
    "dataset": "data.kind",
    "data_seed": "data.split.seed",
    "root_path": "data.root",
    "image_folder": "data.root, with data.train and data.validation below it",
    "subset_path": "data.split.file",
    "unlabeled_frac": "data.split.fraction, which is the labeled share",
    "model_name": "model.name",
    "output_dim": "model.output",
    "use_fp16": "meta.precision: fp16 (or bf16, which needs no loss scaling)",
    "load_checkpoint": "not needed: the same command continues from the newest checkpoint",
}


def field_problems(error: ValidationError, document: Document) -> list[Problem]:
    """Return a problem for each key of the document that is unknown, missing or not allowed."""
    schema = document.schema
    problems: dict[str, Problem] = {}
    missing: list[str] = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        section, name, rest = "", "", [str(part) for part in item["loc"]]
        while rest and (key := f"{section}.{name}".lstrip(".")) in schema.sections:
            section, name = key, rest.pop(0)
        key = f"{section}.{name}".lstrip(".")
        if item["type"] == "json_invalid":  # the name of a folder or a file is bytes
            for key, text in flat(document.values).items():
                if str(text) != str(text).encode(errors="replace").decode():
                    fix = "is not UTF-8, as a config is: rename that folder or file"
                    problems[key] = Problem(key, f"{text} {fix}")
        elif name not in schema.sections[section]:
            problems[key] = _unknown(schema, section, name)
        elif item["type"] == "missing" and not rest:
            missing.append(key)
        else:
            text = f"must be {allowed(schema, key)}"
            # A line below the key is named where it has one, as in a mapping of any keys.
            while rest and f"{key}.{rest[0]}" in document.origins:
                key = f"{key}.{rest.pop(0)}"
            problems.setdefault(key, Problem(key, text))
    # A misspelled key is one mistake, not two: its right spelling is not reported as missing as well.
    meant = {problem.meant for problem in problems.values()}
    return [*problems.values(), *(Problem(key, _missing(schema, key)) for key in missing if key not in meant)]


def allowed(schema: Schema, key: str) -> str:
    """Return what the value of a dotted key must be, in words that follow "must be"."""
    section, _, name = key.rpartition(".")
    field = schema.sections[section][name]
    kind, metadata, null = field.annotation, field.metadata, ""
    if type(None) in get_args(kind):
        kind, null = next(part for part in get_args(kind) if part is not type(None)), ", or null"
        kind, metadata = getattr(kind, "__origin__", kind), getattr(kind, "__metadata__", ())
    if metadata and isinstance(metadata[-1], Allowed):
        return metadata[-1].words + null
    if key in schema.sections:
        return f"a section with the keys {words(schema.sections[key], 'and')}"
    if not metadata:
        return words(get_args(kind)) + null
    said = {Ge: ", {:,} or more", Gt: " above {:,}", Le: " up to {:,}", Lt: " below {:,}"}
    bounds = " and".join(said[type(bound)].format(*astuple(bound)) for bound in metadata)
    return ("a whole number" if kind is int else "a number") + bounds + null


def _missing(schema: Schema, key: str) -> str:
    fields = schema.sections.get(key, {})
    if required := [f"{key}.{name}" for name, field in fields.items() if field.is_required()]:
        return f"the section is missing; at least {words(required, 'and')} must be written"
    return f"is missing; it must be {allowed(schema, key)}"


def _unknown(schema: Schema, section: str, name: str) -> Problem:
    """Return the problem of a key that the section does not have."""
    here = f"{section}." if section else ""
    known = {key: f"{here}{key}" for key in [*schema.sections[section], *([] if section else ["base"])]}
    text = meant = ""
    if "." in name and (name in schema.values or name in schema.sections):
        above, _, leaf = name.rpartition(".")
        text, meant = f"a dot is for the command line; in a file write {leaf}: below {above}:", name
    elif name in schema.sections[""]:  # a level too deep
        text, meant = f"there is no such key here; {name} is a section of its own", name
    elif not section and name == "base":
        text = "base is written at the top of a config file, not on the command line"
    elif elsewhere := [key for key in schema.values if key.endswith(f".{name}")]:
        text, meant = f"there is no such key here; {name} is {words(elsewhere)}", elsewhere[0]
    elif name in ANCESTOR:
        text = f"there is no such key; what facebookresearch/suncet calls {name} is {ANCESTOR[name]}"
    elif meant := nearest_key(schema, name, known):
        text = f"there is no such {'section' if meant in schema.sections else 'key'}; did you mean {meant}?"
    elif section:
        text = f"there is no such key; {section} has {words(known, 'and')}"
    else:
        text = f"there is no such section; the sections are {words(known, 'and')}"
    return Problem(here + name, text, meant=meant)


def nearest_key(schema: Schema, name: str, here: dict[str, str]) -> str:
    """Return the dotted key spelled most like `name`: one of `here` (name -> dotted), any other, or ""."""
    leaves = {key.rpartition(".")[2]: key for key in sorted(schema.values)}
    for names, similarity in ((here, 0.6), (leaves, 0.85)):
        if near := get_close_matches(name.lower(), names, 1, similarity):
            return names[near[0]]
    return ""


def describe(key: str) -> list[str]:
    """Return the lines about a dotted key, the keys of a section, or the sections for "".

    Raises ConfigError for an unknown key, with the nearest.
    """
    if key in CONFIG.values:
        default = as_yaml(DEFAULTS[key]) if key in DEFAULTS else "none: it must be written"
        facts = {"meaning": meaning(key), "default": default, "allowed": allowed(CONFIG, key)}
        return [key, *(f"  {name:<8} {fact}" for name, fact in facts.items())]
    if key not in CONFIG.sections:
        section, _, name = key.rpartition(".")
        section = section if section in CONFIG.sections else ""
        raise ConfigError(f"{key}: {_unknown(CONFIG, section, name).text}")
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
