"""`fastsuncet suggest`: the unlabeled images whose labels would help most, and a page to label them on."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.commands.embed import (
    ANY_NUMBER,
    FolderPass,
    check_output,
    encoder_of,
    known_view,
    one_process,
    say_skipped,
)
from fastsuncet.commands.pages import LARGE_SIDE, SAVED, labeling_page, thumbnail
from fastsuncet.config import Config
from fastsuncet.data.dataset import HELD_OUT, NO_VALIDATION, open_images
from fastsuncet.evaluation.classifier import run_classifier, two_best
from fastsuncet.evaluation.suggestions import typical
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.datasets.label_splits import labeled_split
from pipelines.output import csv_table, say_line

POOL = 100_000  # images without a label that are looked at: more do not make better clusters
SHOWN_TO_HELP = 100  # labels in the end: the one number with a gain on both data sets (RESULTS.md)


class Suggestions(NamedTuple):
    """Images to label, and among how many they were found."""

    names: list[str]  # as a labels.csv has them, the first to label first
    labeled: int
    unlabeled: int
    page: str  # to label them on, if it was asked for


def suggest(
    where: Path | Config, output: Path, *, count: int = 50, page: bool = False, force: bool = False
) -> None:
    """Write `count` images of the run's data that have no label to `output`."""
    shown = check_output(output, (".csv",), force, page=page)
    found = suggestions(where, count, page=page)
    with disk_errors(output, "--output"):
        atomic_files.make_folder(output.parent)
        if page:  # first: of the two it is the one that a full disk refuses
            atomic_files.replace(shown, found.page.encode())
        atomic_files.replace(output, csv_table([("file", "label"), *((name, "") for name in found.names)]))
    say_line(f"wrote {output}: {count:,} of {found.unlabeled:,} images without a label")
    if (labels := found.labeled + count) > SHOWN_TO_HELP:
        say_line(f"note: with {labels:,} labels a gain over random images is undecided, see RESULTS.md")
    how = f"open {shown}, which saves {SAVED}" if page else "write each label behind its comma"
    say_line(f"next  {how}" + (", and add the lines to your CSV" if found.labeled else ""))
    if not found.labeled:
        table = SAVED if page else output
        say_line(f"then  fastsuncet init FOLDER --labels {table} --weights RUN --output again.yaml")


def suggestions(where: Path | Config, count: int, *, page: bool = False) -> Suggestions:
    """Return the images that `suggest` writes. Raises DataError where fewer than `count` have no label.

    A page also has the classes as the linear classifier of the run, which is fitted if there is none yet, guesses them.
    """
    place = one_process()
    encoder, config = encoder_of(where)
    config.require_data()
    config = config.with_values(ANY_NUMBER)
    try:
        images = open_images(config, place, validation=False)
    except DataError:
        # What a run has held out is labeled in data.csv too. Of a table of the user's own the images need not be.
        if (table := config.data.validation_table) is None or not table.endswith(HELD_OUT):
            raise
        config = config.with_values(NO_VALIDATION)
        images = open_images(config, place, validation=False)
        say_line(f"note: {table} no longer fits the images and their labels, so it is not used")
    index, split = images.train, images.split
    if config.data.split.kind == "none" and (index.labels >= 0).any():
        split = labeled_split(index, "all")
    labeled = np.zeros(len(index), bool)
    labeled[split.indices] = True
    good = index.good()
    if not len(good):
        index.require_good()
    unlabeled = good[~labeled[good]]
    drawn = np.random.default_rng(config.meta.seed).permutation(unlabeled)[:POOL]
    pool = np.sort(np.concatenate([drawn, good[labeled[good]]]))
    _require_unlabeled(len(unlabeled), count, config)
    view, taken = known_view(encoder), index.take(pool)
    work = FolderPass(encoder.module, encoder.width, taken, view, place, skip_bad=True)
    values, skipped = work.rows(), work.skipped
    undecoded = {int(pool[i]): reason for i, reason in skipped.items()}
    say_skipped({**index.bad, **undecoded}, index)
    unlabeled = np.setdiff1d(unlabeled, list(undecoded))
    pool, values = (np.delete(each, list(skipped), 0) for each in (pool, values))
    _require_unlabeled(int((~labeled[pool]).sum()), count, config)
    features, known = (torch.from_numpy(x).to(place.device) for x in (values, labeled[pool]))
    rows = typical(features, known, count, config.meta.seed)
    chosen = pool[rows.cpu().numpy()].tolist()
    names, guesses, shown = [index.name(i) for i in chosen], [], ""
    if page and len(np.unique(index.labels[pool[labeled[pool]]])) > 1:
        classifier = run_classifier(encoder, config, place, skip_bad=True)
        with torch.inference_mode():
            best = two_best(classifier.layer.to(place.device)(features[rows]))
        guesses = [
            {classifier.classes[label]: probability for label, probability in zip(*each, strict=True)}
            for each in zip(*(x.tolist() for x in best), strict=True)
        ]
    if page:
        content = index.content if index.pixels is None else index.pixels.__getitem__
        pictures = [thumbnail(content(i), LARGE_SIDE) for i in chosen]
        shown = labeling_page(names, pictures, index.classes, guesses)
    return Suggestions(names, int(labeled.sum()) + len(images.held_out or ()), len(unlabeled), shown)


def _require_unlabeled(left: int, count: int, config: Config) -> None:
    if left < count:
        images = f"images of {config.data.root or config.data.pack or config.data.kind} that can be read"
        few = f"--count {count}: only {left:,} {images} have no label; give --count {left}"
        raise DataError(few if left else f"all {images} have a label, so there is none to suggest")
