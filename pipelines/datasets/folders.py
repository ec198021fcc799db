"""Folders of images, and labels from folders or from a CSV, as indexes."""

import codecs
import csv
import os
import string
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.image_headers import EXTENSIONS, NOT_READ, Progress, read_headers
from pipelines.datasets.index import GONE, UNSURE, FolderTimes, ImageIndex, folder_time, folder_times
from pipelines.datasets.string_table import Names, leaves_root, links_out, listed_lines
from pipelines.output import say_line

# Files that a start compares with a kept index, of those in folders with the time that they had.
SAMPLE = 1000
_SHOWN = 20  # wrong lines that a message shows; the rest are counted


def image_folder(root: str | Path, progress: Progress | None = None, *, upright: bool = False) -> ImageIndex:
    """Return the images of ImageNet's layout: an image's class is the folder directly under `root` that it lies in.

    Takes .jpg .jpeg .png .webp .bmp .tif .tiff in any case, at any depth below the class folder; leaves out
    hidden files and files directly under `root`. Prints how many .heic and .gif files it leaves out. Classes are the
    folders in order of their names, images are in order of their paths. With `upright` they are read as their EXIF tags
    say, and else as they are stored.

    Raises DataError: no such folder, no class folder, a class without an image, a link that leads out of `root` or to
    a folder.
    """
    root = _existing(root)
    tree = _listed(root, classes=True)
    folders = sorted(name for name in tree.times if name and "/" not in name)
    if not folders:
        raise DataError(
            f"{root} has no class folders: an image folder is {root}/CLASS/IMAGE. For images without class "
            f"folders use data.kind: images, or csv with a file of labels"
        )
    if set(folders) <= {"train", "val", "valid", "validation", "test"}:
        raise DataError(f"{root} holds {', '.join(folders)}, not class folders: name one of those instead")
    say_not_read(root, tree.not_read)
    inside = [name.partition("/")[0] for name in tree.files]
    if empty := sorted(set(folders) - set(inside)):
        raise DataError(f"{len(empty)} class folders of {root} hold no image: {', '.join(empty[:5])}")
    number = {name: label for label, name in enumerate(folders)}
    labels = np.array([number[name] for name in inside], np.int64)
    index = with_headers(root, tree.files, labels, tuple(folders), progress, upright=upright)
    return replace(index, folders=FolderTimes.of(tree.times))


def with_classes(index: ImageIndex, classes: tuple[str, ...]) -> ImageIndex:
    """Return the same images with their classes numbered as in `classes`, such as the training set's.

    Where those are `class_numbers`, they are taken as numbers of this index's classes in order. Raises DataError when
    an image's class is not in `classes`.
    """
    if index.classes == classes or classes == class_numbers(len(index.classes)):
        return replace(index, classes=classes)
    place = {name: number for number, name in enumerate(classes)}
    shown = [index.classes[label] for label in np.unique(index.labels[index.labels >= 0])]
    if unknown := [name for name in shown if name not in place]:
        raise DataError(
            f"{index.root} has {len(unknown)} classes that no training image has: {', '.join(unknown[:5])}"
        )
    # The last place is that of the label -1.
    number = np.array([*(place.get(name, -1) for name in index.classes), -1], np.int64)
    return replace(index, labels=number[index.labels], classes=classes)


def class_numbers(count: int) -> tuple[str, ...]:
    """Return the names of classes that are known by their numbers only, as in shards with KEY.cls."""
    return tuple(f"class {number}" for number in range(count))


def image_tree(root: str | Path, progress: Progress | None = None, *, upright: bool = False) -> ImageIndex:
    """Return every image below `root`, at any depth, none labeled. Files, order and errors as in `image_folder`."""
    root = _existing(root)
    tree = _listed(root, classes=False)
    say_not_read(root, tree.not_read)
    if not tree.files:
        raise DataError(f"{root} holds no image ({', '.join(sorted(EXTENSIONS))})")
    index = with_headers(root, tree.files, np.full(len(tree.files), -1), (), progress, upright=upright)
    return replace(index, folders=FolderTimes.of(tree.times))


def image_list(files: Sequence[str | os.PathLike[str]], *, upright: bool = False) -> ImageIndex:
    """Return the images in `files`, in their order, none labeled; names are paths below the folder that all lie in.

    Raises DataError for no file and for one that is listed twice. One that is missing is a bad image.
    """
    if not files:
        raise DataError("no images were given")
    paths = [os.path.abspath(os.path.expanduser(file)) for file in files]
    root = os.path.commonpath([os.path.dirname(path) for path in paths])
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise DataError(f"{len(twice)} files were given more than once, the first {twice[0]}")
    names = [os.path.relpath(path, root) for path in paths]
    return with_headers(Path(root), names, np.full(len(names), -1), (), upright=upright)


