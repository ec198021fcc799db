"""The labels of images from a CSV of (file, label)."""

import codecs
import csv
import os
import string
import sys
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import EXTENSIONS, NOT_READ
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.string_table import leaves_root, listed_lines

_SHOWN = 20  # wrong lines that a message shows; the rest are counted
_DEEPEST = 30  # folders of a wrong name that are compared with those of an image
_SEPARATORS = (",", ";", "\t")  # a spreadsheet writes semicolons where the decimal sign is a comma


def with_csv_labels(
    index: ImageIndex, table: str | Path, *, classes: Sequence[str] | None = None
) -> ImageIndex:
    """Return the same images with the labels of a CSV of (file, label), and no others.

    The table is UTF-8 with the header `file,label`, or with semicolons or tabs for the commas. A file is a path below
    the index's root with "/"; a label is any text, without the spaces around it. Classes are the labels in sorted
    order, or `classes` where a training set has fixed them. A file can be listed again with the same label, and a
    header can come again, also with other separators. Empty lines and empty columns at the end are left out.

    Raises DataError with every wrong line at once, by number.
    """
    lines, names, given, wrong = _read_table(Path(table))
    found = index.files.find(names)
    known = sorted(set(given)) if classes is None else classes
    number = {label: i for i, label in enumerate(dict.fromkeys([*known, *given]))}
    numbers = np.fromiter((number[label] for label in given), np.int64, len(given))
    # For each row, the first one of the same image.
    _, first, image = np.unique(found, return_index=True, return_inverse=True)
    first = first[image]

    def problem(row: int) -> str:
        name, label, before = names[row], given[row], first[row]
        if found[row] < 0:
            return _missing(name, index.root, meant[name])
        if label != given[before]:
            return f"{name} is labeled {label!r}, but {given[before]!r} on line {lines[before]}"
        return f"label {label!r} is not one of the {len(known)} classes"

    unusable = (found < 0) | (numbers != numbers[first]) | (numbers >= len(known))
    wrong_rows = np.flatnonzero(unusable).tolist()
    # A million wrong lines can be looked for in a million files; only those that are shown are.
    shown = wrong_rows[:_SHOWN]
    meant = _meant(index.files, [names[row] for row in shown if found[row] < 0])
    wrong += [(lines[row], problem(row)) for row in shown]
    refuse_wrong_lines(table, wrong, len(wrong_rows) - len(shown))
    if not names:
        raise DataError(f"{table} labels no image: it has a header and no line after it")
    labels = np.full(len(index), -1, np.int64)
    labels[found] = numbers
    return replace(index, labels=labels, classes=tuple(known))


def _missing(name: str, root: Path | None, meant: Sequence[str]) -> str:
    """Return why `name` is no image below `root`, and which ones it can mean."""
    file = Path(name)
    if leaves_root(name):
        problem = f"{name}: paths must lead downwards from the data folder"
    elif file.suffix.lower() in NOT_READ:
        return f"{name} is of a kind that is not read: convert it to JPEG or PNG"
    elif root and str(file) == name and file.suffix.lower() in EXTENSIONS and (root / file).is_file():
        return f"{name} is newer than the index of {root}: `fastsuncet data check CONFIG` adds it"
    else:
        problem = f"no image {name} under {root}"
    if not meant:
        return problem
    # macOS writes an umlaut as two characters, which look like the one that a keyboard types.
    alike = {unicodedata.normalize("NFC", each) for each in (name, *meant)}
    looks = " Its letters have another Unicode form: copy the name from `ls`" if len(alike) == 1 else ""
    return f"{problem}; did you mean {' or '.join(meant)}?{looks}"


