"""The encoder to evaluate: a run's checkpoint, an export, or a file of weights from torchvision, timm or the authors.

An export is a file and a JSON, named by `record_path`, that says what network it is and which pixels it expects.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import META, MODEL, LoadedCheckpoint, record_path
from fastsuncet.checkpoint.run_folder import on_every_rank, on_rank_0, require_same
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.config.schema import TIMM
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError
from fastsuncet.evaluation.features import evaluation_view
from fastsuncet.models import timm_backbone
from fastsuncet.models.pretrained_weights import (
    Weights,
    digest_of,
    fill,
    heads,
    read_weights,
    read_weights_of,
    require_fit,
)
from fastsuncet.models.resnet import build_model, projection_head_of, width_of, zeroed
from fastsuncet.paths import typed_path
from fastsuncet.training import methods
from pipelines import atomic_files
from pipelines.sampling.augmentation import Center

WEIGHTS = MODEL  # of an exported folder; timm reads this name too
ENCODER, CLASSIFIER = "encoder.", "classifier."  # prefixes of their tensors in a checkpoint
RECORD_BYTES = 64 << 20  # of the record of an export, at most


@dataclass(frozen=True)
class Encoder:
    """An encoder with its weights, on the CPU, and where they come from."""

    module: nn.Module  # (B, 3, S, S) float32 -> (B, width); plain BatchNorm; every parameter takes gradients
    width: int
    name: str  # as in model.name
    stem: str  # "imagenet" or "cifar"
    source: str  # the folder or file, as the user named it
    step: int | None = None  # updates of pre-training; None for a file of weights
    epoch: float | None = None
    ledger: dict[str, Any] | None = None  # what the pre-training cost; None for a file of weights
    method: str | None = None  # "SimCLR + SuNCEt"
    classifier: nn.Linear | None = None  # (B, width) -> (B, C), where the file has one
    head: Mapping[str, Tensor] = field(default_factory=dict)  # of the projection head, where the file has one
    classes: tuple[str, ...] = ()  # names in the order of labels and logits; () where nothing names them
    tuned: int | None = None  # updates of fine-tuning after the pre-training
    trained: Config | None = None  # the config of the run; None for a file of weights of another program
    view: Center | None = None  # the pixels that the encoder expects; None where nothing says it
    sha256: str = ""  # of the file with the weights

    def record(self) -> dict[str, Any]:
        """Return what a result records of its encoder."""
        return {key: getattr(self, key) for key in ("source", "step", "epoch", "method", "ledger", "sha256")}

    @property
    def lies_at(self) -> Path | None:
        """The path of a checkpoint, a fine-tuning or an export; None for weights of another program."""
        return None if self.trained is None else Path(self.source)

    @property
    def supervised(self) -> bool:
        """Whether it has learned from labels in a run or a fine-tuning."""
        return self.tuned is not None or (self.trained is not None and self.trained.criterion.supervised)

    @property
    def by_paws(self) -> bool:
        """Whether PAWS trained it: the nearest neighbors of projections are then a classifier of its run."""
        return self.trained is not None and self.trained.criterion.instance == "paws"

    def projection(self) -> nn.Module | None:
        """Return the projection head in evaluation mode, None where the file has none. Raises CheckpointError."""
        head = projection_head_of(self.head)
        if head is not None:
            fill(head.eval(), self.head, self.source)
        return head


def choose(where: Path, *, step: int | None = None, every: bool = False) -> list[Path]:
    """Return the checkpoint folders, or the one file, to evaluate: `step`'s, every good one, or the newest good one.

    `where` is a run's folder, its folder of checkpoints, one checkpoint, or a file of weights. Prints a line for each
    damaged checkpoint. Raises ConfigError for what does not exist, CheckpointError for a run without a good checkpoint.
    """
    where = typed_path(where)
    if not where.exists():
        raise ConfigError(
            f"{where.absolute()} does not exist. An encoder is a run's folder, one of its checkpoints, or a file of "
            "weights. `fastsuncet train CONFIG` makes the run of a config"
        )
    if os.path.lexists(record_path(where / WEIGHTS)):
        where /= WEIGHTS
    if where.is_file() or (where / META).is_file():
        if step is not None or every:
            kind = "file" if where.is_file() else "checkpoint"
            raise ConfigError(
                f"--step and --every-checkpoint choose among a run's checkpoints, but {where} is one {kind}"
            )
        return [where]
    folder = where / manager.FOLDER if (where / manager.FOLDER).is_dir() else where
    if step is None and not every:
        # Not the last of `good_checkpoints`, which reads every checkpoint from end to end.
        newest = manager.load_newest(folder)
        if newest is not None:
            return [newest.path]
    good = dict(manager.good_checkpoints(folder))
    if not good:
        raise CheckpointError(
            f"{where} holds no checkpoint that can be used. A run saves checkpoints as checkpoint.every or "
            "checkpoint.every_epochs says, and one at its end"
        )
    if step is None:
        return list(good.values())
    if step not in good:
        kept = ", ".join(f"{number:,}" for number in good)
        raise ConfigError(f"{where} has no good checkpoint of step {step:,}. It has {kept}")
    return [good[step]]


def load_chosen(
    place: Place, config: Config, where: Path | None, step: int | None, every: bool = False
) -> Iterator[Encoder]:
    """Yield the encoders that `choose` finds in `where`, None for the config's own run, the same on every rank.

    Rank 0 chooses: while a run trains, ranks can find different checkpoints, and one that it has deleted before its
    turn is skipped. Collective. Raises on all ranks what loading raises on any of them, and ConfigError for other
    weights: a path can lead to each machine's own disk.
    """
    home = where or config.run_folder
    paths = on_rank_0(place, lambda: [str(path) for path in choose(home, step=step, every=every)])
    for path in map(Path, paths):
        try:
            encoder = on_every_rank(partial(load_encoder, path, config))
            if place.world_size > 1:
                require_same({f"the weights in {path}": encoder.sha256}, ConfigError)
        except FastSuncetError:  # noqa: PERF203 - loading takes far longer
            if str(path) == paths[0] or on_rank_0(place, path.exists):
                raise
            place.say(f"{path}: skipped, deleted by checkpoint.keep during evaluation")
        else:
            yield encoder


def load_encoder(where: Path, config: Config | None = None) -> Encoder:
    """Load the encoder in `where`: a run's folder (its newest good checkpoint), one checkpoint, or a file of weights.

    A folder of `fastsuncet finetune` is a run's folder too. A checkpoint's own config defines its network; that of a
    file is the config's, where that is timm's and fits, and else inferred from its shapes. The tensors of a projection
    head and a classifier are kept. Raises ConfigError for what does not exist and for pixels normalized otherwise than
    `config` says (without a `config` any will do); CheckpointError, with keys and shapes, for weights that do not fit.
    """
    (found,) = choose(where)
    if found.is_dir():
        return _from_checkpoint(manager.load(found), config)
    if found.suffix != ".json" and os.path.lexists(record_path(found)):
        return _from_export(found, config)
    digest = digest_of(found)
    if config is not None and config.model.name.startswith(TIMM):
        try:
            return _encoder(read_weights_of(config.model.name, found), str(found), sha256=digest)
        except CheckpointError as error:
            with contextlib.suppress(CheckpointError):  # a ResNet to compare with
                return _encoder(read_weights(found), str(found), sha256=digest)
            raise error from None
    return _encoder(read_weights(found), str(found), sha256=digest)


def _encoder(
    weights: Weights, source: str, config: Config | None = None, cost: Mapping[str, Any] = {}, **known: Any
) -> Encoder:
    """Return the encoder with these weights, which a run with `config` trained at a `cost`, where that is known."""
    if config is not None:
        weights = replace(weights, name=config.model.name, stem=config.model.stem)
        known |= {"trained": config, "view": evaluation_view(config)}
    # Without memory at first: a record can claim a network far larger than its weights.
    module = build_model(weights.name, weights.stem, device="meta").encoder
    require_fit(module, weights.encoder, source)
    by_timm = weights.name.startswith(TIMM)
    module = timm_backbone.create(weights.name, "cpu") if by_timm else zeroed(module)
    fill(module, weights.encoder, source)
    known |= {key: cost.get(key) for key in ("step", "epoch", "ledger", "method")}
    known["classifier"] = None if weights.classifier is None else linear_layer(*weights.classifier)
    width = width_of(weights.name)
    return Encoder(module, width, weights.name, weights.stem, source, head=weights.head, **known)


def linear_layer(weight: Tensor, bias: Tensor) -> nn.Linear:
    """Return the layer with this weight (C, width) and bias (C,). Raises RuntimeError where they do not fit."""
    # On another device than meta torch would draw random numbers.
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta").to_empty(device="cpu")
    layer.load_state_dict({"weight": weight, "bias": bias})
    return layer


def _from_export(path: Path, shown: Config | None) -> Encoder:
    """Load what `fastsuncet export` wrote. Raises CheckpointError for a file that its record does not describe."""
    try:
        record = json.loads(atomic_files.read_bytes(record_path(path), RECORD_BYTES))
        digest, cost, classes = record["sha256"], dict(record["encoder"]), record["classes"]
        if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
            raise ValueError("its classes are no list of names")
        dict(record["config"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{record_path(path)} is no record of `fastsuncet export`: {error!r}. Beside the weights of another "
            "program, move it away"
        ) from error
    if path.suffix == ".onnx":
        raise CheckpointError(
            f"{path} is for ONNX runtimes. Export the run --to torchvision to load it in torch"
        )
    if digest_of(path) != digest:
        raise CheckpointError(
            f"{path} was changed after it was exported: its sha256 differs from {record_path(path)}"
        )
    config = _trained(str(path), record, shown)
    weights = read_weights_of(config.model.name, path)
    known = {"tuned": cost.get("tuned"), "classes": tuple(classes), "sha256": digest}
    return _encoder(weights, str(path), config, cost, **known)


def _trained(source: str, meta: Mapping[str, Any], shown: Config | None) -> Config:
    """Return the config in `meta`. Raises ConfigError where `shown` has another normalization."""
    try:
        config = Config.from_values(meta["config"])
    except (KeyError, ConfigErrors) as error:
        problems = error.problems if isinstance(error, ConfigErrors) else []
        why = "".join(f"\n  {each.key} {each.text}" for each in problems)
        raise CheckpointError(
            f"{source} does not say what network it holds: this version cannot read its config. It was written by "
            f"{meta.get('versions')}{why}"
        ) from error
    # The network would still give numbers, only worse ones, and nothing else would say why.
    trained, now = _normalization(config), _normalization(shown or config)
    if trained != now:
        raise ConfigError(
            f"{source} was trained on pixels normalized by {trained}, but this config has {now}"
        )
    return config


def _from_checkpoint(loaded: LoadedCheckpoint, shown: Config | None) -> Encoder:
    source, tensors = str(loaded.path), loaded.model
    config = _trained(source, loaded.meta, shown)
    encoder = {key.removeprefix(ENCODER): x for key, x in tensors.items() if key.startswith(ENCODER)}
    # A fine-tuned checkpoint records the encoder that it started from: results count that one's step and cost.
    started = loaded.meta.get("encoder")
    cost = started or {**loaded.meta, "step": loaded.step, "method": methods.name(config)}
    classifier = None
    if f"{CLASSIFIER}weight" in tensors:
        classifier = tensors[f"{CLASSIFIER}weight"], tensors[f"{CLASSIFIER}bias"]
    weights = Weights(config.model.name, config.model.stem, encoder, classifier, *heads(tensors))
    tuned, classes = None if started is None else loaded.step, tuple(loaded.meta.get("classes", ()))
    digest = loaded.meta["files"][MODEL]["sha256"]
    return _encoder(weights, source, config, cost, tuned=tuned, classes=classes, sha256=digest)


def _normalization(config: Config) -> str:
    a = config.data.augmentation
    return " ".join(
        f"data.augmentation.{key}=[{','.join(f'{x:g}' for x in values)}]"
        for key, values in (("mean", a.mean), ("std", a.std))
    )
