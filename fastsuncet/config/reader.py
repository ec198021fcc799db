"""Reads a config's YAML files and overrides, and remembers the line of every value.

The YAML is PyYAML's, restricted, because a config often comes from someone else:
  - no tags (`!!python/...`)
  - no anchors and aliases: ten lines of them can expand to gigabytes; `base:` shares settings instead
  - no key twice
  - at most 1 MB, 5,000 values, 16 levels
Some values have another meaning than in YAML 1.1: `1e-4` is a number and not text; `1:30` and `2026-11-21` are text
and not a number in base 60 or a date.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fastsuncet.config.messages import REMOVED, ConfigErrors, Origin, Problem, shorten
from fastsuncet.config.schema import SECTIONS, VALUES

MAX_BYTES = 1_000_000
MAX_VALUES = 5_000
MAX_DEPTH = 16

Key = tuple[str, ...]  # ("data", "split", "file")

CORE = "tag:yaml.org,2002:"
BOOLEANS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}

# Words of PyYAML's messages -> what to do about them.
HINTS = {
    "mapping values are not allowed here": "is this line indented like its neighbors, has the line above a colon?",
    "cannot start any token": "YAML is indented with spaces, never tabs",
    "could not find expected ':'": "is a colon missing?",
    "expected <block end>": "is this line indented like its neighbors?",
    "expected ',' or": "is a bracket or a comma missing?",
    "expected a single document": "a config is one document: remove the `---`",
    "while scanning a quoted scalar": "is a closing quote missing?",
}


# -------------------------------------------------------------------------------------------------------------- YAML
class _Loader(yaml.SafeLoader):
    """Composes a graph of nodes. PyYAML never constructs an object here."""

    yaml_implicit_resolvers: ClassVar[dict] = {}  # those below and not YAML 1.1's
    depth = 0
    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        self.values += 1
        text = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            text = "anchors and aliases (&name, *name) are not read; `base: other.yaml` shares settings"
        elif self.values > MAX_VALUES:
            text = f"more than {MAX_VALUES:,} values: this is not a config"
        elif self.depth == MAX_DEPTH:
            text = f"more than {MAX_DEPTH} levels deep: this is not a config"
        if text:
            raise yaml.MarkedYAMLError(problem=text, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


# Each pattern takes time linear in the length of the text: no two of its parts can match the same characters.
for _tag, _pattern, _first in (
    ("bool", "(?i:yes|no|true|false|on|off)", "yYnNtTfFoO"),
    ("null", "(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("int", "[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?i:inf)|\.(?i:nan)", "-+."),
):
    _Loader.add_implicit_resolver(CORE + _tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


@dataclass
class Document:
    """Values in plain types, the origin of each key, and the problems found: of one file or override, or of several."""

    file: str = ""
    values: Any = None
    origins: dict[Key, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def parse(text: str, file: str = "", override: str = "") -> Document:
    """Return the document that `text` is. Raises ConfigErrors where it is not YAML."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"not valid YAML: the character U+{error.character:04X} is not allowed in it"
        raise ConfigErrors([Problem("", why, Origin(file, line, "", override))]) from None
    except yaml.MarkedYAMLError as error:
        line, why = _syntax(error, text)
        raise ConfigErrors([Problem("", why, Origin(file, line, "", override))]) from None
    builder = _Builder(text, file, override)
    values = None if node is None else builder.build(node, ())
    return Document(file, values, builder.origins, builder.problems)


def _syntax(error: Any, source: str) -> tuple[int, str]:
    """Return the line of a syntax error, and what to do about it."""
    mark, context, text = error.problem_mark, error.context or "", error.problem
    if error.context_mark is not None and mark.index >= len(source.rstrip()):
        mark = error.context_mark  # what is open to the end of the file is reported where it was opened
    if type(error) is not yaml.MarkedYAMLError:  # PyYAML's message and not ours
        hint = next((hint for words, hint in HINTS.items() if words in f"{context} {text}"), None)
        text = f"not valid YAML: {text}" + (f" ({hint})" if hint else "")
    return mark.line + 1, text


