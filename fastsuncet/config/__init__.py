"""A run as one YAML file: `load_config` reads, checks and freezes it, or reports all problems at once.

    config = load_config("in1k_10pct", ["optimization.epochs=100"])
    config.criterion.temperature                             # 0.1
    sizes = config.resolve(world_size=64, num_images=1_281_167)
    sizes.steps_per_epoch, sizes.local_unlabeled             # 454, 44

A file can begin with `base: other.yaml`, a path relative to the file's own folder; its sections are laid on the
base's key by key, and a base can have a base. Nothing here imports torch or DALI: a wrong config is refused at once
and before any GPU starts.
"""

import contextlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import PrivateAttr, ValidationError

from fastsuncet.config.arithmetic import Arithmetic, arithmetic
from fastsuncet.config.problems import ConfigErrors, Origin, Problem
from fastsuncet.config.reader import Document, Dumper, read_config
from fastsuncet.config.rules import FILES, broken
from fastsuncet.config.schema import CONFIG, DEFAULTS, STAND_INS, PerRank, Sections, flat, nested
from fastsuncet.paths import typed_path
from pipelines.data_errors import DataError

__all__ = ["FREE_ON_RESUME", "Arithmetic", "Config", "ConfigErrors", "PerRank", "flat", "load_config"]

# Keys that can change when a run is continued, because no weight depends on them: paths (the index checks that the
# images are the same), how fast pixels are made, what is written and when. Not free, although one might think so:
# meta.threads and criterion.chunk_size change the order of sums; device, precision, channels_last, compile,
# data.backend, data.view_operator (on a GPU) and data.hw_decoder_share change the kernels; epochs, steps and warmup
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
    "data.changed_images",
    "data.decode_threads",
    "data.prefetch",
    "meta.timeout",
    "model.init",  # the checkpoint keeps its sha256
    "model.init_sha256",
    "logging",
    "checkpoint",
    "evaluation",
    "finetune",
    "linear",
    "npi",
    "transfer",
)


