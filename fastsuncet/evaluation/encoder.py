"""The encoder to evaluate: a run's checkpoint, or a file of weights from torchvision, timm or the authors."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from fastsuncet.checkpoint import manager
from fastsuncet.checkpoint.format import META
from fastsuncet.config import Config, ConfigErrors
from fastsuncet.console import Say, say_line
from fastsuncet.distributed.collectives import any_rank, broadcast_json
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError
from fastsuncet.models.pretrained_weights import fill, read_weights
from fastsuncet.models.resnet import WIDTHS, build_model
from fastsuncet.training import methods
from fastsuncet.training.state import FOLDER

ENCODER, CLASSIFIER = "encoder.", "classifier."  # how a checkpoint names their tensors


@dataclass(frozen=True)
class Encoder:
    """An encoder with its weights, on the CPU, and where they come from."""

    module: nn.Module  # (B, 3, S, S) float32 -> (B, width); plain BatchNorm; every parameter takes gradients
    width: int
    name: str  # as in model.name
    stem: str  # "imagenet" or "cifar"
    source: str  # the folder or file, as the user named it
    step: int | None  # updates of pre-training; None where the file does not say
    epoch: float | None
    ledger: dict[str, Any] | None  # what the pre-training cost: a run's checkpoint has it
    method: str | None  # "SimCLR + SuNCEt"
    classifier: nn.Linear | None = None  # (B, width) -> (B, C), where it comes with one
    tuned: int | None = None  # updates of fine-tuning since

    def record(self) -> dict[str, Any]:
        """What a result says of the encoder it was measured on."""
        return {
            "source": self.source,
            "step": self.step,
            "epoch": self.epoch,
            "method": self.method,
            "ledger": self.ledger,
        }


def checkpoints_of(run: Path, say: Say = say_line) -> list[tuple[int, Path]]:
    """(step, folder) of the good checkpoints of a run, ascending; each damaged one is said in one line.

    `run` is a run's folder or the folder of its checkpoints. Raises CheckpointError where there is none.
    """
    folder = run / FOLDER if (run / FOLDER).is_dir() else run
    good = manager.good_checkpoints(folder, say)
    if not good:
        raise CheckpointError(
            f"{run} holds no checkpoint that can be used. A run saves its first one when checkpoint.every or "
            "checkpoint.every_epochs says so, and its last one at its end"
        )
    return good


def choose(where: Path, *, step: int | None = None, every: bool = False, say: Say = say_line) -> list[Path]:
    """The checkpoint folders, or the one file, that `where` means: `step`'s, every good one, or the newest good one.

    Raises ConfigError for what is not there, CheckpointError where nothing in a run can be used.
    """
    where = Path(where).expanduser()
    if not where.exists():
        raise ConfigError(
            f"there is no {where}: --encoder takes a run's folder, one of its checkpoints, or a file of weights; "
            "without it the config's own run is taken, which `fastsuncet train` makes"
        )
    if where.is_file() or (where / META).is_file():
        if step is not None or every:
            kind = "file" if where.is_file() else "checkpoint"
            raise ConfigError(
                f"--step and --every-checkpoint choose among a run's checkpoints; {where} is one {kind}"
            )
        return [where]
    if step is None and not every:
        # Not the last of checkpoints_of: that would read every one of them from end to end.
        newest = manager.load_newest(where / FOLDER if (where / FOLDER).is_dir() else where, say=say)
        if newest is not None:
            return [newest.path]
    good = dict(checkpoints_of(where, say))
    if step is None:
        return list(good.values())
    if step not in good:
        kept = ", ".join(f"{number:,}" for number in good)
        raise ConfigError(f"{where} has no good checkpoint of step {step:,}; there are {kept}")
    return [good[step]]


def load_encoder(where: Path, config: Config, *, step: int | None = None, say: Say = say_line) -> Encoder:
    """The encoder in `where`: a run's folder (its newest good checkpoint, or that of `step`), one checkpoint's folder,
    a folder that fine-tuning wrote, or a file of weights.

    A run's own config says what its network is; from a file's shapes it is inferred, and `config.model.library` builds
    it. Projection heads are dropped, a classifier is kept beside it. Raises ConfigError for what is not there and for a
    run on pixels normalised otherwise than `config` says; CheckpointError, with keys and shapes, for what does not fit.
    """
    (found,) = choose(where, step=step, say=say)
    if found.is_dir():
        return _of_checkpoint(manager.load(found), config)
    weights = read_weights(found)
    library = "torchvision" if weights.name == "resnet_tiny" else config.model.library
    module = _build(weights.name, library, weights.stem, weights.encoder, str(found))
    classifier = _classifier(*weights.classifier) if weights.classifier else None
    return Encoder(
        module,
        WIDTHS[weights.name],
        weights.name,
        weights.stem,
        str(found),
        step=None,
        epoch=None,
        ledger=None,
        method=None,
        classifier=classifier,
    )


def choose_on_one_rank(place: Place, where: Path, step: int | None, every: bool) -> list[Path]:
    """What rank 0 finds, on every rank: while a run goes on, two ranks may find two newest checkpoints."""
    found, problem = None, None
    if place.first:
        try:
            found = [str(path) for path in choose(where, step=step, every=every)]
        except FastSuncetError as error:
            problem = error
    news = broadcast_json({"found": found, "failed": problem is not None})
    if problem is not None:
        raise problem
    if news["failed"]:
        raise CheckpointError("rank 0 found nothing to evaluate; its own message says why")
    return [Path(path) for path in news["found"]]


def load_unless_gone(place: Place, path: Path, config: Config) -> Encoder | None:
    """The encoder in `path`, or None on every rank, which rank 0 says, where a run that goes on has removed it since.

    Collective. Raises on all ranks what loading raises on any.
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
        say_line(f"{path}: removed meanwhile, as checkpoint.keep has it; left out")
    return None


