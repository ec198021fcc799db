"""The labels of images from a CSV of (file, label)."""

import codecs
import csv
import os
import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import EXTENSIONS, NOT_READ
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.string_table import leaves_root, listed_lines

_SHOWN = 20  # wrong lines that a message shows; the rest are counted
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
    rows, wrong = _read_table(Path(table))
    names = list(dict.fromkeys(name for _, name, _ in rows))
    found = index.files.find(names).tolist()
    position = {name: -1 if leaves_root(name) else row for name, row in zip(names, found)}
    meant = _meant(index.files, [name for name in names if position[name] < 0])
    known = sorted({label for _, _, label in rows}) if classes is None else classes
    number = {label: i for i, label in enumerate(known)}
    given: dict[str, tuple[int, str]] = {}
    labels = np.full(len(index), -1, np.int64)
    for line, name, label in rows:
        first_line, first_label = given.setdefault(name, (line, label))
        if position[name] < 0:
            wrong.append((line, _missing(name, index.root, meant[name])))
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

    def parts(name: str) -> list[str]:
        return plain(name).strip().replace("\\", "/").split("/")[::-1]

    found: dict[str, list[str]] = {parts(name)[0]: [] for name in missing}
    for file in files if missing else ():
        last = parts(file)[0]
        for key in {last, os.path.splitext(last)[0]} & found.keys():
            found[key].append(file)

    def nearest(wanted: list[str]) -> list[str]:
        alike = found[wanted[0]]
        common = [len([*takewhile(lambda two: two[0] == two[1], zip(wanted, parts(file)))]) for file in alike]
        most = [file for file, count in zip(alike, common) if count == max(common)]
        return most if len(most) <= 3 else []

    return {name: nearest(parts(name)) for name in missing}


def plain(name: str) -> str:
    """Return a name in one case and one Unicode form, so that names that look alike are equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


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
                    rows.append((line, name, label))
    except OSError as error:
        raise DataError(f"cannot read the labels {table}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        text = f"{table} is not a CSV in UTF-8 (byte {byte:#x} on line {line}): save it as UTF-8 (in Excel: CSV UTF-8)"
        raise DataError(text) from error
    except csv.Error as error:
        raise DataError(f"{table} is not a CSV: {error}. Is a quote not closed?") from error
    return rows, wrong


def _separator(line: str) -> str | None:
    """Return what separates the cells of the header `file,label`; None for any other line."""
    if "file" in line and "label" in line:
        for separator in _SEPARATORS:
            cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True))
            first, second, *others = (cell.strip() for cell in [*cells, ""])
            if (first, second) == ("file", "label") and not any(others):
                return separator
    return None
