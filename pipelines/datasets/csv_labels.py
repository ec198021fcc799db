"""The labels of images from a CSV of (file, label)."""

import csv
import os
import sys
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import EXTENSIONS, NOT_READ
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.names import leaves_root, listed_lines

_MARKS = ",;\t"  # between the columns
_HEADERS = tuple(f"file{mark}label" for mark in _MARKS)
_SHOWN = 20  # wrong lines that a message shows; the rest are counted


def with_csv_labels(
    index: ImageIndex, table: str | Path, *, classes: Sequence[str] | None = None
) -> ImageIndex:
    """Return the same images with the labels of a CSV of (file, label), and no others.

    The table is UTF-8 with the header `file,label` in any letter case, or with semicolons or tabs for the commas. A
    file is a path below the index's root with "/"; a label is any text without invisible characters, less the spaces
    around it. Classes are the labels in sorted order, or `classes` where a training set has fixed them. A file can be
    listed again with the same label, and the header can come again, also with another separator. Empty lines and empty
    columns at the end are left out.

    Raises DataError with every wrong line at once, by number.
    """
    lines, names, given, wrong = _read_table(Path(table), classes or ())
    known = sorted(set(given)) if classes is None else classes
    number = {label: i for i, label in enumerate(known)}
    labels, missing = [-1] * len(index), []
    for line, name, label, i in zip(lines, names, given, index.find(names).tolist()):
        if i < 0:
            missing.append((line, name))
        elif label not in number:
            wrong.append((line, f"label {label!r} is not one of the {len(known)} classes"))
        elif labels[i] not in (-1, number[label]):
            wrong.append((line, f"{name} is labeled {label!r}, but {known[labels[i]]!r} on an earlier line"))
        else:
            labels[i] = number[label]
    # A million missing names can be looked for in a million files; only those that are shown are.
    shown = missing[:_SHOWN]
    meant = _meant(index.files, [name for _, name in shown])
    wrong += [(line, _missing(name, index.root, meant[name])) for line, name in shown]
    if wrong:
        count = len(wrong) + len(missing) - len(shown)
        text = [f"  line {line}: {problem}" for line, problem in sorted(wrong)[:_SHOWN]]
        text += [f"  and {count - _SHOWN} more"] * (count > _SHOWN)
        text += [f"  {called}"] if missing and (called := index.naming()) else []
        raise DataError("\n".join([f"{table} has {count} wrong {'line' if count == 1 else 'lines'}:", *text]))
    if not names:
        raise DataError(f"{table} labels no image: it has a header and no line after it")
    return replace(index, labels=np.array(labels, np.int64), classes=tuple(known))


def _missing(name: str, root: Path | None, meant: Sequence[str]) -> str:
    """Return why `name` is no image below `root`, and which ones it can mean."""
    problem, ending = f"no image {name} under {root}", os.path.splitext(name)[1].lower()
    if leaves_root(name):
        problem = f"{name}: paths must lead downwards from the data folder"
    elif ending in NOT_READ:
        return f"{name} is of a kind that is not read: convert it to JPEG or PNG"
    elif root and ending in EXTENSIONS and os.path.normpath(name) == name and (root / name).is_file():
        return f"{name} is newer than the index of {root}: `fastsuncet data check CONFIG` adds it"
    if not meant:
        return problem
    # macOS writes an umlaut as two characters, which look like the one that a keyboard types.
    alike = {unicodedata.normalize("NFC", each) for each in (name, *meant)}
    looks = " Its letters have another Unicode form: copy the name from `ls`" if len(alike) == 1 else ""
    return f"{problem}; did you mean {' or '.join(meant)}?{looks}"