def _of_checkpoint(loaded: manager.Checkpoint, shown: Config) -> Encoder:
    source = str(loaded.path)
    try:
        config = Config.from_values(loaded.meta["config"])
    except (KeyError, ValidationError, ConfigErrors) as error:
        raise CheckpointError(
            f"{source} does not say what network it holds: its config is not one this version reads. It was written "
            f"by {loaded.meta.get('versions')}"
        ) from error
    # Such a network still gives numbers, only worse ones, and nothing else would say why.
    trained, now = _normalisation(config), _normalisation(shown)
    if trained != now:
        raise ConfigError(
            f"{source} was trained on pixels normalised by {trained}; here it would be shown {now}"
        )
    m = config.model
    tensors = {
        key.removeprefix(ENCODER): value for key, value in loaded.model.items() if key.startswith(ENCODER)
    }
    module = _build(m.name, m.library, m.stem, tensors, source)
    # What fine-tuning wrote says of which encoder it began with: that one's step and cost are what counts.
    began = loaded.meta.get("encoder")
    known = {
        "step": loaded.step,
        "epoch": _epoch(loaded),
        "ledger": loaded.meta.get("ledger"),
        "method": methods.name(config),
    }
    if began is not None:
        known = {key: began.get(key) for key in known}
    classifier = None
    if f"{CLASSIFIER}weight" in loaded.model:
        classifier = _classifier(loaded.model[f"{CLASSIFIER}weight"], loaded.model[f"{CLASSIFIER}bias"])
    return Encoder(
        module,
        WIDTHS[m.name],
        m.name,
        m.stem,
        source,
        **known,
        classifier=classifier,
        tuned=None if began is None else loaded.step,
    )


def _normalisation(config: Config) -> str:
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


def _epoch(loaded: manager.Checkpoint) -> float | None:
    """Epochs done: the checkpoint's own word, else what the run's metrics lines say of their steps."""
    if "epoch" in loaded.meta:
        return loaded.meta["epoch"]
    try:
        lines = (loaded.path.parent.parent / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        return round(loaded.step / round(last["step"] / last["epoch"]), 4)
    except (OSError, ValueError, IndexError, KeyError, TypeError, ZeroDivisionError):
        return None  # a checkpoint copied away from its run: the step still says where it stands
