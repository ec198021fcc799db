"""The result of an evaluation with a classifier, and a picture beside it: which classes are taken for which."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fastsuncet.checkpoint.run_folder import disk_errors
from fastsuncet.metrics.results import write_result
from fastsuncet.versions import drawing_problem
from pipelines import atomic_files
from pipelines.output import say_line

NUMBERED, NAMED = 20, 60  # with more classes the matrix has no numbers in its cells, no names at its sides
CELLS = 1000  # of a side; with more classes a cell has several, and shows the largest of their shares
DOTS = 150  # with more, each wrong cell is drawn 3 x 3 cells large: a cell is a pixel or two
PAIRS, WORST = 20, 14  # lines beside the matrix
LONGEST = 20  # characters of a name that are shown


def write_with_picture(run: Path, record: dict[str, Any]) -> Path:
    """Write `record` to the results of `run` and its confusion matrix as a PNG beside it; return the record's file.

    Without matplotlib there is no picture. Raises as `write_result`, and CheckpointError for a disk that refuses.
    """
    path = write_result(run, record)
    if not drawing_problem():
        title = f"{record['run']}, {record['kind']}: {100 * record['metrics']['top1']:.1f} % right"
        title += ", of labels that it has learned from" if record.get("learned") else ""
        picture = path.with_suffix(".png")
        with disk_errors(picture):
            atomic_files.replace(picture, confusion_picture(record["classes"], title))
    return path


def written(path: Path) -> list[str]:
    """Return lines on a result's file and its picture."""
    return [f"written  {path}", f"picture  {drawing_problem() or path.with_suffix('.png')}"]


def confusion_picture(classes: dict[str, dict[str, Any]], title: str) -> bytes:
    """Return a PNG: the matrix, the most confused pairs and the least accurate classes.

    `classes` is that of `scoring.per_class`. A row is a true class, a cell its share that is predicted as the column.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    predicted = sorted({name for of in classes.values() for name in of["predicted"]})
    names = list(dict.fromkeys([*classes, *predicted]))
    column = {name: i for i, name in enumerate(names)}
    cells = [
        (column[name], column[other], count, count / of["images"])
        for name, of in classes.items()
        for other, count in of["predicted"].items()
    ]
    true, other, _, shares = map(np.array, zip(*cells))
    side = min(len(names), CELLS)
    place = np.arange(len(names)) * side // len(names)
    both = np.zeros((2, side, side))
    np.maximum.at(both, ((true != other).astype(int), place[true], place[other]), shares)
    right, wrong = both
    if len(names) > DOTS:
        wrong = np.lib.stride_tricks.sliding_window_view(np.pad(wrong, 1), (3, 3)).max((2, 3))
    figure = Figure(figsize=(14, 8.4), dpi=150, layout="constrained")
    matrix, text = figure.subplots(1, 2, width_ratios=(9, 5))
    # The square root makes a class of which one image in fifty is wrong visible.
    scale, edge = PowerNorm(0.5, 0, 1), len(names) - 0.5
    for part, colors in ((wrong, "Reds"), (right, "Blues")):
        drawn = matrix.imshow(np.ma.masked_equal(part, 0), cmap=colors, norm=scale, interpolation="nearest")
        drawn.set_extent((-0.5, edge, edge, -0.5))
    matrix.set(xlabel="predicted", ylabel="true class")
    matrix.xaxis.set_label_position("top")
    if len(names) <= NAMED:
        size = 11 if len(names) <= NUMBERED else 7
        shown = list(map(shown_name, names))
        matrix.set_xticks(range(len(names)), shown, rotation=90, fontsize=size, parse_math=False)
        matrix.set_yticks(range(len(names)), shown, fontsize=size, parse_math=False)
    if len(names) <= NUMBERED:
        for row, at, images, share in cells:
            color = "white" if share > 0.35 else "black"
            matrix.text(at, row, f"{images:,}", ha="center", va="center", color=color, fontsize=10)
    text.set_axis_off()
    lines = "\n".join(_most_confused(classes))
    style = {"va": "top", "family": ["monospace", "sans-serif"], "fontsize": 8.5, "parse_math": False}
    # Out of the layout, which would else make both sides wider than the picture and cut the names below the matrix.
    text.text(0, 1, lines, **style, transform=text.transAxes).set_in_layout(False)
    figure.suptitle(title, fontsize=13, parse_math=False)
    stream = io.BytesIO()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        figure.savefig(stream, format="png")
    if any("missing from" in str(each.message) for each in found):
        say_line(
            "note     names have letters that matplotlib's fonts lack: they are boxes in the picture. The line "
            "`font.sans-serif: NAME` in a file `matplotlibrc` of this folder chooses an installed font"
        )
    return stream.getvalue()


def shown_name(name: str) -> str:
    """Return a name that can be drawn, of a long one both ends: a folder's name is bytes, and can hold line breaks."""
    cut = name if len(name) <= LONGEST else f"{name[:9]}…{name[-(LONGEST - 10) :]}"
    return "".join(x if x.isprintable() else "?" for x in cut)


def _most_confused(classes: dict[str, dict[str, Any]]) -> list[str]:
    """Return, in words, the pairs of classes with most images and the classes of the lowest accuracy."""
    pairs = [
        (count, of["images"], name, other)
        for name, of in classes.items()
        for other, count in of["predicted"].items()
        if other != name
    ]
    pairs.sort(key=lambda pair: -pair[0])
    worst = sorted(classes.items(), key=lambda each: each[1]["accuracy"])[:WORST]
    wrong, images = sum(pair[0] for pair in pairs), sum(of["images"] for of in classes.values())
    return [
        f"most confused, of {wrong:,} wrong of {images:,}",
        *(
            f"{n:>5,} of {of:>5,}  {shown_name(name)} as {shown_name(other)}"
            for n, of, name, other in pairs[:PAIRS]
        ),
        "",
        "least accurate classes",
        *(f"{100 * of['accuracy']:>5.1f} % of {of['images']:>5,}  {shown_name(name)}" for name, of in worst),
    ]