class _Builder:
    """Builds plain values from nodes, and gathers origins and problems."""

    def __init__(self, text: str, file: str, override: str):
        self.text, self.file, self.override = text, file, override
        self.origins: dict[Key, Origin] = {}
        self.problems: list[Problem] = []

    def origin(self, node: yaml.Node, value: yaml.Node | None = None) -> Origin:
        """Return the line of `node`, with the text of `value` as it was written."""
        shown: Any = value or node
        written = self.text[shown.start_mark.index : shown.end_mark.index].strip() or "null"
        if isinstance(shown, yaml.MappingNode) and not shown.flow_style:
            written = ""  # a section of several lines is not repeated
        return Origin(self.file, node.start_mark.line + 1, written, self.override)

    def build(self, node: Any, path: Key) -> Any:
        kind = node.tag.removeprefix(CORE)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, path) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and kind in ("str", "int", "float", "bool", "null"):
            try:
                return _scalar(kind, node.value)
            except (
                ValueError,
                KeyError,
            ):  # `!!int abc`, a number of more than 4,300 digits, half a character
                kind = f"{kind} {node.value}"
        tag = "!!" + kind if node.tag.startswith(CORE) else node.tag
        text = (
            f"{shorten(tag)} is not read: a config holds text, numbers, true, false, null, lists and sections"
        )
        self.problems.append(Problem(".".join(path), text, self.origin(node), show_value=False))
        return None

    def mapping(self, node: yaml.MappingNode, path: Key) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            origin = self.origin(key_node, value_node)
            if not isinstance(key_node, yaml.ScalarNode):
                text = "a key is a plain word, not a list or a section"
                self.problems.append(Problem(".".join(path), text, origin, show_value=False))
                continue
            key = (*path, key_node.value)
            if key_node.value in values:
                text = f"written twice: first on line {self.origins[key].line}. Keep one"
                self.problems.append(Problem(".".join(key), text, origin))
                continue
            self.origins[key] = origin
            values[key_node.value] = self.build(value_node, key)
        return values


def _scalar(kind: str, text: str) -> Any:
    if kind == "str":
        text.encode()  # "\ud800" is half a character: raises ValueError
        return text
    if kind == "null":
        return None
    if kind == "bool":
        return BOOLEANS[text.lower()]
    number = text.replace("_", "").lower()
    return int(number) if kind == "int" else float(number.replace(".inf", "inf").replace(".nan", "nan"))