class Config(Sections):
    """A whole, valid config: frozen, and equal to another where all values are equal."""

    _document: Document = PrivateAttr(default_factory=Document)
    _written: "Config | None" = PrivateAttr(default=None)  # None: this one

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Config":
        """Return the config of plain nested values, such as `canonical`'s. Raises ConfigErrors with all problems."""
        return cls.from_document(Document(values=values))

    @classmethod
    def from_document(cls, document: Document, problems: Sequence[Problem] = ()) -> "Config":
        """Return the config of a document that has `problems` already. Raises ConfigErrors with these and all others.

        Rules between keys are checked with the defaults in place of what is wrong. Of a key that is wrong, and of the
        one that a misspelled key means, nothing more is said.
        """
        found, config = list(problems), None
        try:
            # From JSON, because pydantic's strict mode then takes a list for a tuple and an object for a dataclass.
            config = cls.model_validate_json(json.dumps(document.values))
        except ValidationError as error:
            from fastsuncet.config.messages import field_problems  # only a wrong config needs them

            reported = {each.key for each in problems}
            of_keys = (each for each in field_problems(error, document) if each.key not in reported)
            found += map(document.locate, of_keys)
        wrong = tuple(f"{key}." for each in found for key in (each.key, each.meant) if key)
        if config is None:
            values = flat(document.values)
            right = {k: values[k] for k in CONFIG.values if k in values and not f"{k}.".startswith(wrong)}
            config = cls.model_validate_json(json.dumps(nested(STAND_INS | right)))
        for each in broken(config):
            named = re.findall(r"\w+\.[\w.]+", f"{each.key} {each.text}")
            if not any(f"{key}.".startswith(wrong) for key in named):
                found.append(document.locate(each))
        if found:
            raise ConfigErrors(found)
        config._document = document
        return config

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
            raise ConfigErrors(map(self._document.locate, error.problems)) from None

    def is_written(self, key: str) -> bool:
        """Return whether the value of a dotted key was written; "auto" leaves it open."""
        return key in self._document.origins and flat(self.canonical())[key] != "auto"

    def with_values(self, values: Mapping[str, Any]) -> "Config":
        """Return this config with other `values` of dotted keys. Raises as the constructor does."""
        return Config.from_document(
            replace(self._document, values=nested({**flat(self.canonical()), **values}))
        )

    def resolved(self, values: Mapping[str, Any]) -> "Config":
        """Return this config with what its "auto" keys mean for a run: `values` of dotted keys. It keeps `written`."""
        config = self.with_values(values)
        config._written = self.written
        return config

    @property
    def written(self) -> "Config":
        """This config before `resolved`: what config.yaml and the checkpoints of its run keep."""
        return self._written or self

    def error(self, key: str, text: str) -> ConfigErrors:
        """Return an error for the caller to raise about the value of a dotted key, with its line."""
        return ConfigErrors([self._document.locate(Problem(key, text))])

    def where(self, key: str) -> str:
        """Return where a dotted key is written, such as "run.yaml:3: data.root: images"."""
        return str(self._document.locate(Problem(key, ""))).strip()

    @contextlib.contextmanager
    def naming(self, *keys: str) -> Iterator[None]:
        """Add to a DataError the dotted keys that led to it, and where they are written."""
        try:
            yield
        except DataError as error:
            error.args = ("\n".join([str(error), *(f"  {self.where(key)}" for key in keys)]),)
            raise

    def __eq__(self, other: object) -> bool:
        """Compare the values; the lines they were written on do not count."""
        return self.canonical() == other.canonical() if isinstance(other, Config) else NotImplemented

    def require_data(self, *, validation: bool = False) -> None:
        """Raise DataError for a folder or a list of the data that is not there, before anyone waits for torch.

        Raises ConfigErrors where `validation` images are needed and not set.
        """
        data = self.data
        files = data.kind in FILES
        if files and data.pack is None and data.root and not typed_path(data.root).is_dir():
            where, more = self.where("data.root"), ""
            if where == "data.root":  # the config of a checkpoint is in no file
                more = ", in config.yaml of the run, and give that file for the run"
            raise DataError(
                f"no data folder {typed_path(data.root)}: set data.root to the folder of the images{more}\n  {where}"
            )
        lists = {"data.csv": data.csv if data.kind == "csv" else None, "data.split.file": data.split.file}
        lists["data.validation"] = data.validation_table
        for key, path in lists.items():
            if path and not typed_path(path).exists():
                raise DataError(
                    f"there is no file {typed_path(path)}: give the list of labels or names\n  {self.where(key)}"
                )
        if validation and files and data.validation is None:
            text = (
                "the accuracy is measured on validation images: set their folder, or 0.2 to hold out labels"
            )
            raise self.error("data.validation", text)

    @property
    def file(self) -> Path:
        """File that it was read from."""
        return Path(self._document.file)

    @property
    def run_folder(self) -> Path:
        """Folder of this run's checkpoints and metrics: logging.folder/logging.write_tag."""
        return typed_path(self.logging.folder) / (self.logging.write_tag or "run")

    def arguments_for(self, run: Path) -> str:
        """Return what a command with this config takes to use `run`: "" where the config names that folder itself."""
        if run.resolve() == self.run_folder.resolve():
            return ""
        here = {"folder": run.absolute().parent, "write_tag": run.absolute().name}
        return "".join(f" logging.{key}={shlex.quote(str(value))}" for key, value in here.items())

    def canonical(self) -> dict[str, Any]:
        """Return every key, defaults included, in the types of JSON; `Config.from_values` reads it back."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the config as one file without a base, defaults included; `load_config` reads it back."""
        return yaml.dump(self.canonical(), Dumper=Dumper, sort_keys=False, allow_unicode=True)

    def changed_keys(self, other: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
        """Return (key, its value in `other`, its value here) for each difference that forbids continuing a run.

        `other` is the `canonical` of the run, as its checkpoint keeps it. Keys in FREE_ON_RESUME can differ. A key
        that only one has counts as its default in the other.
        """
        old, new = DEFAULTS | flat(other), DEFAULTS | flat(self.canonical())
        free = tuple(f"{key}." for key in FREE_ON_RESUME)
        return [
            (key, old.get(key), new.get(key))
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not f"{key}.".startswith(free)
        ]


def load_config(
    path: str | os.PathLike[str],
    overrides: Iterable[str] = (),
    origins: Mapping[str, Origin] | None = None,
) -> Config:
    """Read the YAML file at `path` and its bases, apply `overrides` ("section.key=value") and check the result.

    The last of several overrides of a key counts. `origins` has that of those that are not from the command line.
    Raises ConfigErrors (exit code 2) with all problems, or with the first one that is not YAML.
    """
    overrides = [overrides] if isinstance(overrides, str) else overrides
    return Config.from_document(*read_config(os.fspath(path), overrides, origins or {}))