def _meant(files: Iterable[str], missing: Sequence[str]) -> dict[str, list[str]]:
    """Return for each missing name the files, at most three, that it can mean.

    Those have its last part and as many of its folders as any other file, whatever the case, "\\" for "/", the Unicode
    form, spaces around it and an ending that it lacks.
    """

    def ends(name: str) -> list[str]:
        """Return the last part, the last two, ..."""
        parts = plain(name).strip().replace("\\", "/").split("/")[-_DEEPEST:]
        return ["/".join(parts[-count:]) for count in range(1, len(parts) + 1)]

    found: dict[str, list[str]] = {end: [] for name in missing for end in ends(name)}
    for file in files if missing else ():
        for end in {*ends(file), *ends(os.path.splitext(file)[0])} & found.keys():
            found[end] = [*found[end], file][:4]

    def nearest(name: str) -> list[str]:
        alike = next((found[end] for end in reversed(ends(name)) if found[end]), [])
        return alike if len(alike) <= 3 else []

    return {name: nearest(name) for name in missing}


def plain(name: str) -> str:
    """Return a name in one case and one Unicode form, so that names that look alike are equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def refuse_wrong_lines(path: str | Path, wrong: Sequence[tuple[int, str]], more: int = 0) -> None:
    """Raise DataError, with the first 20 (line, problem) pairs in order, if there are any; `more` lines follow them."""
    if wrong:
        count = len(wrong) + more
        lines = [f"  line {line}: {problem}" for line, problem in sorted(wrong)[:_SHOWN]]
        lines += [f"  and {count - _SHOWN} more"] * (count > _SHOWN)
        raise DataError("\n".join([f"{path} has {count} wrong {'line' if count == 1 else 'lines'}:", *lines]))


def _read_table(table: Path) -> tuple[array, list[str], list[str], list[tuple[int, str]]]:
    """Return the lines, files and labels of the usable rows of a table, and what is wrong with its other lines."""
    usable, names, labels, wrong = array("q"), [], [], []
    try:
        # Spreadsheets put a byte-order mark before the header.
        lines = listed_lines(table.read_bytes().removeprefix(codecs.BOM_UTF8))
        # A table that was appended to another begins with a header of its own.
        headers = {number: separator for number, line in enumerate(lines) if (separator := _separator(line))}
        if not lines:
            raise DataError(f"{table} is empty: the first line must be `file,label`")
        if 0 not in headers:
            raise DataError(f"{table}: the first line must be `file,label`, not {lines[0].strip()!r}")
        for start, end in pairwise([*headers, len(lines)]):
            options = {"delimiter": headers[start], "strict": True, "skipinitialspace": True}
            reader = csv.reader(lines[start:end], **options)
            next(reader)
            for cells in reader:
                line, (name, *more) = start + reader.line_num, cells or [""]
                while more[1:] and not more[-1].strip():
                    more.pop()
                label = more[0].strip(string.whitespace) if more else ""
                if not name and not any(more):
                    continue
                if len(more) != 1:
                    fix = (
                        ": quote a name that has the separator in it, or add a missing line break"
                        if more
                        else ""
                    )
                    wrong.append((line, f"{1 + len(more)} columns instead of file,label{fix}"))
                elif not name or not label:
                    missing = "label" if name else "file name"
                    wrong.append((line, f"no {missing}: write one, or remove the line"))
                elif "\n" in label or "\r" in label:
                    wrong.append((line, "the label has a line break in it: is a quote not closed?"))
                else:
                    usable.append(line)
                    names.append(name)
                    labels.append(sys.intern(label))  # one object for all rows of a class
    except OSError as error:
        raise DataError(f"cannot read the labels {table}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        text = f"{table} is not a CSV in UTF-8 (byte {byte:#x} on line {line}): save it as UTF-8 (in Excel: CSV UTF-8)"
        raise DataError(text) from error
    except csv.Error as error:
        raise DataError(f"{table} is not a CSV: {error}. Is a quote not closed?") from error
    return usable, names, labels, wrong


def _separator(line: str) -> str | None:
    """Return what separates the cells of the header `file,label`; None for any other line."""
    if "file" in line and "label" in line:
        for separator in _SEPARATORS:
            cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
            first, second, *others = (cell.strip() for cell in [*cells, ""])
            if (first, second) == ("file", "label") and not any(others):
                return separator
    return None
