"""Folders of images as indexes, labels from the names of folders, and what has changed in a folder since."""

import contextlib
import os
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipelines.data_errors import LOST, DataError
from pipelines.datasets import image_headers
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.names import as_lines, links_out, passed_over
from pipelines.output import counted, first_five, say_line

# Files that a start compares with a kept index where all folders have the time that they had.
SAMPLE = 1000
# In place of a folder's time in ns: it cannot be found, or it is so new that another change could leave it as it is.
UNSURE = -1
_TICK = 2_000_000_000  # ns; the times of some file systems have steps of two seconds


def image_folder(root: str | Path, *, upright: bool = False) -> ImageIndex:
    """Return the images of ImageNet's layout: an image's class is the folder directly under `root` that it lies in.

    Takes .jpg .jpeg .png .webp .bmp .tif .tiff in any case, at any depth below the class folder; leaves out
    what `passed_over` names and files directly under `root`. Prints how many .heic and .gif files it
    leaves out. Classes are the folders in order of their names, images are in order of their paths. With
    `upright` they are read as their EXIF tags say, and else as they are stored.

    Raises DataError: no such folder, no class folder, a class without an image, a link that leads out of `root` or to
    a folder.
    """
    root = existing_folder(root)
    files, times = _listed(root, classes=True)
    folders = sorted(name for name in times if name and "/" not in name)
    if not folders:
        raise DataError(
            f"{root} has no class folders: an image folder is {root}/CLASS/IMAGE. For images without class "
            f"folders use data.kind: images, or csv with a file of labels"
        )
    if set(folders) <= {"train", "val", "valid", "validation", "test"}:
        raise DataError(f"{root} holds {', '.join(folders)}, not class folders: name one of those instead")
    inside = [name.partition("/")[0] for name in files]
    if empty := sorted(set(folders) - set(inside)):
        count = counted(len(empty), "class folder")
        raise DataError(f"{count} of {root} without an image: {first_five(empty)}")
    number = {name: label for label, name in enumerate(folders)}
    labels = np.array([number[name] for name in inside], np.int64)
    return with_headers(root, files, labels, tuple(folders), upright, folders=times)


