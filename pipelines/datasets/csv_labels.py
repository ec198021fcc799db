"""The labels of images from a CSV of (file, label)."""

import codecs
import csv
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.string_table import leaves_root, listed_lines

_SHOWN = 20  # wrong lines that a message shows; the rest are counted


def with_csv_labels(
    index: ImageIndex, table: str | Path, *, classes: Sequence[str] | None = None
) -> ImageIndex:
    """Return the same images with the labels of a CSV of (file, label), and no others.

    The table is UTF-8 with the header `file,label`. A file is a path below the index's root with "/"; a label
    is any text, without the spaces around it. Classes are the labels in sorted order, or `classes` where a
    training set has fixed them. A file can be listed again with the same label, and the header can come again.

    Raises DataError with every wrong line at once, by number.
    """
    rows, wrong = _read_table(Path(table))
    names = list(dict.fromkeys(name for _, name, _ in rows))
    position = dict(zip(names, index.files.find(names).tolist()))
    known = sorted({label for _, _, label in rows}) if classes is None else classes
    number = {label: i for i, label in enumerate(known)}
    given: dict[str, tuple[int, str]] = {}
    labels = np.full(len(index), -1, np.int64)
    for line, name, label in rows:
        first_line, first_label = given.setdefault(name, (line, label))
        if position[name] < 0:
            wrong.append((line, f"no image {name} under {index.root}"))
        elif label != first_label:
            wrong.append((line, f"{name} is labeled {label!r}, but {first_label!r} on line {first_line}"))
        elif label not in number:
            wrong.append((line, f"label {label!r} is not one of the {len(known)} classes"))
        else:
            labels[position[name]] = number[label]
    refuse_wrong_lines(table, wrong)
    if not rows:
        raise DataError(f"{table} labels no image: it has a header and no line after it")
    return replace(index, labels=labels, classes=tuple(known))


def refuse_wrong_lines(path: str | Path, wrong: Sequence[tuple[int, str]]) -> None:
    """Raise DataError, with the first 20 (line, problem) pairs in order, if there are any."""
    if wrong:
        lines = [f"  line {line}: {problem}" for line, problem in sorted(wrong)[:_SHOWN]]
        lines += [f"  and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        noun = "line" if len(wrong) == 1 else "lines"
        raise DataError("\n".join([f"{path} has {len(wrong)} wrong {noun}:", *lines]))


def _read_table(table: Path) -> tuple[list[tuple[int, str, str]], list[tuple[int, str]]]:
    """Return the usable (line, file, label) rows of a table, and what is wrong with its other lines."""
    rows, wrong = [], []
    try:
        # Spreadsheets put a byte-order mark before the header.
        lines = listed_lines(table.read_bytes().removeprefix(codecs.BOM_UTF8))
        reader = csv.reader(lines, strict=True, skipinitialspace=True)
        header = next(reader, [])
        if [cell.strip() for cell in header] != ["file", "label"]:
            if not header:
                raise DataError(f"{table} is empty: the first line must be `file,label`")
            hint = ": separate them by commas, not semicolons" if ";" in "".join(header) else ""
            raise DataError(f"{table}: the first line must be `file,label`, not {','.join(header)!r}{hint}")
        for cells in filter(None, reader):
            line, name, label = reader.line_num, cells[0], cells[-1].strip(string.whitespace)
            if len(cells) != 2:
                wrong.append((line, f"{len(cells)} columns instead of file,label"))
            elif (name, label) == ("file", "label"):
                continue  # the header of a table that was appended to another
            elif not name or not label:
                wrong.append((line, f"no {'label' if name else 'file name'}: write one, or remove the line"))
            elif leaves_root(name):
                wrong.append((line, f"{name}: paths must lead downwards from the data folder"))
            else:
                rows.append((line, name, label))
    except OSError as error:
        raise DataError(f"cannot read the labels {table}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        text = f"{table} is not a CSV in UTF-8 (byte {byte:#x} on line {line}): save it as UTF-8"
        raise DataError(text) from error
    except csv.Error as error:
        raise DataError(f"{table} is not a CSV: {error}. Is a quote not closed?") from error
    return rows, wrong
