"""The best classifier of a run: fitted once to its labeled images, or a fine-tuning's; calibrated on left-out images.

    RUN/classifier/....safetensors   the fitted layer; the metadata says what it was fitted to and what it is worth

Shapes: N labeled images, E the width of the encoder's output, D that of the projection, C classes.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fastsuncet.checkpoint import manager
from fastsuncet.config import Config
from fastsuncet.data.dataset import NO_VALIDATION, open_images
from fastsuncet.data.learned_labels import learned, learned_lengths
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.calibration import FOLDS, Calibration, Classify, calibrate, out_of_fold
from fastsuncet.evaluation.encoder import Encoder, linear_layer, load_encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.finetuning.job import RESULT
from fastsuncet.evaluation.finetuning.record import labels_digest, module_digest
from fastsuncet.evaluation.linear import choose_strength, fit_linear, linear_logits
from fastsuncet.evaluation.npi import npi_probabilities
from fastsuncet.evaluation.scoring import labeled, require_finite, share_right, wilson_interval
from fastsuncet.metrics.results import read_results
from fastsuncet.paths import typed_path
from pipelines import atomic_files
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.label_splits import labeled_split
from pipelines.output import first_five, say_line
from pipelines.verify import check

FOLDER = "classifier"  # in the run's folder
LINEAR, NEIGHBORS = "linear", "PAWS's nearest neighbors"
Known = str | tuple[str, int]  # an image by its path; one of a pack by its name and length in bytes


@dataclass(frozen=True, eq=False)
class Classifier:
    """Features (B, E) to logits (B, C), whose softmax is the calibrated probability of each class."""

    layer: nn.Module
    classes: tuple[str, ...]
    about: list[str]  # lines for the user: its labels, its expected accuracy and its calibration
    labeled: frozenset[Known] = frozenset()  # the images that it was fitted to, where they are known


class NearestNeighbors(nn.Module):
    """PAWS's classifier: log-probabilities by the cosines of projections, divided by a calibrating temperature."""

    def __init__(
        self,
        head: nn.Module,
        supports: Tensor,  # (N, D)
        labels: Tensor,  # (N,) int64
        temperatures: Tensor,  # (2,): the method's, the calibration's
    ):
        super().__init__()
        self.head, self.num_classes = head, int(labels.max()) + 1
        self.supports, self.labels = nn.Buffer(supports), nn.Buffer(labels)
        self.temperatures = nn.Buffer(temperatures)

    def forward(self, features: Tensor) -> Tensor:
        method, calibration = self.temperatures.tolist()
        return log_p(self.head(features), self.supports, self.labels, self.num_classes, method) / calibration


def log_p(queries: Tensor, supports: Tensor, labels: Tensor, num_classes: int, temperature: float) -> Tensor:
    """Return log p (Q, C) of `npi_probabilities`. Far classes underflow to 0, of which there is no logarithm."""
    tiny = torch.finfo(torch.float32).tiny
    return npi_probabilities(queries, supports, labels, num_classes, temperature).clamp(min=tiny).log()


def two_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return number and probability, (B, 2) each, of the two most probable classes by logits (B, C)."""
    label = logits.topk(2).indices  # a high temperature makes probabilities equal in float32
    return label, logits.softmax(1).gather(1, label)


def best_classifier(
    encoder: Encoder, config: Config, place: Place, *, skip_bad: bool = False
) -> tuple[Encoder, Classifier]:
    """Return the encoder to use and its classifier.

    That is the classifier of a fine-tuning or an export; else that of a fine-tuning in the run on the same labels, if
    it is above the others on the same images; else `run_classifier`.
    """
    run = _run_of(encoder, config)
    # That of a checkpoint of pre-training knows no later label.
    pre_trained = encoder.tuned is None and Path(encoder.source).is_dir()
    if encoder.classifier is None or pre_trained:
        tuned = _best_fine_tuning(run, encoder, config, place)
        return tuned or (encoder, run_classifier(encoder, config, place, skip_bad=skip_bad))
    record = atomic_files.read_object(run / RESULT).get("record")
    if record is not None:
        # Without the images themselves, which can lie on another machine.
        files, data = learned_lengths(run), config.data
        known = files.items() if data.pack or not data.root else _below(typed_path(data.root), files)
        return encoder, replace(_tuned(encoder, record, run, ""), labeled=frozenset(known))
    # Weights of another program, or a fine-tuning that has not ended.
    why = "its probabilities are not calibrated: it lies in no folder of a finished fine-tuning"
    about = f"classifier   the layer of the weights for {encoder.classifier.out_features:,} classes; {why}"
    return encoder, Classifier(encoder.classifier, encoder.classes, [about])


def fitted_to(classifier: Classifier, index: ImageIndex) -> np.ndarray:
    """Return which images of `index` are known to be of those that the classifier was fitted to, bool (N,)."""
    keys = zip(_below(index.root, index.files), _lengths(index))
    return np.array([not classifier.labeled.isdisjoint(each) for each in keys])


def _below(root: Path | None, names: Iterable[str]) -> list[str]:
    """Return the path of each image below `root`, with the links of the root resolved."""
    resolved = os.path.realpath(root or "")
    return [os.path.join(resolved, name) for name in names]


def _lengths(index: ImageIndex) -> list[tuple[str, int]]:
    """Return the name of each image and its length in bytes, which a pack has from the files it was made of."""
    return list(zip(index.files, index.lengths().tolist()))


def _known(index: ImageIndex, chosen: np.ndarray) -> frozenset[Known]:
    """Return by what `fitted_to` knows the images `chosen`; the files of a pack can lie anywhere."""
    keys = _below(index.root, index.files) if index.pack is None else _lengths(index)
    return frozenset(keys[i] for i in chosen)


def _run_of(encoder: Encoder, config: Config) -> Path:
    """Return the run's folder that a checkpoint or an export lies in, or where the config has it."""
    above = Path(encoder.source).absolute().parents
    return next((folder for folder in above if (folder / manager.FOLDER).is_dir()), config.run_folder)


