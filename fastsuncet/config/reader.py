"""Reads the YAML of a config: PyYAML's safe loader made narrower, and every value with the line it stands on.

Narrower, because a config comes from someone else as often as not:
  - no tags (`!!python/...`)
  - no anchors and aliases: ten lines of them make a bomb, and `base:` does their honest work
  - no second value for a key in silence
  - at most 1 MB, 5,000 values, 16 levels: a config is a page
And what YAML 1.1 reads in surprising ways is read the way it is meant: `1e-4` is a number and not text,
`1:30` and `2026-11-21` are text and not a number in base 60 or a date.
"""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fastsuncet.config.problems import ConfigErrors, Origin, Problem, shorten

MAX_BYTES = 1_000_000
MAX_VALUES = 5_000
MAX_DEPTH = 16

Key = tuple[str, ...]  # ("data", "split", "file")

CORE = "tag:yaml.org,2002:"
BOOLEANS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}

# What a person can do about the scanner's own words.
HINTS = {
    "mapping values are not allowed here": "is this line indented like its neighbours, has the line above a colon?",
    "cannot start any token": "YAML is indented with spaces, never tabs",
    "could not find expected ':'": "is a colon missing?",
    "expected <block end>": "is this line indented like its neighbours?",
    "expected ',' or": "is a bracket or a comma missing?",
    "expected a single document": "a config is one document: remove the `---`",
    "while scanning a quoted scalar": "is a closing quote missing?",
}


class _Loader(yaml.SafeLoader):
    """Composes a node graph and nothing more: no object is ever constructed by PyYAML."""

    yaml_implicit_resolvers: ClassVar[dict] = {}  # not YAML 1.1's: ours, below
    depth = 0
    values = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        self.values += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _refused(
                event, "anchors and aliases (&name, *name) are not read; `base: other.yaml` shares settings"
            )
        if self.values > MAX_VALUES:
            raise _refused(event, f"more than {MAX_VALUES:,} values: this is not a config")
        if self.depth == MAX_DEPTH:
            raise _refused(event, f"more than {MAX_DEPTH} levels deep: this is not a config")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refused(event: yaml.Event, text: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=event.start_mark)


