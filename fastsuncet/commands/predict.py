"""`fastsuncet predict`: the class of every image below a folder, by name, with a calibrated probability."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.commands.embed import (
    ANY_NUMBER,
    FolderPass,
    ImageInput,
    advising_skip_bad,
    check_output,
    encoder_of,
    known_view,
    one_process,
    opened,
    say_skipped,
)
from fastsuncet.commands.pages import Prediction, prediction_page
from fastsuncet.config import Config
from fastsuncet.evaluation.classifier import Classifier, best_classifier, fitted_to, two_best
from pipelines import atomic_files
from pipelines.datasets.folders import existing_folder
from pipelines.datasets.index import ImageIndex
from pipelines.output import csv_table, say_line

FORMATS = (".csv", ".parquet")
UNSURE = 0.5  # below this probability a second class, or all others together, are as likely
COLUMNS = ("file", "class", "probability", "second_class", "second_probability")


class TwoBest(nn.Module):
    """Images (B, 3, S, S) to (B, 4) float32: number and probability of the most probable class, then of the second."""

    def __init__(self, encoder: nn.Module, layer: nn.Module):
        super().__init__()
        self.encoder, self.layer = encoder, layer

    def forward(self, images: Tensor) -> Tensor:
        label, probability = two_best(self.layer(self.encoder(images)))
        return torch.stack([label.float(), probability], 2).flatten(1)


def predict(
    where: Path | Config,
    folder: Path,
    output: Path,
    *,
    batch: int = 256,
    force: bool = False,
    skip_bad: bool = False,
    page: bool = False,
) -> None:
    """Write the two most probable classes of each image below `folder` to `output`, by the run `where`."""
    shown, summary = check_output(output, FORMATS, force, page=page), ""

    def save(path: Path, rows: np.ndarray) -> None:
        nonlocal summary
        every = list(_predictions(rows, names, classifier.classes))
        _save(path, every)
        counted, summary = _summary(rows, work.index, classifier)
        if page:  # before `output` is in its place: the same command makes up for a page that failed
            found = [each for each, kept in zip(every, counted) if kept and isinstance(each, Prediction)]
            text = prediction_page(found, folder, [*classifier.about, summary])
            with disk_errors(shown, "--output"):
                # Names of files and folders are bytes: one that is not UTF-8 is shown with question marks.
                atomic_files.replace(shown, text.encode(errors="replace"))

    with advising_skip_bad(skip_bad):
        work, names, classifier = _begun(where, folder, batch, skip_bad)
        work.write(output, save, force=force)
    say_skipped(work.skipped, work.index, "; their cells are empty")
    say_line(summary)
    say_line(f"wrote {output}: {len(work.index) - len(work.skipped):,} images")
    if page:
        say_line(f"wrote {shown}")


def _summary(rows: np.ndarray, index: ImageIndex, classifier: Classifier) -> tuple[np.ndarray, str]:
    """Return which images count, bool (N,), and how sure the classifier is of them: of new ones where there are any."""
    decoded = ~np.isnan(rows[:, 1])
    new = decoded & ~fitted_to(classifier, index)
    counted = new if new.any() else decoded
    sure, labeled = rows[counted, 1], int(decoded.sum() - new.sum())
    unsure = int((sure < UNSURE).sum())
    summary = f"images       mean probability {100 * sure.mean():.1f} %; {unsure:,} of {len(sure):,} "
    summary += f"({100 * unsure / len(sure):.0f} %) below {UNSURE}"
    if labeled:
        fitted = f"the {labeled:,} labeled ones are not counted"
        summary += f"; {fitted if new.any() else 'all of them are labeled, and it is less sure of others'}"
    return counted, summary


def predictions(where: Path | Config, images: ImageInput, batch: int, skip_bad: bool) -> list[Prediction]:
    """Return the predictions of `predict` without a file, those of skipped images left out."""
    work, names, classifier = _begun(where, images, batch, skip_bad)
    found = _predictions(work.rows(), names, classifier.classes)
    return [each for each in found if isinstance(each, Prediction)]


def _begun(
    where: Path | Config, images: ImageInput, batch: int, skip_bad: bool
) -> tuple[FolderPass, Sequence[str], Classifier]:
    """Return the pass of `TwoBest` over the images, their names, and the classifier; print what this is worth."""
    if isinstance(images, (str, Path)):
        existing_folder(images)  # before a classifier is fitted
    place = one_process()
    encoder, config = encoder_of(where)
    if skip_bad:
        config = config.with_values(ANY_NUMBER)
    encoder, classifier = best_classifier(encoder, config, place, skip_bad=skip_bad)
    for line in classifier.about:
        say_line(line)
    view = known_view(encoder)
    index, names = opened(images, view.upright)
    network = TwoBest(encoder.module, classifier.layer)
    return FolderPass(network, 4, index, view, place, batch, skip_bad), names, classifier


def _predictions(
    rows: np.ndarray, names: Sequence[str], classes: tuple[str, ...]
) -> Iterator[Prediction | str]:
    """Yield the prediction of each image from its row of `TwoBest`; the file's name alone for a skipped one."""
    for name, (first, probability, second, other) in zip(names, rows.tolist(), strict=True):
        if math.isnan(first):
            yield name
        else:
            yield Prediction(name, classes[int(first)], probability, classes[int(second)], other)


def _save(path: Path, found: Iterable[Prediction | str]) -> None:
    """Write a line, or a row, for each image; the cells of a skipped one are empty but for the file."""
    rows = [(each, None, None, None, None) if isinstance(each, str) else each for each in found]
    if path.suffix == ".csv":
        rounded = [[f"{cell:.4f}" if isinstance(cell, float) else cell for cell in row] for row in rows]
        path.write_bytes(csv_table([COLUMNS, *rounded]))
        return
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    kinds = (pa.string(), pa.string(), pa.float32(), pa.string(), pa.float32())
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), kinds, strict=True)]
    parquet.write_table(pa.table(columns, names=COLUMNS), path)
