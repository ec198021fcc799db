"""The classifier of a run: fitted once to its labeled images, calibrated by cross-validation, kept in the run.

    RUN/classifier/linear-....safetensors   weight, bias; the metadata says what it was fitted to and what it is worth

Shapes: E the width of the encoder's output, C classes.
"""

import hashlib
import json
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.config import Config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.calibration import calibration_error, fit_temperature
from fastsuncet.evaluation.cross_validation import out_of_fold_logits, wilson_interval
from fastsuncet.evaluation.encoder import Encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.linear import FOLDS, choose_strength, fit_linear
from fastsuncet.evaluation.supervised.identity import module_digest
from pipelines import atomic_files
from pipelines.data_errors import DataError, listed
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import labeled_split
from pipelines.datasets.string_table import Names

FOLDER = "classifier"  # in the run's folder


@dataclass(frozen=True)
class Worth:
    """What a classifier was fitted to, and what cross-validation on its labeled images says about it."""

    kind: str  # "linear"
    labels: int  # images
    judged: int  # of them, in cross-validation: all that are not the only one of their class
    temperature: float
    accuracy: float | None  # share of the judged images; None where none could be judged
    interval: tuple[float, float] | None  # 95 %, of the accuracy
    calibration_error: float | None  # of the probabilities; before: at temperature 1
    calibration_error_before: float | None
    strength: float  # inverse of the L2 penalty


@dataclass(frozen=True, eq=False)
class Classifier:
    """Features (B, E) to logits (B, C), whose softmax is the calibrated probability of each class."""

    layer: nn.Linear
    classes: tuple[str, ...]
    worth: Worth | None  # None: nothing is known, as of a fine-tuned network