for _tag, _pattern, _first in (
    ("bool", "(?i:yes|no|true|false|on|off)", "yYnNtTfFoO"),
    ("null", "(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("int", "[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?i:inf)|\.(?i:nan)", "-+."),
):
    _Loader.add_implicit_resolver(CORE + _tag, re.compile(f"^(?:{_pattern})$"), list(_first))


class Document:
    """One parsed file or override: `values` in plain types, `origins` of every key in it, and `problems` on
    the way.
    """

    def __init__(self, text: str, file: str = "", override: str = ""):
        self.text, self.file, self.override = text, file, override
        self.values: Any = None
        self.origins: dict[Key, Origin] = {}
        self.problems: list[Problem] = []
        try:
            node = _Loader(text).get_single_node()
        except yaml.YAMLError as error:
            raise ConfigErrors([self._syntax(error)]) from None
        if node is not None:
            self.values = self._build(node, ())

    def _syntax(self, error: yaml.YAMLError) -> Problem:
        if isinstance(error, yaml.reader.ReaderError):
            line = self.text.count("\n", 0, error.position) + 1
            text = f"not valid YAML: the character U+{error.character:04X} is not allowed in it"
            return Problem("", text, Origin(self.file, line, "", self.override))
        mark, context = error.problem_mark, error.context or ""
        if error.context_mark is not None and mark.index >= len(self.text.rstrip()):
            mark = error.context_mark  # what is open to the end of the file is missed where it was opened
        text = error.problem
        if type(error) is not yaml.MarkedYAMLError:  # PyYAML's words and not ours
            hint = next((hint for words, hint in HINTS.items() if words in f"{context} {text}"), None)
            text = f"not valid YAML: {text}" + (f" ({hint})" if hint else "")
        return Problem("", text, Origin(self.file, mark.line + 1, "", self.override))

    def _origin(self, node: yaml.Node, value: yaml.Node | None = None) -> Origin:
        """The line of `node`; the words as they stand in the file are those of `value`."""
        shown = value or node
        written = self.text[shown.start_mark.index : shown.end_mark.index].strip()
        if isinstance(shown, yaml.MappingNode) and not shown.flow_style:
            return Origin(self.file, node.start_mark.line + 1, "", self.override)  # a section is not quoted
        return Origin(self.file, node.start_mark.line + 1, written or "null", self.override)

    def _build(self, node: yaml.Node, path: Key) -> Any:
        kind = node.tag.removeprefix(CORE)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self._build(item, path) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and kind in ("str", "int", "float", "bool", "null"):
            try:
                return self._scalar(kind, node.value)
            except (ValueError, KeyError):
                kind = kind + " " + node.value  # `!!int abc`, or a number of more than 4,300 digits
        tag = "!!" + kind if node.tag.startswith(CORE) else node.tag
        text = (
            f"{shorten(tag)} is not read: a config holds text, numbers, true, false, null, lists and sections"
        )
        self.problems.append(Problem(".".join(path), text, self._origin(node), show_value=False))
        return None

    @staticmethod
    def _scalar(kind: str, text: str) -> Any:
        if kind == "str":
            return text
        if kind == "null":
            return None
        if kind == "bool":
            return BOOLEANS[text.lower()]
        number = text.replace("_", "").lower()
        if kind == "int":
            return int(number)
        return float(number.replace(".inf", "inf").replace(".nan", "nan"))

    def _mapping(self, node: yaml.MappingNode, path: Key) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                text = "a key is a plain word, not a list or a section"
                self.problems.append(Problem(".".join(path), text, self._origin(key_node), show_value=False))
                continue
            name = key_node.value
            key = (*path, name)
            if name in values:
                text = f"written twice: first on line {self.origins[key].line}. Keep one"
                self.problems.append(Problem(".".join(key), text, self._origin(key_node, value_node)))
                continue
            self.origins[key] = self._origin(key_node, value_node)
            values[name] = self._build(value_node, key)
        return values


def read_file(path: Path, shown: str, origin: Origin | None = None) -> Document:
    """Parses the file at `path`, called `shown` in messages. `origin` is the line that asked for it, if a
    line did.
    """

    def fail(text: str) -> ConfigErrors:
        at = origin or Origin(shown)
        return ConfigErrors([Problem("base" if origin else "", text, at)])

    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)  # never more, whatever the file turns out to be
    except FileNotFoundError:
        raise fail(_not_found(path, shown)) from None
    except IsADirectoryError:
        raise fail(f"{shown} is a folder; a config is a YAML file in it") from None
    except OSError as error:
        raise fail(f"{shown} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        raise fail(f"{shown} is larger than {MAX_BYTES // 1_000_000} MB: this is not a config")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        problem = Problem("", "not UTF-8 text: save the file as UTF-8", Origin(shown, line))
        raise ConfigErrors([problem]) from None
    return Document(text, shown)


def _not_found(path: Path, shown: str) -> str:
    try:
        there = sorted(entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml"))
    except OSError:
        return f"no such file: there is no folder {Path(shown).parent}"
    near = get_close_matches(path.name, there, 1)
    if near:
        return f"no such file; did you mean {Path(shown).parent / near[0]}?"
    return "no such file" + (f"; {Path(shown).parent} holds {', '.join(there[:8])}" if there else "")


def read_override(argument: str) -> tuple[Key, Document]:
    """Parses `section.key=value`; the value is YAML: 1e-4, true, null, [0.2, 1.0], {per_rank: 44}."""
    origin = Origin(override=argument)
    name, equals, value = argument.partition("=")
    key = tuple(name.split("."))
    if not equals or not all(part and part == part.strip() for part in key):
        text = "an override is written section.key=value, without spaces around the ="
        raise ConfigErrors([Problem(name, text, origin)])
    document = Document(value, override=argument)
    for problem in document.problems:
        problem_key = ".".join(filter(None, (name, problem.key)))
        raise ConfigErrors([Problem(problem_key, problem.text, origin)])
    return key, document
