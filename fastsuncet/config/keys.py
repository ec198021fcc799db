"""The schema asked by dotted key ("data.split.file"): which keys there are, and in words what each may be."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from fastsuncet.config.problems import words
from fastsuncet.config.schema import Sections, section_of
from pipelines.sampling.augmentation import Allowed


def _sections(name: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    yield name, dict(model.__pydantic_fields__)
    for key, field in model.__pydantic_fields__.items():
        if below := section_of(field):
            yield from _sections(f"{name}.{key}" if name else key, below)


# Dotted section -> its fields by name; "" is the top level.
SECTIONS: dict[str, dict[str, Any]] = dict(_sections("", Sections))
KEYS = {f"{name}.{key}" if name else key for name, fields in SECTIONS.items() for key in fields}
VALUES = sorted(KEYS - set(SECTIONS))  # the keys that hold a value and not a section


def field_of(key: str) -> Any:
    """The pydantic field of a key."""
    section, _, name = key.rpartition(".")
    return SECTIONS[section][name]


def allowed(key: str) -> str:
    """What the value of a key may be, to follow "must be"."""
    if key in SECTIONS:
        return f"a section with the keys {words(SECTIONS[key], 'and')}"
    field = field_of(key)
    own = [item.words for item in field.metadata if isinstance(item, Allowed)]
    text = own[-1] if own else _in_words(field.annotation)
    return text + (", or null" if type(None) in get_args(field.annotation) else "")


def _in_words(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return words(get_args(annotation))
    parts = [part for part in get_args(annotation) if part is not type(None)]
    own = [part.words for part in parts if isinstance(part, Allowed)]
    # Where a type is made from another one, its own words come last.
    return own[-1] if own else next((text for part in parts if (text := _in_words(part))), "")


def choices(key: str) -> list[str]:
    """The words a key can be; none where it is no choice between words."""
    return [
        word for part in _parts(field_of(key).annotation) for word in get_args(part) if isinstance(word, str)
    ]


def is_text(key: str) -> bool:
    """Whether a key can hold any text."""
    return key not in SECTIONS and str in _parts(field_of(key).annotation)


def _parts(annotation: Any) -> list[Any]:
    """An annotation and all it is made of."""
    below = [] if get_origin(annotation) is Literal else get_args(annotation)
    return [annotation, *(part for inner in below for part in _parts(inner))]