def image_tree(root: str | Path, *, upright: bool = False) -> ImageIndex:
    """Return every image below `root`, at any depth, none labeled. Files, order and errors as in `image_folder`."""
    root = existing_folder(root)
    files, times = _listed(root, classes=False)
    if not files:
        raise DataError(f"{root} holds no image ({', '.join(sorted(image_headers.EXTENSIONS))})")
    return with_headers(root, files, np.full(len(files), -1), (), upright, folders=times)


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

    A folder with the modification time that it had holds the same files. Where all folders have theirs, the bad
    images and SAMPLE files drawn anew each time are compared by length and time; if one of them or a folder has
    changed, all files are. What was rewritten in place and is not in the sample has its length compared when it is read
    (`pipelines.loader`). Raises DataError for files that are gone and for folders that cannot be listed, OSError where
    the disk fails.
    """
    root, kept, added = index.root, index.folders, 0
    if root is None or index.stamps is None:
        return index, 0
    if kept is not None:  # else a list of files
        names = list(kept)
        times = image_headers.in_threads(lambda i: folder_time(os.path.join(root, names[i])), len(names))
        if times == list(kept.values()) and UNSURE not in times:
            sample = np.random.default_rng().permutation(len(index))[:SAMPLE]
            sampled = _compared(index, root, np.union1d(sample, list(index.bad)).astype(int))
            if sampled is index:
                return index, 0
            index = sampled
        else:
            files, now = _listed(root, classes=bool(index.classes))
            added = len(set(files).difference(index.files))
            # While the index lacks an image, all is listed at each start, so that the new images are counted again.
            index = index if added or now == kept else replace(index, folders=now)
    return _compared(index, root, np.arange(len(index))), added


def _compared(index: ImageIndex, root: Path, rows: np.ndarray) -> ImageIndex:
    """Return an index with the headers of those of the images `rows` read again that have changed; itself for none.

    A file has changed when its size in bytes or its modification time has. Other bad images stay bad.
    """
    assert index.stamps is not None
    names = [index.name(i) for i in rows.tolist()]

    def stamp_now(row: int) -> tuple[int, int]:
        try:
            return image_headers.stamp(os.stat(os.path.join(root, names[row])))
        except OSError as error:  # no file, or a folder without access: reading the header gives the reason
            if error.errno in LOST:
                raise
            return -1, -1

    now = np.array(image_headers.in_threads(stamp_now, len(names)), np.int64).reshape(-1, 2)
    before = index.stamps[rows]
    gone = rows[(now[:, 0] < 0) & (before[:, 0] >= 0)].tolist()
    if gone:
        raise DataError(
            f"{len(gone)} of the {len(index)} files in the index cannot be found under {root}: "
            f"{index.some(gone)}. Correct data.root, or make the index again with `fastsuncet data check CONFIG`"
        )
    changed = rows[(now != before).any(axis=1)].tolist()
    if not changed:
        return index
    labels = index.labels[changed]
    again = with_headers(root, [index.name(i) for i in changed], labels, index.classes, upright=index.upright)
    sizes, stamps = index.sizes.copy(), index.stamps.copy()
    sizes[changed], stamps[changed] = again.sizes, again.stamps
    new = set(changed)
    bad = {i: reason for i, reason in index.bad.items() if i not in new}
    bad |= {changed[row]: reason for row, reason in again.bad.items()}
    every = tuple(sorted(new.union(index.changed)))
    return replace(index, sizes=sizes, stamps=stamps, bad=dict(sorted(bad.items())), changed=every)


def folder_time(folder: str | os.PathLike[str]) -> int:
    """Return the time in ns at which a file last came to a folder, left it or was renamed, or UNSURE."""
    try:
        changed = os.stat(folder).st_mtime_ns
    except OSError:
        return UNSURE
    return changed if 0 <= changed < time.time_ns() - _TICK else UNSURE


def with_headers(
    root: Path,
    files: Sequence[str],
    labels: np.ndarray,
    classes: tuple[str, ...],
    upright: bool = False,
    folders: Mapping[str, int] | None = None,
) -> ImageIndex:
    """Return the index of `files` below `root`, with the sizes that their headers give.

    A file that cannot be used is a bad image. Raises OSError where the disk fails.
    """
    as_lines(files)  # raises DataError for a name that cannot be kept
    if len(files) >= 100_000:
        say_line(f"reading the headers of {len(files):,} images in {root}")
    stamps = np.full((len(files), 2), -1, np.int64)

    def opened(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NONBLOCK)  # a pipe would wait for its writer

    def size_of(row: int) -> tuple[int, int]:
        path, size = os.path.join(root, files[row]), None
        # No file, or no access: PIL gives the reason.
        with contextlib.suppress(OSError), open(path, "rb", buffering=0, opener=opened) as file:
            # The stamp first: a file that changes while it is read is then seen as changed the next time.
            status = os.fstat(file.fileno())
            stamps[row] = image_headers.stamp(status)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("not a regular file")
            size = image_headers.jpeg_size(file.fileno(), upright)
        return size or image_headers.image_size(path, upright=upright)

    sizes, bad = image_headers.read_sizes(size_of, len(files), root)
    return ImageIndex(
        root, files, labels, classes, sizes, stamps=stamps, bad=bad, upright=upright, folders=folders
    )


def existing_folder(root: str | Path) -> Path:
    """Return the folder `root`, with ~ for the user's own. Raises DataError where it is none."""
    root = Path(os.path.expanduser(root))
    if not root.is_dir():
        raise DataError(f"no data folder {root}" + (": it is a file" if root.exists() else ""))
    return root


def entries(folder: str | Path) -> Iterator[os.DirEntry]:
    """Yield what is in a folder and neither hidden nor of the system. Raises DataError where it cannot be listed."""
    try:
        with os.scandir(folder) as found:
            yield from (entry for entry in found if not passed_over(entry.name))
    except OSError as error:
        if error.errno in LOST:
            raise
        raise DataError(f"cannot list {folder}: {error.strerror or error}") from error


def _listed(root: Path, *, classes: bool) -> tuple[list[str], dict[str, int]]:
    """Return the images below `root`, sorted, but with `classes` none of those directly under it.

    And `folder_time` of each folder, sorted, before it was listed. Prints how many images of each kind are left out
    because no decoder reads them.
    """
    files, times, not_read, waiting = [], {}, Counter(), [""]
    while waiting:
        below = waiting.pop()
        folder, prefix = os.path.join(root, below), f"{below}/" if below else ""
        times[below] = folder_time(folder)
        for entry in entries(folder):
            name, is_link = entry.name, entry.is_symlink()
            if is_link and os.path.isdir(entry.path):
                raise DataError(
                    f"{entry.path} is a link to a folder; links to folders are not followed, so that nothing outside "
                    f"{root} is read and nothing twice. Give the path of that folder itself, or make a copy of hard "
                    f"links, which takes no space: cp -rlL SOURCE TARGET"
                )
            if entry.is_dir(follow_symlinks=False):
                waiting.append(prefix + name)
            elif classes and not below:
                continue
            elif (ending := name[name.rfind(".") :].lower()) in image_headers.EXTENSIONS:
                if is_link and links_out(entry.path, root):
                    raise DataError(f"{entry.path} is a link that leads out of {root}: put the file there")
                files.append(prefix + name)
            elif ending in image_headers.NOT_READ:
                not_read[ending] += 1
    if not_read:
        kinds = " and ".join(f"{count:,} {ending}" for ending, count in sorted(not_read.items()))
        say_line(f"note: {kinds} files below {root} are not read: convert them to JPEG or PNG")
    return sorted(files), dict(sorted(times.items()))