def _best_fine_tuning(
    run: Path, encoder: Encoder, config: Config, place: Place
) -> tuple[Encoder, Classifier] | None:
    """Return the best fine-tuning of `encoder` on the labels of `config`, if it is above the linear and PAWS's.

    A line says which were made on other labels.
    """
    records = [record for record in read_results(run) if record["encoder"].get("step") == encoder.step]
    tunings = [record for record in records if "frozen" in record]
    if not tunings:
        return None
    index, chosen = labeled_images(config, place)
    labels = labels_digest(index, chosen)

    def measured_on(record: dict[str, Any]) -> tuple[Any, Any]:
        return record["setting"].get("validation"), record["labels"].get("count")

    paws = {
        measured_on(record): record["metrics"]["top1"]
        for record in records
        if encoder.by_paws and record["kind"] == "npi" and record["setting"].get("features") == "projection"
    }
    best, stale = None, set[str]()
    for record in tunings:
        folder = run / "finetune" / Path(record["finetuned"]["folder"]).name
        if not folder.is_dir():
            continue
        if record["finetuned"].get("labels") != labels:
            stale.add(str(folder))
            continue
        top1, others = record["metrics"]["top1"], {LINEAR: record["frozen"]["linear"]}
        if "folds" not in record["setting"] and (rival := paws.get(measured_on(record))):
            others[NEIGHBORS] = rival
        if top1 > max(others.values()) and (best is None or top1 > best[0]):
            because = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in others.items())
            best = top1, record, folder, f"fine-tuned {100 * top1:.1f} %, {because}, on the same images"
    if stale:
        which = f"learned from other labels than the {len(chosen):,} that can be read now"
        again = "`fastsuncet finetune CONFIG finetune.write_tag=NEW` learns from these"
        say_line(f"not used     {first_five(sorted(stale))}: {which}; {again}")
    if best is None:
        return None
    _, record, folder, because = best
    tuned = load_encoder(folder)
    return tuned, replace(_tuned(tuned, record, folder, because), labeled=_known(index, chosen))


def _tuned(encoder: Encoder, record: dict[str, Any], folder: Path, because: str) -> Classifier:
    """Return the classifier of a network that was fine-tuned in `folder`, calibrated on the images of its record."""
    assert encoder.classifier is not None, "it was fine-tuned"
    calibration, known = Calibration(**record["calibration"]), record.get("learned", 0)
    with torch.no_grad():
        for parameter in encoder.classifier.parameters():
            parameter /= calibration.temperature
    found = None if known else (record["metrics"]["top1"], calibration)
    what = (encoder.classes, record["labels"]["count"], known, record["images"], found)
    about = _about(f"fine-tuned, of {folder}", because, *what, by_folds="folds" in record["setting"])
    return Classifier(encoder.classifier, encoder.classes, about)


