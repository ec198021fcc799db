"""A run as one YAML file: `load_config` reads, checks and freezes it, or says everything that is wrong at
once.

    config = load_config("configs/in1k_10pct.yaml", ["optimization.epochs=100"])
    config.criterion.temperature                             # 0.1
    sizes = config.resolve(world_size=64, num_images=1_281_167)
    sizes.steps_per_epoch, sizes.local_unlabeled             # 454, 44

A file may begin with `base: other.yaml`, taken from the file's own folder; its sections are laid on the
base's key by key. A base has no base: a setting stands in one of two places. Nothing here imports torch or
DALI, so a wrong config is refused in a moment and before any GPU starts.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import PrivateAttr, ValidationError

from fastsuncet.config.arithmetic import Arithmetic, arithmetic
from fastsuncet.config.keys import KEYS, SECTIONS, VALUES, field_of
from fastsuncet.config.layers import read_layers
from fastsuncet.config.messages import field_problems
from fastsuncet.config.problems import ConfigErrors, Origin, Problem
from fastsuncet.config.reader import Key
from fastsuncet.config.rules import broken
from fastsuncet.config.schema import Sections
from fastsuncet.config.types import PerRank

__all__ = ["FREE_ON_RESUME", "Arithmetic", "Config", "ConfigErrors", "PerRank", "load_config"]

# What a run may be continued with although it began with another value: none of it changes a bit of the
# weights. Places (the same data may lie elsewhere; whether it is the same is for its index to say), how
# fast pixels are made, what is written down and when. Not free, though one might think so: meta.threads and
# criterion.chunk_size change the order of sums; device, precision, channels_last, compile, data.backend,
# data.color_operator (on a GPU) and data.hw_decoder_share change the kernels; epochs, steps and warmup change
# the learning rate of every step.
FREE_ON_RESUME = (
    "data.root",
    "data.csv",
    "data.index",
    "data.pack",
    "data.split.file",
    "data.download",
    "data.bad_images",
    "data.decode_threads",
    "data.prefetch",
    "data.decoder_buffers",
    "logging",
    "checkpoint",
    "evaluation",
    "finetune",
    "linear",
    "npi",
    "transfer",
)


class Config(Sections):
    """A whole, valid config: frozen, and equal to another where all its values are.

    Raises pydantic's ValidationError when built from values of the wrong type, ConfigErrors when a rule
    between keys is broken.
    """

    _origins: dict[Key, Origin] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Refuses what breaks a rule between keys, however the config was built."""
        super().model_post_init(context)
        if problems := [Problem(key, text) for key, text in broken(self)]:
            raise ConfigErrors(problems)

    def resolve(
        self,
        world_size: int,
        num_images: int,
        num_classes: int | None = None,
        num_labeled: int | None = None,
    ) -> Arithmetic:
        """The sizes of this run shared by `world_size` processes over `num_images` unlabeled images.

        `num_classes` counts the classes that have a labeled image and `num_labeled` those images, where that is
        known (None: all are labeled). Raises ConfigErrors with every number that does not fit, and with numbers
        that would.
        """
        sizes, problems = arithmetic(self, world_size, num_images, num_classes, num_labeled)
        if sizes is None:
            raise ConfigErrors(_locate(problem, self._origins) for problem in problems)
        return sizes

    def error(self, key: str, text: str) -> ConfigErrors:
        """An error for the caller to raise about the value of a dotted key, with the line it stands on."""
        return ConfigErrors([_locate(Problem(key, text), self._origins)])

    def __eq__(self, other: object) -> bool:
        """Equal values: the lines they stand on do not count."""
        return self.canonical() == other.canonical() if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        """Consistent with equality."""
        return hash(json.dumps(self.canonical(), sort_keys=True))

    @property
    def run_folder(self) -> Path:
        """Where this run's checkpoints and metrics live: logging.folder/logging.write_tag."""
        return Path(self.logging.folder).expanduser() / (self.logging.write_tag or "run")

    def canonical(self) -> dict[str, Any]:
        """Every key, defaults included, in the types of JSON; `Config.from_values` reads it back."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The config as one file without a base, defaults included; `load_config` reads it back."""
        return yaml.dump(self.canonical(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def changed_keys(self, other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """(key, its value in `other`, its value here) for each difference that forbids continuing `other`'s
        run.

        `other` is a `canonical`, as a checkpoint keeps it. Keys in FREE_ON_RESUME may differ. A key that an
        older version did not have counts as what that version did, as a rule its default.
        """
        ours, theirs = _flatten(self.canonical()), _flatten(other)
        changed = []
        for key in sorted(ours.keys() | theirs.keys()):
            if any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME):
                continue
            old, new = theirs.get(key, _before(key, theirs)), ours.get(key)
            if old != new:
                changed.append((key, old, new))
        return changed


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Reads the YAML file at `path` and its base, lays `overrides` ("section.key=value") on them, checks
    the whole.

    The last of several overrides of a key counts. Raises ConfigErrors (exit code 2) with every problem at
    once.
    """
    shown = os.fspath(path)
    (values, origins), problems = read_layers(shown, list(overrides))
    told = {problem.key for problem in problems}
    found = [problem for problem in _problems(values, told) if problem.key not in told]
    problems += [_locate(problem, origins, shown) for problem in found]
    if problems:
        raise ConfigErrors(problems)
    config = Config.from_values(values)
    config._origins = origins
    return config


def _problems(values: dict[str, Any], invalid: set[str]) -> list[Problem]:
    """What is wrong with merged values: each key by itself, then the rules between those keys that are
    sound.
    """
    try:
        config = Sections.from_values(values)
    except ValidationError as error:
        problems, meant = field_problems(error, values)
    else:
        return [Problem(key, text) for key, text in broken(config, invalid)]
    # Sound keys are held against each other now, and not one round of corrections later: the others are left
    # out (a stand-in put where there is no default), and no rule that reads one of those is asked.
    invalid = invalid | meant | {problem.key for problem in problems}
    sound = _without(values, invalid)
    for key in VALUES:
        if not field_of(key).is_required():
            continue
        *above, name = key.split(".")
        section = sound
        for part in above:
            section = section.setdefault(part, {})
        if name not in section:
            section[name] = field_of(key).examples[0]
    config = Sections.from_values(sound)
    return problems + [Problem(key, text) for key, text in broken(config, invalid)]


def _without(values: dict[str, Any], invalid: set[str], above: str = "") -> dict[str, Any]:
    kept = {}
    for name, value in values.items():
        key = f"{above}.{name}" if above else name
        if key not in invalid:
            kept[name] = _without(value, invalid, key) if key in SECTIONS else value
    return kept


def _locate(problem: Problem, origins: dict[Key, Origin], shown: str = "") -> Problem:
    """The problem at the line of its key or, where that is not written, of the section it belongs in."""
    dotted = {".".join(key): origin for key, origin in origins.items()}
    key = problem.key
    while key and key not in dotted:
        key = key.rpartition(".")[0]
    if not key:
        return problem.at(Origin(shown), show_value=False)
    return problem.at(dotted[key], problem.show_value and key == problem.key)


def _flatten(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted key -> plain value; what is nested inside a value ({per_rank: 44}) stays one value."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}.{name}" if above else name
        if isinstance(value, Mapping) and (key in SECTIONS or key not in KEYS):
            flat |= _flatten(value, key)
        else:
            flat[key] = json.loads(json.dumps(value))  # a tuple and a list are one thing
    return flat


def _before(key: str, theirs: Mapping[str, Any]) -> Any:
    """What a version without `key` did, in the words of that key."""
    if key == "criterion.products" and theirs.get("meta.precision") != "fp32":
        return "fp32"  # behind a float32 network there is no other, whatever the key says
    return _default(key)


def _default(key: str) -> Any:
    if key not in VALUES or field_of(key).is_required():
        return None
    return json.loads(json.dumps(field_of(key).default))


class _Dumper(yaml.SafeDumper):
    """A key a line, a list on its line."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)
