"""The encoder to evaluate: a run's checkpoint, or a file of weights from torchvision, timm or the authors."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import META, LoadedCheckpoint
from fastsuncet.checkpoint.run_folder import on_rank_0
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.console import say_line
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError
from fastsuncet.models.pretrained_weights import fill, read_weights
from fastsuncet.models.resnet import WIDTHS, build_model
from fastsuncet.training import methods

ENCODER, CLASSIFIER = "encoder.", "classifier."  # prefixes of their tensors in a checkpoint


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
    tuned: int | None = None  # updates of fine-tuning after the pre-training

    def record(self) -> dict[str, Any]:
        """Return what a result records of its encoder."""
        return {key: getattr(self, key) for key in ("source", "step", "epoch", "method", "ledger")}


def choose(where: Path, *, step: int | None = None, every: bool = False) -> list[Path]:
    """Return the checkpoint folders, or the one file, to evaluate: `step`'s, every good one, or the newest good one.

    `where` is a run's folder, its folder of checkpoints, one checkpoint, or a file of weights. Prints a line for each
    damaged checkpoint. Raises ConfigError for what does not exist, CheckpointError for a run without a good checkpoint.
    """
    where = Path(where).expanduser()
    if not where.exists():
        raise ConfigError(
            f"{where} does not exist. --encoder takes a run's folder, one of its checkpoints, or a file of weights. "
            "Without it the config's own run is evaluated, which `fastsuncet train` makes"
        )
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


def choose_on_one_rank(place: Place, where: Path, step: int | None, every: bool) -> list[Path]:
    """Return on every rank what `choose` finds on rank 0: while a run trains, ranks can find different checkpoints."""
    found = on_rank_0(place, lambda: [str(path) for path in choose(where, step=step, every=every)])
    return [Path(path) for path in found]


def load_unless_gone(place: Place, path: Path, config: Config) -> Encoder | None:
    """Return the encoder in `path`, or None on every rank where a run that still trains has deleted it.

    Collective. Raises on all ranks what loading raises on any of them.
    """
    encoder, problem = None, None
    try:
        encoder = load_encoder(path, config)
    except FastSuncetError as error:
        problem = error
    failed, gone = broadcast_json([any_rank(problem is not None), not path.exists()])
    if not failed:
        return encoder
    if not gone:
        raise problem or CheckpointError(f"another rank could not read {path}; its own message says why")
    if place.first:
        say_line(f"{path}: skipped, deleted by checkpoint.keep during evaluation")
    return None


def load_encoder(where: Path, config: Config) -> Encoder:
    """Load the encoder in `where`: a run's folder (its newest good checkpoint), one checkpoint, or a file of weights.

    A folder of `fastsuncet finetune` is a run's folder too. A checkpoint's own config defines its network. The network
    of a file is inferred from its shapes, and built by `config.model.library`. Projection heads are dropped, a
    classifier is kept. Raises ConfigError for what does not exist and for pixels normalized otherwise than `config`
    says; CheckpointError, with keys and shapes, for weights that do not fit.
    """
    (found,) = choose(where)
    if found.is_dir():
        return _from_checkpoint(manager.load(found), config)
    weights = read_weights(found)
    library = "torchvision" if weights.name == "resnet_tiny" else config.model.library
    return Encoder(
        module=_build(weights.name, library, weights.stem, weights.encoder, str(found)),
        width=WIDTHS[weights.name],
        name=weights.name,
        stem=weights.stem,
        source=str(found),
        classifier=_classifier(*weights.classifier) if weights.classifier else None,
    )


def _from_checkpoint(loaded: LoadedCheckpoint, shown: Config) -> Encoder:
    source = str(loaded.path)
    try:
        config = Config.from_checkpoint(loaded.meta["config"])
    except (KeyError, ValidationError, ConfigErrors) as error:
        problems = error.problems if isinstance(error, ConfigErrors) else []
        why = "".join(f"\n  {each.key} {each.text}" for each in problems)
        raise CheckpointError(
            f"{source} does not say what network it holds: this version cannot read its config. It was written by "
            f"{loaded.meta.get('versions')}{why}"
        ) from error
    # The network would still give numbers, only worse ones, and nothing else would say why.
    trained, now = _normalization(config), _normalization(shown)
    if trained != now:
        raise ConfigError(
            f"{source} was trained on pixels normalized by {trained}, but this config has {now}"
        )
    m, tensors = config.model, loaded.model
    encoder = {key.removeprefix(ENCODER): x for key, x in tensors.items() if key.startswith(ENCODER)}
    # A fine-tuned checkpoint records the encoder that it started from: results count that one's step and cost.
    started = loaded.meta.get("encoder")
    cost = started or {
        "step": loaded.step,
        "epoch": loaded.meta.get("epoch"),
        "ledger": loaded.meta.get("ledger"),
        "method": methods.name(config),
    }
    classifier = None
    if f"{CLASSIFIER}weight" in tensors:
        classifier = _classifier(tensors[f"{CLASSIFIER}weight"], tensors[f"{CLASSIFIER}bias"])
    return Encoder(
        module=_build(m.name, m.library, m.stem, encoder, source),
        width=WIDTHS[m.name],
        name=m.name,
        stem=m.stem,
        source=source,
        **{key: cost.get(key) for key in ("step", "epoch", "ledger", "method")},
        classifier=classifier,
        tuned=None if started is None else loaded.step,
    )


def _normalization(config: Config) -> str:
    a = config.data.augmentation
    return " ".join(
        f"data.augmentation.{key}=[{','.join(f'{x:g}' for x in values)}]"
        for key, values in (("mean", a.mean), ("std", a.std))
    )


def _build(name: str, library: str, stem: str, tensors: Mapping[str, Tensor], source: str) -> nn.Module:
    module = build_model(name, library, stem).encoder
    fill(module, tensors, source)
    return module


def _classifier(weight: Tensor, bias: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.load_state_dict({"weight": weight, "bias": bias})
    return linear