def read_file(path: Path, shown: str, origin: Origin | None = None) -> Document:
    """Parse the file at `path`, called `shown` in messages. `origin` is the line that named it, if a line did."""

    def failed(text: str) -> ConfigErrors:
        return ConfigErrors([Problem("base" if origin else "", text, origin or Origin(shown))])

    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)  # never more: the file can be a device without an end
    except FileNotFoundError:
        raise failed(_not_found(path, shown)) from None
    except IsADirectoryError:
        raise failed(f"{shown} is a folder; a config is a YAML file in it") from None
    except OSError as error:
        raise failed(f"{shown} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise failed(f"{shown} is larger than {MAX_BYTES // 1_000_000} MB: this is not a config")
    try:
        return parse(raw.decode("utf-8"), shown)
    except UnicodeDecodeError as error:
        at = Origin(shown, raw[: error.start].count(b"\n") + 1)
        raise ConfigErrors([Problem("", "not UTF-8 text: save the file as UTF-8", at)]) from None


def _not_found(path: Path, shown: str) -> str:
    folder = Path(shown).parent
    try:
        there = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    except OSError:
        return f"no such file: there is no folder {folder}"
    if near := get_close_matches(path.name, there, 1):
        return f"no such file; did you mean {folder / near[0]}?"
    return "no such file" + (f"; {folder} holds {', '.join(there[:8])}" if there else "")


# ---------------------------------------------------------------------------------------- a file, its base, overrides
def read_config(shown: str, overrides: Sequence[str]) -> Document:
    """Read a file and its base and lay `overrides` on them. The last value of a key counts.

    Raises ConfigErrors where nothing can be read: no file, no YAML, no sections.
    """
    path = Path(shown).expanduser()
    document = _sections(read_file(path, shown))
    base, at = document.values.pop("base", None), document.origins.pop(("base",), None)
    if at is not None:
        document = _laid_on(_read_base(base, at, document, path), document)
    for argument in overrides:
        document = _laid_on(document, _read_override(argument))
    logging = document.values.get("logging", {})
    if isinstance(logging, dict) and logging.get("write_tag") is None:
        origin = Origin(shown, written=f"{path.stem} (from the name of the file)")
        name = Document(shown, {"logging": {"write_tag": path.stem}}, {("logging", "write_tag"): origin})
        document = _laid_on(document, name)
    return document


def _laid_on(base: Document, over: Document) -> Document:
    values = merged(base.values, over.values)
    return Document(over.file, values, base.origins | over.origins, base.problems + over.problems)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `over` laid on `base`: sections are merged key by key at every level, other values are replaced."""
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def without_removed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` without the removed keys that have the value of all runs now."""
    kept = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
    for key, only in REMOVED.items():
        section, _, name = key.rpartition(".")
        if isinstance(kept.get(section), dict) and kept[section].get(name) == only:
            del kept[section][name]
    return kept


def _read_base(base: Any, at: Origin, document: Document, path: Path) -> Document:
    """Read the file that `base` names; `at` is the line of the name in `document`."""
    text = "must be the name of another config file, such as base.yaml"
    if isinstance(base, str) and base:
        base = os.path.expanduser(base)
        # normpath and not resolve(): messages name the file as its reader would type it.
        shown = os.path.normpath(os.path.join(os.path.dirname(document.file), base))
        found = _sections(read_file(path.parent / base, shown, at))
        if "base" not in found.values:
            return found
        text = f"{shown} has a base itself, {found.values['base']}; only one level is allowed"
    raise ConfigErrors([*document.problems, Problem("base", text, at)])


def _sections(document: Document) -> Document:
    """Return the document with {} for a section with nothing below it (`logging:`)."""
    if document.values is None:
        text = "the file is empty; a config has at least the sections data, criterion and optimization"
        raise ConfigErrors([Problem("", text, Origin(document.file))])
    if not isinstance(document.values, dict):
        text = "this is not a config: it has sections such as data: with indented lines key: value"
        raise ConfigErrors([Problem("", text, Origin(document.file, 1))])

    def filled(values: dict[str, Any], above: str) -> dict[str, Any]:
        return {
            name: filled(value or {}, f"{above}{name}.")
            if f"{above}{name}" in SECTIONS and isinstance(value, dict | None)
            else value
            for name, value in values.items()
        }

    return replace(document, values=filled(document.values, ""))


def _read_override(argument: str) -> Document:
    """Parse `section.key=value`; the value is YAML: 1e-4, true, null, [0.2, 1.0], {per_rank: 44}."""
    name, equals, text = argument.partition("=")
    key, origin = tuple(name.split(".")), Origin(override=argument)
    if not equals or not all(part and part == part.strip() for part in key):
        what = "an override is written section.key=value, without spaces around the ="
        return Document(values={}, problems=[Problem(name, what, origin)])
    try:
        over = parse(text, override=argument)
    except ConfigErrors as error:
        return Document(values={}, problems=error.problems)
    if over.problems:
        problems = [
            replace(each, key=f"{name}.{each.key}".strip("."), origin=origin) for each in over.problems
        ]
        return Document(values={}, problems=problems)
    values: Any = {} if over.values is None and name in SECTIONS else over.values
    for part in reversed(key):
        values = {part: values}
    # Sections above the key keep their line: the override is not to blame for what is missing there. A value above
    # it does not: `...batch_size.per_rank=44` replaces all of it.
    above = [key[:length] for length in range(1, len(key)) if ".".join(key[:length]) in VALUES]
    keys = [*above, key, *((*key, *below) for below in over.origins)]
    return Document(values=values, origins=dict.fromkeys(keys, origin))
