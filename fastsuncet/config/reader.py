"""Reads YAML files and overrides, and remembers the line of every value.

The YAML is PyYAML's, restricted, because a config often comes from someone else:
  - no tags (`!!python/...`)
  - no anchors and aliases: ten lines of them can expand to gigabytes; `base:` shares settings instead
  - no key twice
Some values have another meaning than in YAML 1.1: `1e-4` is a number and not text; `1:30` and `2026-11-21` are text
and not a number in base 60 or a date.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fastsuncet.config.problems import COMMAND_LINE, ConfigErrors, Origin, Problem, shorten, words
from fastsuncet.config.schema import CONFIG, INPUTS, Schema, flat, is_table, nested
from fastsuncet.config.shipped import SHIPPED, find_config, shipped

MAX_BYTES = 1_000_000  # of a file: tar shards or weights that were given by mistake are not read whole

CORE = "tag:yaml.org,2002:"
SYNTAX = "Look at the colons, quotes, brackets and the indentation by spaces, here and in the line above"


# -------------------------------------------------------------------------------------------------------------- YAML
class _Loader(yaml.SafeLoader):
    """Composes a graph of nodes. PyYAML never constructs an object here."""

    yaml_implicit_resolvers: ClassVar[dict] = {}  # those below and not YAML 1.1's

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            text = "anchors and aliases (&name, *name) are not read; `base: other.yaml` shares settings"
            raise yaml.MarkedYAMLError(problem=text, problem_mark=event.start_mark)
        return super().compose_node(parent, index)


# Each pattern takes time linear in the length of the text: no two of its parts can match the same characters.
for _tag, _pattern, _first in (
    ("bool", "(?i:yes|no|true|false|on|off)", "yYnNtTfFoO"),
    ("null", "(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("int", "[-+]?[0-9][0-9_]*", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?i:inf)|\.(?i:nan)", "-+."),
):
    _Loader.add_implicit_resolver(CORE + _tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))


class Dumper(yaml.SafeDumper):
    """Writes what `_Loader` reads: one key a line, a list on its line."""

    yaml_implicit_resolvers: ClassVar[dict] = _Loader.yaml_implicit_resolvers


Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence(f"{CORE}seq", value, flow_style=True)
)


def as_yaml(value: Any) -> str:
    """Return a plain value on one line, as an override has it: quoted where it would read as something else."""
    text = yaml.dump([value], Dumper=Dumper, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.strip()[1:-1]


# --------------------------------------------------------------------------------------------------------- documents
@dataclass
class Document:
    """Plain values and the origin of each dotted key: of one file or override, or of several laid on each other."""

    file: str = ""
    schema: Schema = CONFIG
    values: Any = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)

    def lay(self, over: "Document") -> None:
        """Lay `over` on this document: sections are merged key by key, other values are replaced.

        Epochs also replace steps, which would hide them: both are the length of the run.
        """
        self.values, self.origins = _merged(self.values, over.values), self.origins | over.origins
        run = over.values.get("optimization")
        if isinstance(run, dict) and run.get("epochs") is not None and "steps" not in run:
            self.values["optimization"].pop("steps", None)
            self.origins.pop("optimization.steps", None)

    def with_whole_paths(self, folder: str) -> "Document":
        """Make the relative paths of INPUTS whole, as seen from `folder` ("": the working directory); return itself."""
        whole = {}
        for key, path in flat(self.values).items():
            # data.validation is a folder below data.root, unless it is a table.
            kept = (key == "data.validation" and not is_table(path)) or (key, path) == ("model.init", "timm")
            if key in INPUTS and isinstance(path, str) and path and path[0] != "~" and not kept:
                whole[key] = os.path.abspath(os.path.join(folder, path))
        self.values = _merged(self.values, nested(whole))
        return self

    def locate(self, problem: Problem) -> Problem:
        """Return the problem at the line of its key or, where that is not written, of the nearest key above it."""
        key = problem.key
        if key.partition(".")[0] not in self.schema.sections:
            # Of a section that does not exist, an override has only the origin of a key below it.
            key = next((each for each in self.origins if f"{each}.".startswith(f"{key}.")), key)
        while key and key not in self.origins:
            key = key.rpartition(".")[0]
        origin = self.origins.get(key, Origin(self.file))
        return replace(problem, origin=origin if key == problem.key else replace(origin, written=""))

    def build(self, node: Any, key: str) -> Any:
        """Return the plain value of a node of PyYAML's, and note the origins of the keys below `key`."""
        kind = node.tag.removeprefix(CORE)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, key)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, key) for item in node.value]
        if isinstance(node, yaml.ScalarNode):
            try:
                value = _SCALARS[kind](node.value)
                return {} if value is None and key in self.schema.sections else value
            # `!!int abc`, a number of more than 4,300 digits, half a character.
            except (ValueError, KeyError):
                kind = f"{kind} {node.value}"
        tag = shorten("!!" + kind if node.tag.startswith(CORE) else node.tag)
        text = f"{tag} is not read: a config holds text, numbers, true, false, null, lists and sections"
        raise ConfigErrors([Problem(key, text, _origin(node))])

    def _mapping(self, node: yaml.MappingNode, above: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in node.value:
            key, origin = f"{above}.{name.value}".lstrip("."), _origin(name, value)
            if not isinstance(name, yaml.ScalarNode):
                raise ConfigErrors([Problem(above, "a key is a plain word, not a list or a section", origin)])
            if name.value in values:
                first = self.origins[key].line
                text = "written twice" + (f": first on line {first}" if first else "") + ". Keep one"
                raise ConfigErrors([Problem(key, text, origin)])
            self.origins[key] = origin
            values[name.value] = self.build(value, key)
        return values


_SCALARS = {
    "str": lambda text: text.encode().decode(),  # ValueError for "\ud800", half a character
    "null": lambda text: None,
    "bool": lambda text: _Loader.bool_values[text.lower()],
    "int": lambda text: int(text.replace("_", "")),
    "float": lambda text: float(re.sub(r"_|\.(?=inf|nan)", "", text.lower())),
}


def _origin(node: yaml.Node, value: yaml.Node | None = None) -> Origin:
    """Return the line of `node`, with the text of `value` as it was written."""
    shown, mark = value or node, node.start_mark
    written = str(mark.buffer)[shown.start_mark.index : shown.end_mark.index].strip() or "null"
    if isinstance(shown, yaml.MappingNode) and not shown.flow_style:
        written = ""  # a section of several lines is not repeated
    return Origin(mark.name, 0 if mark.name == COMMAND_LINE else mark.line + 1, written)


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        below = result.get(name)
        result[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


@lru_cache(maxsize=64)
def _node(text: str, file: str) -> yaml.Node | None:
    """Compose the graph of `text`. Kept, because a sweep reads the same files for each of its command lines."""
    loader = _Loader(text)
    loader.name = file
    return loader.get_single_node()


def parse(text: str, file: str, schema: Schema = CONFIG, key: str = "") -> Document:
    """Return the document that `text` is, or the value of a dotted key. Raises ConfigErrors for what is not read."""
    try:
        node = _node(text, file)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        why = f"not valid YAML: the character U+{error.character:04X} is not allowed in it"
    except yaml.MarkedYAMLError as error:
        mark: Any = error.problem_mark
        if error.context_mark is not None and mark.index >= len(text.rstrip()):
            mark = error.context_mark  # what is open to the end of the file is reported where it was opened
        line, why = mark.line + 1, str(error.problem)
        if type(error) is not yaml.MarkedYAMLError:  # PyYAML's message and not ours
            why = f"not valid YAML: {' '.join(filter(None, [error.context, why]))}. {SYNTAX}"
    except RecursionError:
        line, why = 1, "not a config: its values are too deeply nested"
    else:
        document = Document(file, schema)
        document.values = {} if node is None else document.build(node, key)
        return document
    origin = Origin(file, 0, text) if file == COMMAND_LINE else Origin(file, line)
    raise ConfigErrors([Problem(key, why, origin)])


def parse_override(argument: str, written: Origin | None = None) -> Document:
    """Return `section.key=value` as a document; the value is YAML: 1e-4, true, null, [0.2, 1.0], {per_rank: 44}.

    `written` is where it was, by default on the command line. Raises ConfigErrors.
    """
    key, equals, text = argument.partition("=")
    origin = written or Origin(COMMAND_LINE, 0, text)
    if not equals or not all(part and part == part.strip() for part in key.split(".")):
        text = "an override is written section.key=value, without spaces around the ="
        raise ConfigErrors([Problem(key, text, origin)])
    document = parse(text or "null", COMMAND_LINE, key=key)
    document.values = nested({key: document.values})
    # `...batch_size.per_rank=44` replaces all of the value. Sections above the key keep their lines: the override is
    # not to blame for what is missing there.
    whole = next((value for value in CONFIG.values if key.startswith(f"{value}.")), key)
    document.origins |= {whole: origin, key: origin}
    if written:
        document.origins = dict.fromkeys(document.origins, written)
    return document


def read_file(shown: str, schema: Schema = CONFIG, origin: Origin | None = None) -> Document:
    """Parse a file, whose path messages show as it is given. `origin` is the line that named it, if a line did.

    Raises ConfigErrors where nothing can be read: no file, no YAML, no keys.
    """
    path = Path(shown)
    origin, key = origin or Origin(shown), "base" if origin else ""
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)  # never more: the file can be a device without an end
        if len(raw) > MAX_BYTES:
            text = f"{shown} is larger than {MAX_BYTES // 1_000_000} MB: this is not a config"
        else:
            document = parse(raw.decode("utf-8"), shown, schema)
            if isinstance(document.values, dict):
                # A config of the package is used from anywhere.
                anywhere = path.resolve().is_relative_to(SHIPPED)
                return document.with_whole_paths("" if anywhere else os.path.dirname(path))
            names = words(schema.sections[""], "and")
            key, text, origin = "", f"must be lines `key: value` with the keys {names}", Origin(shown, 1)
    except FileNotFoundError:
        text = _not_found(path)
    except IsADirectoryError:
        text = f"{shown} is a folder, not a config; "
        if (path / "config.yaml").exists():
            text += f"the config of this run is {os.path.join(shown, 'config.yaml')}"
        else:
            text += f"`fastsuncet init {shown}` writes a config for a folder of images"
    except OSError as error:
        text = f"{shown} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        key, text, origin = "", "not UTF-8 text: save the file as UTF-8", Origin(shown, line)
    raise ConfigErrors([Problem(key, text, origin)])


def _not_found(path: Path) -> str:
    if near := get_close_matches(path.name, sorted(each.name for each in path.parent.glob("*.y*ml")), 1):
        return f"no such file; did you mean {path.with_name(near[0])}?"
    if near := get_close_matches(str(path.with_suffix("")).removeprefix("configs/"), shipped(), 1):
        return f"no such file; did you mean {near[0]}, a config of the package?"
    return "no such file"


def read_config(
    shown: str, overrides: Iterable[str], origins: Mapping[str, Origin]
) -> tuple[Document, list[Problem]]:
    """Return the document of a config, its bases and `overrides`, with a name for the run, and problems of overrides.

    The arguments are those of `load_config`. Raises ConfigErrors as `read_file` does.
    """
    shown, problems = find_config(shown), []
    document = _read_with_base(shown)
    for argument in overrides:
        try:
            document.lay(parse_override(argument, origins.get(argument)).with_whole_paths(""))
        except ConfigErrors as error:  # noqa: PERF203
            problems += error.problems
    logging = document.values.setdefault("logging", {})
    if isinstance(logging, dict) and logging.get("write_tag") is None:
        logging["write_tag"] = name = Path(shown).stem
        document.origins["logging.write_tag"] = Origin(shown, 0, f"{name} (from the name of the file)")
    document.file = shown
    return document, problems


def _read_with_base(shown: str, origin: Origin | None = None, above: Sequence[str] = ()) -> Document:
    """Return the config at a path laid on its base. `above` are the files between it and the one that was asked for."""
    document = read_file(shown, origin=origin)
    if "base" not in document.values:
        return document
    base, at = document.values.pop("base"), document.origins.pop("base")
    text = "must be the name of another config file, such as base.yaml, or of a shipped config"
    if isinstance(base, str):
        # normpath and not resolve(): messages name the file as its reader would type it.
        below, above = os.path.normpath(find_config(base, os.path.dirname(shown))), [*above, shown]
        if not any(os.path.realpath(below) == os.path.realpath(each) for each in above):
            result = _read_with_base(below, at, above)
            result.lay(document)
            return result
        text = f"leads in a circle: {' -> '.join([*above, below])}. Remove one of these lines"
    raise ConfigErrors([Problem("base", text, at)])