def run_classifier(
    encoder: Encoder, config: Config, place: Place, run: Path
) -> tuple[Classifier, Path, bool]:
    """Return the classifier of `encoder` on the labeled images of `config`, its file in `run`, and whether it is new.

    The labeled images are those of data.split, and with data.split.kind none all that have a label. A class without a
    labeled image is never predicted. Raises ConfigErrors or DataError where there are no labels, or only one class.
    """
    assert encoder.view is not None, "the pixels are known"
    index, chosen = labeled_images(config, place)
    present, labels = np.unique(index.labels[chosen], return_inverse=True)
    classes = tuple(index.classes[i] for i in present)
    if len(classes) < 2:
        raise DataError(
            f"all {len(chosen)} labeled images are of the class {listed(classes)}: a classifier needs two or more"
        )
    names = Names.of(index.name(int(i)) for i in chosen).lines
    identity = {
        "encoder": module_digest(encoder.module),
        "view": json.loads(json.dumps(astuple(encoder.view))),
        "images": hashlib.sha256(names.tobytes() + labels.astype("<i8").tobytes()).hexdigest(),
        "contents": index.contents(),
        "classes": list(classes),
        "linear": config.linear.model_dump(),
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    path = run / FOLDER / f"linear-{digest[:12]}.safetensors"
    if (kept := _read(path, identity)) is not None:
        return kept, path, False
    module = encoder.module.to(place.device)
    features = outputs(module, index, chosen, config, place, view=encoder.view)
    module.to("cpu")
    classifier = fit_classifier(features, torch.from_numpy(labels).to(place.device), classes, config)
    assert classifier.worth is not None, "it was fitted here"
    about = {"identity": identity, "worth": asdict(classifier.worth)}
    payload = safetensors.torch.save(dict(classifier.layer.state_dict()), {"fastsuncet": json.dumps(about)})
    with disk_errors(path):
        atomic_files.make_folder(path.parent)
        atomic_files.replace(path, payload)
    return classifier, path, True


def labeled_images(config: Config, place: Place) -> tuple[ImageIndex, np.ndarray]:
    """Return the training images of `config` and the numbers, int64 ascending, of those that have a label to use."""
    images = open_images(config, place, validation=False)
    split = images.split
    if config.data.split.kind == "none":
        split = labeled_split(images.train, "all")
    chosen = split.indices[~np.isin(split.indices, list(images.train.bad))]
    if not len(chosen):
        raise config.error(
            "data.split.kind" if len(images.train.classes) else "data.kind",
            "no image has a label, and a classifier learns from labels. Give them in a CSV: data.kind=csv "
            "data.csv=labels.csv, with the header file,label",
        )
    return images.train, chosen


def fit_classifier(
    features: Tensor,  # (N, E)
    labels: Tensor,  # (N,) int64 in [0, C)
    classes: tuple[str, ...],
    config: Config,
) -> Classifier:
    """Fit the linear classifier of the config's section linear, and calibrate it by cross-validation."""
    count, strength = len(classes), config.linear.strength
    if strength == "auto":
        strength = choose_strength(features, labels, count)
    numbers, logits = out_of_fold_logits(features, labels, count, strength=strength)
    truth = labels[numbers]
    temperature, accuracy, interval, before, after = 1.0, None, None, None, None
    if len(numbers):
        temperature = fit_temperature(logits, truth)
        right = int((logits.argmax(1) == truth).sum())
        accuracy, interval = right / len(truth), wilson_interval(right, len(truth))
        before, after = (calibration_error((logits / t).softmax(1), truth) for t in (1.0, temperature))
    fit = fit_linear(features, labels, count, strength=strength, max_iterations=config.linear.max_iterations)
    weight = fit.weight / fit.spread / temperature
    layer = _layer({"weight": weight, "bias": fit.bias / temperature - weight @ fit.mean})
    worth = Worth(
        "linear", len(labels), len(numbers), temperature, accuracy, interval, after, before, strength
    )
    return Classifier(layer, classes, worth)


def describe(classifier: Classifier) -> list[str]:
    """Return what a reader should know about the classifier: its labels, expected accuracy and calibration."""
    worth, count = classifier.worth, len(classifier.classes)
    assert worth is not None, "it was fitted here"
    fitted = f"{worth.labels:,} labels of {count:,} classes, strength {worth.strength:g}"
    lines = [f"classifier   {worth.kind}, {fitted}"]
    if worth.accuracy is None or worth.interval is None:
        return [
            *lines,
            "expected     unknown: no class has two labels, so no label can be left out to judge by",
        ]
    low, high = (100 * x for x in worth.interval)
    left_out = worth.labels - worth.judged
    alone = f"; single labels of {left_out} classes cannot be judged" if left_out else ""
    lines.append(
        f"expected     {100 * worth.accuracy:.1f} % right, 95 % interval {low:.1f} to {high:.1f} ({FOLDS}-fold "
        f"cross-validation on {worth.judged:,} labels{alone})"
    )
    lines.append(
        f"calibration  probabilities are off by {100 * (worth.calibration_error or 0):.1f} points on average, "
        f"{100 * (worth.calibration_error_before or 0):.1f} before temperature {worth.temperature:.2f}"
    )
    return lines


def _read(path: Path, identity: dict[str, Any]) -> Classifier | None:
    """Return the classifier in `path`, None where there is none or it cannot be read: it is then fitted again."""
    try:
        with safetensors.safe_open(path, "pt") as stream:
            about = json.loads(stream.metadata()["fastsuncet"])
            tensors = {key: stream.get_tensor(key) for key in ("weight", "bias")}
        worth = about["worth"] | {
            "interval": about["worth"]["interval"] and tuple(about["worth"]["interval"])
        }
        kept = Classifier(_layer(tensors), tuple(identity["classes"]), Worth(**worth))
        return kept if about["identity"] == identity else None
    # RuntimeError: the layer's own check of its shapes.
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, IndexError, RuntimeError):
        return None


def _layer(tensors: dict[str, Tensor]) -> nn.Linear:
    layer = nn.Linear(tensors["weight"].shape[1], tensors["weight"].shape[0], device="meta").to_empty(
        device="cpu"
    )
    layer.load_state_dict(tensors)
    return layer