def run_classifier(
    encoder: Encoder,
    config: Config,
    place: Place,
    *,
    skip_bad: bool = False,
    skipped: frozenset[int] = frozenset(),  # numbers of labeled images to leave out
) -> Classifier:
    """Return the classifier of `encoder` on the labeled images of `config`, which a file in the run keeps.

    The labeled images are those of data.split, and with data.split.kind none all that have a label; those of
    data.validation too, where it takes them out of the training images. A class without one is never predicted.
    Raises ConfigErrors or DataError where there are no labels, or only one class, and BadImage for a labeled image that
    cannot be decoded; with `skip_bad` it is printed and left out.
    """
    assert encoder.view is not None, "the pixels are known"
    if isinstance(config.data.validation, float) or config.data.validation_table:
        config = config.with_values(NO_VALIDATION)
    index, chosen = labeled_images(config, place)
    chosen = np.setdiff1d(chosen, list(skipped))

    def say_skipped(bad: Mapping[int, str]) -> None:
        for i, reason in bad.items():
            say_line(f"skipped      the label of {index.path(i)}: {reason}")

    if skip_bad:
        say_skipped({i: why for i, why in index.bad.items() if index.labels[i] >= 0})
    known = learned(encoder.lies_at, index, encoder.supervised)[chosen]
    present, labels = np.unique(index.labels[chosen], return_inverse=True)
    classes = tuple(index.classes[i] for i in present)
    if len(classes) < 2:
        raise DataError(
            f"all {len(chosen)} labeled images are of the class {first_five(classes)}: a classifier needs two or more"
        )
    head = encoder.projection() if encoder.by_paws else None
    identity = {
        "encoder": module_digest(encoder.module),
        "head": None if head is None else module_digest(head),
        "view": json.loads(json.dumps(astuple(encoder.view))),
        "images": labels_digest(index, chosen),
        "learned": hashlib.sha256(known.tobytes()).hexdigest(),
        "contents": index.contents(),
        "classes": list(classes),
        "linear": config.linear.model_dump(),
        "temperature": config.npi.temperature or config.criterion.temperature,
    }
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    path = _run_of(encoder, config) / FOLDER / f"{digest[:12]}.safetensors"
    classifier = _read(path, identity, head)
    if classifier is not None:
        say_line(f"from         {path}, fitted before")
    else:
        say_line(f"fitting      a classifier to {len(chosen):,} labels")
        module = encoder.module.to(place.device)
        try:
            features = outputs(module, index, chosen, config, place, view=encoder.view, what="labeled images")
        except BadImage:
            if not skip_bad:
                raise
            # It names the bad images of one batch; all are left out at once.
            found = check(index.take(chosen), config.data.backend).bad
            bad = {int(chosen[row]): reason for row, reason in found.items()}
            say_skipped(bad)
            return run_classifier(encoder, config, place, skipped=frozenset(bad))
        require_finite(features)
        module.to("cpu")
        truth, given = (torch.from_numpy(x).to(place.device) for x in (labels, known))
        classifier = fit_classifier(features, truth, given, classes, config, head)
        about = {"fastsuncet": json.dumps({"identity": identity, "about": classifier.about})}
        tensors = {key: x.contiguous() for key, x in classifier.layer.state_dict().items()}
        try:
            atomic_files.make_folder(path.parent)
            atomic_files.replace(path, safetensors.torch.save(tensors, about))
            say_line(f"kept in      {path}")
        except OSError as error:  # the run is another user's: its next use fits one again
            say_line(f"not kept     {path}: {error.strerror}")
    return replace(classifier, labeled=_known(index, chosen))


def labeled_images(config: Config, place: Place) -> tuple[ImageIndex, np.ndarray]:
    """Return the training images of `config` and the numbers, int64 ascending, of those that have a label to use."""
    config.require_data()
    images = open_images(config, place, validation=False)
    if config.data.split.kind == "none":
        images = replace(images, split=labeled_split(images.train, "all"))
    chosen = labeled(images)
    if not len(chosen):
        raise config.error(
            "data.split.kind" if len(images.train.classes) else "data.kind",
            "no image has a label, and a classifier learns from labels. Write some into a CSV with the header "
            "file,label, and kind: csv and csv: labels.csv into the section data of the config; or train on them: "
            "fastsuncet init FOLDER --labels labels.csv --weights RUN",
        )
    return images.train, chosen


