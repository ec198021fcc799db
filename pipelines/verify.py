"""Find the images that cannot be used, and say why: all files before training, or those of a step that failed.

A clean first epoch proves nothing: a truncated file can fail only once a crop reaches the missing rows, and DALI can
refuse what PIL reads, often without naming the file. So `check` decodes every image once, with the decoder that trains.
"""

import errno
import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from pipelines.backend import Backend, LoaderOptions, choose_backend
from pipelines.data_errors import LOST, DataError
from pipelines.datasets.image_headers import image_size, in_threads
from pipelines.datasets.index import ImageIndex
from pipelines.engines import engine_of
from pipelines.output import first_five, show_progress
from pipelines.sampling.step_plan import EvaluationPlan

# The kinds of a JPEG's segments: all but those without a length, and the pixels.
_SEGMENTS = {*range(0xC0, 0xD0), *range(0xDB, 0xFF)}
_BATCH = 32  # images decoded at a time ...
_BATCH_PIXELS = 64_000_000  # ... fewer where they are large: 200 MB of uint8 RGB


def check(
    index: ImageIndex, backend: Backend = "auto", *, device: Literal["cpu", "gpu"] = "cpu", threads: int = 2
) -> ImageIndex:
    """Check every image of a new index: whole decode to the header's size, JPEG end marker, checksum in a pack.

    The result has the bad images, those of `index` among them, for `save_index` to keep.

    `backend` "dali" decodes with DALI on `device` ("cpu" or "gpu"), "torchvision" with PIL, "auto" with DALI where it
    is installed. An image that decodes to wrong pixels without an error (a flipped bit inside a JPEG) is found only in
    a pack.

    Raises DataError for an absent back-end, and when the decoder refuses a whole batch that PIL reads: then the decoder
    has failed, not the files. No content of a file raises. Raises OSError where the disk fails.
    """
    options = LoaderOptions(choose_backend(backend), device, threads=threads, view_operator=False)
    bad, refused = dict(index.bad), []
    good = index.good()
    # Powers of two, so that images of like sizes are decoded together.
    batches = (_BATCH_PIXELS // index.sizes[good].prod(1, dtype=np.int64)).clip(1, _BATCH)
    batches = 2 ** np.log2(batches).astype(int)
    done = len(bad)
    for batch in np.unique(batches).tolist():
        for numbers, found, error in _decoded(index, good[batches == batch], batch, options):
            # Over batches: those of large images hold few.
            refused = (refused + numbers)[-_BATCH:] if len(found) == len(numbers) else []
            if len(refused) == min(_BATCH, len(good)) > 1 and not any(_flaw(index, i) for i in refused):
                raise DataError(
                    f"the decoder refuses {len(refused)} files in a row that PIL reads, the first "
                    f"{index.path(refused[0])}: the decoder or its device has failed, or does not know this kind of "
                    f"file ({error})"
                )
            for i in numbers:
                if i not in found and (flaw := index.damage(i) or _cut_off(index.content(i))):
                    found[i] = flaw
            bad |= found
            done += len(numbers)
            show_progress(index.root, done, len(index))
    sizes = index.sizes.copy()
    sizes[list(bad)] = 0
    return replace(index, sizes=sizes, bad=dict(sorted(bad.items())))


def note_on_copies(index: ImageIndex) -> list[str]:
    """Return a sentence on the labeled images with the content of an earlier one, or none.

    A file is read only if another one has as many bytes.
    """
    known = np.setdiff1d(np.flatnonzero(index.labels >= 0), list(index.bad), assume_unique=True)
    _, same, counts = np.unique(index.lengths()[known], return_inverse=True, return_counts=True)
    alike = known[counts[same] > 1].tolist()

    def digest(row: int) -> bytes:
        content = index.content(alike[row])
        return hashlib.sha256(content if isinstance(content, bytes) else content.read_bytes()).digest()

    first, copies = {}, []
    digests = in_threads(digest, len(alike), f"{index.root}, looking for copies")
    for i, digest_of_i in zip(alike, digests):
        if (j := first.setdefault(digest_of_i, i)) != i:
            mine, other = (f"{index.name(n)} ({index.classes[index.labels[n]]})" for n in (i, j))
            copies.append(f"{mine} of {other}")
    if not copies:
        return []
    are = "labeled image is a copy" if len(copies) == 1 else "labeled images are copies"
    why = "An accuracy is too high where one is learned from and the other judges, and two labels contradict"
    return [f"{len(copies):,} {are}: {first_five(copies)}. {why}: keep one of each"]


def find_bad_images(index: ImageIndex, indices: Iterable[int], options: LoaderOptions) -> dict[int, str]:
    """Return the images among `indices` that training cannot use: index -> reason, in the order given.

    Raises OSError where the disk, the file server or its mount fails.
    """
    distinct = np.array(list(dict.fromkeys(map(int, indices))))
    decoded = _decoded(index, distinct, 1, options)
    found = {i: reason for (i,), bad, _ in decoded if (reason := bad.get(i) or index.damage(i))}
    if len(found) == len(distinct) > 1:
        # Nobody should delete a good data set because of a GPU that refuses every file, or of a mount that is lost.
        if not any(_flaw(index, i) for i in found):
            return {}
        if index.pack is None and not any(index.path(i).exists() for i in found):
            raise OSError(errno.ENODEV, f"none of {len(found)} images is there any more", str(index.root))
    return found


def _decoded(
    index: ImageIndex, numbers: np.ndarray, batch: int, options: LoaderOptions
) -> Iterator[tuple[list[int], dict[int, str], RuntimeError | None]]:
    """Decode images as training does; yield each batch, the reasons for its images that cannot be decoded, its error.

    The images of a batch that fails are decoded one by one.
    """
    if batch == 1:
        options = replace(options, threads=1, prefetch=1, hw_decoder_share=0.0)
    plan, start, engine = EvaluationPlan(index, numbers, batch, ()), engine_of(options), None
    for step in range(len(plan)):
        some, found, failure = plan(step).indices, {}, None
        try:
            engine = engine or start(plan, options, draws=plan, first_step=step)
            engine.run()
        except RuntimeError as error:
            engine, failure = None, error  # a pipeline that failed once always fails
            if batch > 1:
                for _, one, _ in _decoded(index, some, 1, options):
                    found |= one
            else:
                i = int(some[0])
                found[i] = _flaw(index, i) or _refusal(error)
        yield some.tolist(), found, failure


def _flaw(index: ImageIndex, i: int) -> str | None:
    """Return what is wrong with an image, whatever decodes it; None where PIL reads it, and it is the index's."""
    if damage := index.damage(i):
        return damage
    image = index.content(i)
    try:
        image_size(image)
        if cut_off := _cut_off(image):
            return cut_off
        now, length = index.rgb(i).shape[:2], index.length_now(i)
    except ValueError as problem:  # absent, empty, no image, too many pixels
        return str(problem)
    except OSError as problem:
        if problem.errno in LOST:
            raise OSError(problem.errno, problem.strerror, str(index.path(i))) from problem
        return f"cannot be read: {problem.strerror or problem}"
    except RuntimeError as problem:
        return f"damaged: {problem.__cause__}"
    height, width = index.sizes[i].tolist()
    if now != (height, width):
        return f"is {now[1]} x {now[0]} now, in the index {width} x {height}: make the index again"
    if length is not None:
        return f"has {length:,} bytes now, other than in the index: make the index again"
    return None


def _refusal(error: RuntimeError) -> str:
    """Return the line that names the cause: DALI's errors begin with a traceback of the graph's definition."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "ailed" in line or "ailure" in line]
    said = (telling or lines or [type(error).__name__])[-1].rstrip(" :")
    return f"the decoder refuses what PIL reads: save it anew ({said})"


def _cut_off(image: Path | bytes) -> str | None:
    """Return that a JPEG lacks its end marker, which a lenient decoder can forgive; pixels never contain one.

    Whatever follows the marker is ignored (a phone appends a film of megabytes), and so are the segments before the
    pixels: a thumbnail among them has an end marker of its own.
    """
    with io.BytesIO(image) if isinstance(image, bytes) else open(image, "rb") as stream:
        if stream.read(2) != b"\xff\xd8":
            return None
        # FF, the kind, two bytes of length with themselves, the content.
        while len(head := stream.read(4)) == 4 and head[0] == 0xFF and head[1] in _SEGMENTS:
            stream.seek(int.from_bytes(head[2:], "big") - 2, os.SEEK_CUR)
        return None if b"\xff\xd9" in stream.read() else "a truncated JPEG: its end is missing"