def _meant(files: Iterable[str], missing: Sequence[str]) -> dict[str, list[str]]:
    """Return for each missing name the files, at most three, that it can mean.

    Those have its last part and more of its folders than others, whatever the case, "\\" for "/", the Unicode form,
    spaces around it and an ending that it lacks.
    """

    def parts(name: str) -> list[str]:
        return plain(name).strip().replace("\\", "/").split("/")[::-1]

    wanted, found = {parts(name)[0] for name in missing}, defaultdict(list)
    for file in files if missing else ():
        last = parts(file)[0]
        for end in {last, os.path.splitext(last)[0]} & wanted:
            found[end].append(file)

    def nearest(name: str) -> list[str]:
        mine = parts(name)
        alike = closer = found[mine[0]]
        for depth in range(2, len(mine) + 1):
            if not (closer := [file for file in closer if parts(file)[:depth] == mine[:depth]]):
                break
            alike = closer
        return alike if len(alike) <= 3 else []

    return {name: nearest(name) for name in missing}


def plain(name: str) -> str:
    """Return a name in one case and one Unicode form, so that names that look alike are equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _read_table(
    table: Path, classes: Sequence[str]
) -> tuple[array, list[str], list[str], list[tuple[int, str]]]:
    """Return the lines, files and labels of the usable rows of a table, and what is wrong with its other lines."""
    usable, names, labels, wrong = array("q"), [], [], []
    try:
        for line, cells in _rows(table, listed_lines(table.read_bytes())):
            while cells[2:] and not cells[-1].strip():
                cells.pop()
            name, label = cells[0], cells[1].strip() if cells[1:] else ""
            if not name or not label:
                missing = "label" if name else "file name"
                wrong.append((line, f"no {missing}: write one, or remove the line"))
            elif len(cells) != 2:
                fix = "quote a name that has the separator in it, or add a missing line break"
                wrong.append((line, f"{len(cells)} columns instead of file,label: {fix}"))
            elif label.lower().endswith(_HEADERS):
                wrong.append((line, "the label ends in a header: add the missing line break before it"))
            elif "\n" in label or "\r" in label:
                wrong.append((line, "the label has a line break in it: is a quote not closed?"))
            # A folder can have such a name.
            elif not label.isprintable() and label not in classes and any(map(_invisible, label)):
                wrong.append((line, f"the label {label!r} has an invisible character: remove it"))
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
    return usable, names, labels, wrong


def _invisible(character: str) -> bool:
    # Spaces of other widths are seen, and words in Persian and Hindi need the two joiners.
    return unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") and character not in "\u200c\u200d"


def _rows(table: Path, lines: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the last line and the cells of each row that is not empty.

    docs/first_run.md appends one table to another: each header says how the rows below it are separated.
    """
    heads = [(i, mark) for i, line in enumerate(lines) if (mark := _separator(line))]
    if not heads or heads[0][0] > 0:
        first = lines[0].strip("\ufeff \r\n") if lines else ""
        hint = "Write this header, with no line above it and these two columns only, in this order"
        raise DataError(f"{table}: the first line must be `file,label`, not {first!r}. {hint}")
    for (head, mark), end in zip(heads, [*(i for i, _ in heads[1:]), len(lines)]):
        reader = csv.reader(lines[head + 1 : end], delimiter=mark, strict=True, skipinitialspace=True)
        try:
            yield from ((head + 1 + reader.line_num, cells) for cells in reader if any(cells))
        except csv.Error as error:
            line = f"line {head + 1 + reader.line_num}: {error}"
            raise DataError(f"{table}, {line}. Is a quote not closed, or a space behind one?") from error


def _separator(line: str) -> str | None:
    """Return what separates the columns of the header `file,label`; None of another line."""
    # A spreadsheet writes a byte-order mark before it, and semicolons where the decimal sign is a comma.
    for mark in _MARKS if line.lstrip('\ufeff" ')[:4].lower() == "file" else "":
        words = [cell.strip('\ufeff" \r\n').lower() for cell in line.split(mark)]
        if words[:2] == ["file", "label"] and not any(words[2:]):
            return mark
    return None