@torch.no_grad()
def fit_classifier(
    features: Tensor,  # (N, E)
    labels: Tensor,  # (N,) int64 in [0, C)
    known: Tensor,  # (N,) bool: the encoder has learned from it
    classes: tuple[str, ...],
    config: Config,
    head: nn.Module | None = None,  # PAWS's projection head, in evaluation mode
) -> Classifier:
    """Fit the linear classifier of the config's section linear, or with `head` PAWS's nearest neighbors.

    Which of the two, and one temperature, is chosen by cross-validation on the labels.
    """
    count, method = len(classes), config.npi.temperature or config.criterion.temperature
    strength, _ = choose_strength(features, labels, count, config.linear.strength)
    projections = None
    candidates: dict[str, Classify] = {LINEAR: partial(linear_logits, features, labels, count, strength)}
    if head is not None:
        z = projections = head.to(features.device)(features)
        candidates[NEIGHBORS] = lambda ours, out: log_p(z[out], z[ours], labels[ours], count, method)
    rows = {kind: out_of_fold(labels, classify, learned=known) for kind, classify in candidates.items()}
    judged = len(rows[LINEAR][0])
    if not judged and head is not None:  # labels that were learned still choose, but tell no accuracy
        rows = {kind: out_of_fold(labels, classify) for kind, classify in candidates.items()}
    shares = {
        kind: share_right(logits.argmax(1), labels[numbers])
        for kind, (numbers, logits) in rows.items()
        if len(numbers)
    }
    kind = max(shares, key=lambda each: shares[each], default=LINEAR)  # of equal ones the first
    numbers, logits = rows[kind]
    found = (shares[kind], calibrate(logits, labels[numbers])) if judged else None
    because = ", ".join(f"{each} {100 * share:.1f} %" for each, share in shares.items()) if head else ""
    because += "" if judged or not because else ", on labels that the network has learned from"
    t = found[1].temperature if found else 1.0
    if head is not None and projections is not None and kind == NEIGHBORS:
        layer = NearestNeighbors(head, projections, labels, torch.tensor([method, t]))
    else:
        options = {"strength": strength, "max_iterations": config.linear.max_iterations}
        fit = fit_linear(features, labels, count, **options)
        layer = linear_layer(fit.weight / t, fit.bias / t)
        kind = f"{LINEAR}, strength {strength:g}"
    about = _about(kind, because, classes, len(labels), int(known.sum()), judged, found)
    return Classifier(layer.to("cpu"), classes, about)


def _about(
    kind: str,
    because: str,  # the accuracies that it was chosen by, or ""
    classes: Sequence[str],
    labels: int,  # images
    learned: int,  # of the labels, those that the encoder has learned from: nothing can be judged by them
    judged: int,  # images that the accuracy counts: of the labels, those of classes with two or more
    found: tuple[float, Calibration] | None,  # accuracy and calibration on these; None without any
    by_folds: bool = True,  # the judged images are labels that were left out, and not validation images
) -> list[str]:
    """Return what a user should know about a classifier: its labels, expected accuracy and calibration."""
    lines = [f"classifier   {kind}; {labels:,} labels of {len(classes):,} classes"]
    if because:
        lines.append(f"because      {because}")
    if found is None:
        why = "no class has two labels, so no label can be left out to judge by"
        if learned:
            why = "the network has learned from these labels. Label more images to know it"
        calibration = "calibration  not measured; as a rule the probabilities are too high"
        return [*lines, f"expected     unknown: {why}", calibration]
    accuracy, calibration = found
    by, alone = f"on {judged:,} validation images", 0
    if by_folds:
        # A new image is about as often of a class without a label as one of these is alone in its class (Good 1953).
        by, alone = f"{FOLDS}-fold cross-validation on {judged:,} labels", labels - learned - judged
        by += f"; {alone} alone in their class count as wrong" if alone else ""
    by += f"; the network has learned from the other {learned:,}" if learned else ""
    right, counted = accuracy * judged, judged + alone
    low, high = (100 * x for x in wilson_interval(right, counted))
    return [
        *lines,
        f"expected     {100 * right / counted:.1f} % right, 95 % interval {low:.1f} to {high:.1f} ({by})",
        f"calibration  {calibration.said_of(judged)}",
    ]


def _read(path: Path, identity: dict[str, Any], head: nn.Module | None) -> Classifier | None:
    """Return the classifier in `path`, None where there is none or it cannot be read: it is then fitted again."""
    try:
        with safetensors.safe_open(path, "pt") as stream:
            about = json.loads(stream.metadata()["fastsuncet"])
            tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 - it is no dictionary
        if head is not None and "supports" in tensors:
            layer = NearestNeighbors(head, *(tensors[key] for key in ("supports", "labels", "temperatures")))
        else:
            layer = linear_layer(**tensors)
        kept = Classifier(layer, tuple(identity["classes"]), about["about"])
        return kept if about["identity"] == identity else None
    # RuntimeError: the layer's own check of its shapes.
    except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, IndexError, RuntimeError):
        return None