def look_again(index: ImageIndex) -> tuple[ImageIndex, int]:
    """Return a kept index of a whole folder as its files are now, and how many new images it lacks.

    A folder with the modification time that it had holds the same files. Files of other folders, and SAMPLE files drawn
    anew each time, are compared by length and time; if one of the sample has changed, all files are. What was rewritten
    in place and is not in the sample has its length compared when it is read (`pipelines.loader`). Raises DataError for
    files that are gone, as `ImageIndex.refreshed`, and for folders that cannot be listed.
    """
    if index.root is None or index.folders is None:
        return index.refreshed(), 0
    root, kept = index.root, index.folders
    now = folder_times(root, kept.names)
    times = dict(zip(kept.names, now.tolist()))
    moved = {kept.names[i] for i in np.flatnonzero((now != kept.times) | (now == UNSURE)).tolist()}
    rows = [i for i, name in enumerate(index.files) if name.rpartition("/")[0] in moved] if moved else []
    known, added = {index.files[i] for i in rows}, 0
    for name in moved:
        if times[name] != GONE:
            tree = _listed(root, name, classes=bool(index.classes), known=times)
            new = len(set(tree.files) - known)
            added += new
            # While the index lacks something of it, it is listed at each start, so that the images are named again.
            if new or len(tree.times) > 1:
                times[name] = UNSURE
    now = np.array([*times.values()], np.int64)
    if (now != kept.times).any():
        index = replace(index, folders=FolderTimes(kept.names, now))
    looked_at = index.refreshed(np.array(rows, np.int64))
    sample = np.random.default_rng().permutation(len(index))[:SAMPLE]
    return looked_at if looked_at.refreshed(sample) is looked_at else looked_at.refreshed(), added


def with_headers(
    root: Path,
    files: Sequence[str],
    labels: np.ndarray,
    classes: tuple[str, ...],
    progress: Progress | None = None,
    *,
    upright: bool = False,
) -> ImageIndex:
    """Return the index of `files` below `root`, with the sizes that their headers give."""
    sizes, stamps, bad = read_headers(root, names := Names.of(files), progress, upright=upright)
    return ImageIndex(root, names, labels, classes, sizes, stamps=stamps, bad=bad, upright=upright)


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
    place = dict(zip(names, index.files.find(names).tolist()))
    known = sorted({label for _, _, label in rows}) if classes is None else classes
    number = {label: i for i, label in enumerate(known)}
    given: dict[str, tuple[int, str]] = {}
    labels = np.full(len(index), -1, np.int64)
    for line, name, label in rows:
        first_line, first_label = given.setdefault(name, (line, label))
        if place[name] < 0:
            wrong.append((line, f"no image {name} under {index.root}"))
        elif label != first_label:
            wrong.append((line, f"{name} is labeled {label!r}, but {first_label!r} on line {first_line}"))
        elif label not in number:
            wrong.append((line, f"label {label!r} is not one of the {len(known)} classes"))
        else:
            labels[place[name]] = number[label]
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


def _existing(root: str | Path) -> Path:
    root = Path(os.path.expanduser(root))
    if not root.is_dir():
        raise DataError(f"no data folder {root}" + (": it is a file" if root.exists() else ""))
    return root


def _entries(folder: str | Path) -> Iterator[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"cannot list {folder}: {error.strerror or error}") from error


def _is_folder(entry: os.DirEntry, root: Path) -> bool:
    try:
        folder = entry.is_dir()
    except OSError as error:  # a link to itself
        raise DataError(f"cannot follow {entry.path}: {error.strerror or error}") from error
    if folder and entry.is_symlink():
        raise DataError(
            f"{entry.path} is a link to a folder; links to folders are not followed, so that nothing outside "
            f"{root} is read and nothing twice. Point data.root at the folder itself, or make a copy of hard "
            f"links, which takes no space: cp -rlL SOURCE TARGET"
        )
    return folder


def say_not_read(root: Path, not_read: Mapping[str, int]) -> None:
    """Print how many images of each kind no decoder reads, if there are any."""
    if not_read:
        kinds = " and ".join(f"{count:,} {ending}" for ending, count in sorted(not_read.items()))
        say_line(f"note: {kinds} files below {root} are not read: convert them to JPEG or PNG")


class Tree(NamedTuple):
    """What a folder holds."""

    files: list[str]  # paths of images, with "/", sorted
    times: dict[str, int]  # of each folder: its modification time before it was listed, in ns, or UNSURE
    not_read: Counter[str]  # ending -> images that no decoder reads


def _listed(root: Path, start: str = "", *, classes: bool, known: Collection[str] = ()) -> Tree:
    """Return the images in and below root/start, but with `classes` those directly under the root.

    Folders below `start` that are `known` are left out.
    """
    tree, waiting = Tree([], {}, Counter()), [start]
    while waiting:
        below = waiting.pop()
        folder, prefix = os.path.join(root, below), f"{below}/" if below else ""
        tree.times[below] = folder_time(folder)
        for entry in _entries(folder):
            name = entry.name
            if _is_folder(entry, root):
                if prefix + name not in known:
                    waiting.append(prefix + name)
            elif classes and not below:
                continue
            elif (ending := name[name.rfind(".") :].lower()) in EXTENSIONS:
                if entry.is_symlink() and links_out(entry.path, root):
                    raise DataError(
                        f"{entry.path} is a link that leads out of {root}; put the file itself there"
                    )
                tree.files.append(prefix + name)
            elif ending in NOT_READ:
                tree.not_read[ending] += 1
    tree.files.sort()
    return tree
