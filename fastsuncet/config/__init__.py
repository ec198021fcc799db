"""A run as one YAML file: `load_config` reads, checks and freezes it, or reports all problems at once.

    config = load_config("configs/in1k_10pct.yaml", ["optimization.epochs=100"])
    config.criterion.temperature                             # 0.1
    sizes = config.resolve(world_size=64, num_images=1_281_167)
    sizes.steps_per_epoch, sizes.local_unlabeled             # 454, 44

A file can begin with `base: other.yaml`, a path relative to the file's own folder; its sections are laid on the
base's key by key. A base cannot have a base, so that a setting is in one of two files. Nothing here imports torch or
DALI: a wrong config is refused at once and before any GPU starts.
"""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from pydantic import PrivateAttr, ValidationError

from fastsuncet.config.arithmetic import Arithmetic, arithmetic
from fastsuncet.config.messages import REMOVED, ConfigErrors, Origin, Problem, field_problems
from fastsuncet.config.reader import Key, merged, read_config, without_removed
from fastsuncet.config.rules import broken
from fastsuncet.config.schema import SECTIONS, VALUES, PerRank, Sections

__all__ = ["FREE_ON_RESUME", "Arithmetic", "Config", "ConfigErrors", "PerRank", "flat", "load_config"]

# Keys that can change when a run is continued, because no weight depends on them: paths (the index checks that the
# images are the same), how fast pixels are made, what is written and when. Not free, although one might think so:
# meta.threads and criterion.chunk_size change the order of sums; device, precision, channels_last, compile,
# data.backend, data.color_operator (on a GPU) and data.hw_decoder_share change the kernels; epochs, steps and warmup
# change the learning rate of every step.
FREE_ON_RESUME = (
    "data.root",
    "data.train",
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
# Valid values for the required keys, so that rules can be checked on what is valid of a wrong config.
PLACEHOLDERS = {
    "data": {"kind": "digits"},
    "criterion": {"temperature": 1, "unsupervised_batch_size": 2},
    "optimization": {"lr": 1},
}


class Config(Sections):
    """A whole, valid config: frozen, and equal to another where all values are equal.

    Raises pydantic's ValidationError when built from values of the wrong type, ConfigErrors when a rule between keys
    is broken.
    """

    _origins: dict[Key, Origin] = PrivateAttr(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Check the rules between keys."""
        super().model_post_init(context)
        if problems := broken(self):
            raise ConfigErrors(problems)

    @classmethod
    def from_checkpoint(cls, values: Mapping[str, Any]) -> "Config":
        """Return the config that a checkpoint keeps, `canonical` of this version or of an older one.

        Raises ConfigErrors where a key that was removed since has another value than the one all runs have now.
        """
        stored = without_removed(values)
        kept = flat(stored)
        if problems := [
            Problem(key, f"is {kept[key]}, and this version has only {only}: use the version that wrote it")
            for key, only in REMOVED.items()
            if key in kept
        ]:
            raise ConfigErrors(problems)
        return cls.from_values(stored)

    def resolve(
        self,
        world_size: int,
        num_images: int,
        num_classes: int | None = None,
        num_labeled: int | None = None,
    ) -> Arithmetic:
        """Return the sizes of this run with `world_size` processes and `num_images` unlabeled images.

        `num_classes` counts the classes that have a labeled image and `num_labeled` those images, where that is
        known (None: all are labeled). Raises ConfigErrors with every number that does not fit, and numbers that
        would.
        """
        try:
            return arithmetic(self, world_size, num_images, num_classes, num_labeled)
        except ConfigErrors as error:
            raise ConfigErrors(_located(problem, self._origins) for problem in error.problems) from None

    def error(self, key: str, text: str) -> ConfigErrors:
        """Return an error for the caller to raise about the value of a dotted key, with its line."""
        return ConfigErrors([_located(Problem(key, text), self._origins)])

    def where(self, key: str) -> str:
        """Return where a dotted key is written, such as "run.yaml:3: data.root: images"."""
        return str(_located(Problem(key, ""), self._origins)).strip()

    def __eq__(self, other: object) -> bool:
        """Compare the values; the lines they were written on do not count."""
        return self.canonical() == other.canonical() if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        """Return a hash that agrees with equality."""
        return hash(json.dumps(self.canonical(), sort_keys=True))

    @property
    def run_folder(self) -> Path:
        """Folder of this run's checkpoints and metrics: logging.folder/logging.write_tag."""
        return Path(self.logging.folder).expanduser() / (self.logging.write_tag or "run")

    def canonical(self) -> dict[str, Any]:
        """Return every key, defaults included, in the types of JSON; `Config.from_values` reads it back."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the config as one file without a base, defaults included; `load_config` reads it back."""
        return yaml.dump(self.canonical(), Dumper=_Dumper, sort_keys=False, allow_unicode=True)

    def changed_keys(self, other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return (key, its value in `other`, its value here) for each difference that forbids continuing a run.

        `other` is the `canonical` of the run, as its checkpoint keeps it. Keys in FREE_ON_RESUME can differ. A key
        that only one version has counts as what the other version did, as a rule its default.
        """
        ours, theirs = flat(self.canonical()) | REMOVED, flat(other)
        changed = []
        for key in sorted(ours.keys() | theirs.keys()):
            if key.startswith(tuple(f"{free}." for free in FREE_ON_RESUME)) or key in FREE_ON_RESUME:
                continue
            old, new = theirs.get(key, _before(key, theirs)), ours.get(key)
            if old != new:
                changed.append(
                    (key, old, f"{new} (the only value in this version)" if key in REMOVED else new)
                )
        return changed


def load_config(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Config:
    """Read the YAML file at `path` and its base, apply `overrides` ("section.key=value") and check the result.

    The last of several overrides of a key counts. Raises ConfigErrors (exit code 2) with all problems.
    """
    shown = os.fspath(path)
    document = read_config(shown, list(overrides))
    # A run's config.yaml of an older version can be read.
    document.values = without_removed(document.values)
    if not document.problems:
        with suppress(ValidationError, ConfigErrors):
            config = Config.from_values(document.values)
            config._origins = document.origins
            return config
    reported = {problem.key for problem in document.problems}
    found = [problem for problem in _problems(document.values, reported) if problem.key not in reported]
    raise ConfigErrors(
        [*document.problems, *(_located(problem, document.origins, shown) for problem in found)]
    )


def _problems(values: dict[str, Any], invalid: set[str]) -> list[Problem]:
    """Return what is wrong with each key, then with the rules between the valid keys."""
    try:
        return broken(Sections.from_values(values), invalid)
    except ValidationError as error:
        problems, meant = field_problems(error, values)
    invalid = invalid | meant | {problem.key for problem in problems}
    config = Sections.from_values(merged(PLACEHOLDERS, _without(values, invalid)))
    return problems + broken(config, invalid)


def _without(values: dict[str, Any], invalid: set[str], above: str = "") -> dict[str, Any]:
    return {
        name: _without(value, invalid, f"{above}{name}.") if f"{above}{name}" in SECTIONS else value
        for name, value in values.items()
        if f"{above}{name}" not in invalid
    }


def _located(problem: Problem, origins: dict[Key, Origin], shown: str = "") -> Problem:
    """Return the problem at the line of its key or, where that is not written, of the nearest section above it."""
    dotted = {".".join(key): origin for key, origin in origins.items()}
    key = problem.key
    while key and key not in dotted:
        key = key.rpartition(".")[0]
    return problem.at(dotted.get(key, Origin(shown)), problem.show_value and bool(key) and key == problem.key)


def flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return dotted key -> plain value of a `canonical`; {per_rank: 44} stays one value."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and key not in VALUES:
            found |= flat(value, f"{key}.")
        else:
            found[key] = json.loads(json.dumps(value))  # a tuple and a list are the same
    return found


def _before(key: str, theirs: Mapping[str, Any]) -> Any:
    """Return what a version without `key` did, as a value of that key."""
    if key == "criterion.products" and theirs.get("meta.precision") != "fp32":
        return "fp32"  # behind a float32 network the products are float32 whatever the key says
    if key not in VALUES or VALUES[key].is_required():
        return REMOVED.get(key)
    return json.loads(json.dumps(VALUES[key].default))


class _Dumper(yaml.SafeDumper):
    """One key a line, a list on its line."""


_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)
