"""`fastsuncet embed`: the features of every image below a folder, in one file; the pass that `predict` makes too.

While it runs, what is done lies in a hidden folder next to the file, and the same command continues it:

    .NAME.part/DIGEST/rows   as float32; DIGEST is that of images, network and batches
    .NAME.part/DIGEST/done   a sha256, and JSON: those of the blocks that are written, what was skipped and why
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from fastsuncet.checkpoint.run_folder import disk_errors, refuse_existing
from fastsuncet.config import Config
from fastsuncet.distributed.place import Place, pick_device
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation.encoder import Encoder, load_encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.evaluation.finetuning.record import module_digest
from fastsuncet.evaluation.scoring import require_finite
from fastsuncet.training.determinism import set_determinism
from pipelines import atomic_files
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.folders import image_list, image_tree
from pipelines.datasets.index import ImageIndex
from pipelines.datasets.published import pixel_index
from pipelines.output import counted, say_line
from pipelines.sampling.augmentation import Center

# The evaluation's code reads its back-end and threads from a config; the pixels are the encoder's own.
SETTINGS = Config.from_values(
    {
        "data": {"kind": "images", "root": "."},
        "criterion": {"temperature": 0.1, "unsupervised_batch_size": 2},
        "optimization": {"steps": 1, "lr": 1.0},
    }
)
# Images between two saves. Starting the decoder again costs about a second, and a stop the images since the save.
SAVE_EVERY = {"cpu": 1024, "cuda": 16384}
ROW = np.dtype("<f4")
STATE = "done"
DIGEST = hashlib.sha256().digest_size
# A folder, files, also those of a dictionary with their classes, or pixels (N, H, W, 3) uint8.
ImageInput = str | Path | Iterable[str | Path] | NDArray[Any]
Skipped = dict[int, str]  # number of an image -> why it has no row
ANY_NUMBER = {"data.bad_images": 1_000_000_000}  # of images that cannot be read are left out
SHOWN = 20  # skipped images that are printed
FORMATS = (".npz", ".parquet")
MOST_NAMES = 1 << 30  # bytes


def opened(images: ImageInput, upright: bool) -> tuple[ImageIndex, list[str]]:
    """Return the images, none labeled, and the name of each: as given, below their folder, or "0", "1", ... of pixels.

    Raises DataError for what is no image.
    """
    if isinstance(images, np.ndarray):
        if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or not images.size:
            raise DataError(f"images in an array are (N, H, W, 3) uint8, not {images.shape} {images.dtype}")
        names = list(map(str, range(len(images))))
        return pixel_index(names, np.full(len(images), -1), (), images), names
    if isinstance(images, (str, Path)):
        index = image_tree(images, upright=upright)
        return index, list(index.files)
    files = list(images) if isinstance(images, Iterable) else [images]
    if others := [file for file in files if not isinstance(file, (str, os.PathLike))]:
        kind = type(others[0]).__name__
        raise DataError(
            f"images in a list are paths, not {kind}: give pixels as one array (N, H, W, 3) uint8"
        )
    return image_list(files, upright=upright), [str(file) for file in files]


def check_output(output: Path, endings: tuple[str, ...], force: bool | None, *, page: bool = False) -> Path:
    """Raise ConfigError for an output that exists, has another ending, or needs a package that is missing.

    Return the path of its page, which exists neither if it has one.
    """
    if output.suffix not in endings:
        raise ConfigError(f"--output {output} must end in {' or '.join(endings)}")
    if output.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(f"a .parquet file needs pyarrow: pip install pyarrow, or write a {endings[0]} file")
    shown = output.with_suffix(".html")
    for path in (output, shown) if page else (output,):
        refuse_existing(path, force)
    return shown


def encoder_of(where: Path | Config) -> tuple[Encoder, Config]:
    """Return the encoder of a config's run, of a run, a checkpoint or an export, and the config or that of the run.

    Raises ConfigError for a run of another network than the config's, and as `known_view`.
    """
    if not isinstance(where, Config):
        encoder = load_encoder(where)
        known_view(encoder)
        assert encoder.trained is not None, "an encoder with a view has the config that it was trained with"
        return encoder, encoder.trained
    encoder = load_encoder(where.run_folder, where)
    if encoder.name != where.model.name:
        text = f"is not the network of {encoder.source}, which is {encoder.name}: train this config, with another "
        raise where.error("model.name", text + "logging.write_tag, or give the run in place of the config")
    return encoder, where


def known_view(encoder: Encoder) -> Center:
    """Return the pixels that an encoder expects. Raises ConfigError for one that does not say it."""
    if encoder.view is None:
        raise ConfigError(
            f"{encoder.source} does not say which pixels it expects. Give a run, a checkpoint or an export"
        )
    return encoder.view


def one_process() -> Place:
    """Return this process as the only rank, on one GPU or the CPU, with the settings of an evaluation."""
    place = Place(0, 1, pick_device("auto", 0))
    set_determinism(SETTINGS, place)
    return place


@contextmanager
def advising_skip_bad(skip_bad: bool) -> Iterator[None]:
    """Add to a BadImage of the body that --skip-bad leaves such images out, unless it was given."""
    try:
        yield
    except BadImage as error:
        raise error if skip_bad else DataError(f"{error}\nOr leave them out: --skip-bad") from None


def say_skipped(skipped: Skipped, index: ImageIndex, what: str = "") -> None:
    """Print the skipped images and why, the first SHOWN of them; `what` it means for the output."""
    if skipped:
        say_line(f"skipped      {counted(len(skipped), 'image')} that cannot be decoded{what}:")
        for i, reason in sorted(skipped.items())[:SHOWN]:
            say_line(f"  {index.name(i)}: {reason}")
        if len(skipped) > SHOWN:
            say_line(f"  and {len(skipped) - SHOWN:,} more")


@dataclass
class FolderPass:
    """One pass of a network over images in eval mode; with `skip_bad` those that cannot be decoded are left out.

    Raises BadImage for such an image otherwise.
    """

    network: nn.Module  # (B, 3, S, S) -> (B, width)
    width: int  # of a row; 0 if unknown, for `rows` only
    index: ImageIndex
    view: Center
    place: Place
    batch: int = 256
    skip_bad: bool = False

    def __post_init__(self) -> None:
        if not self.skip_bad:
            self.index.require_good()
        self.skipped: Skipped = dict(self.index.bad)

    def rows(self) -> np.ndarray:
        """Return the outputs of all images, (N, width) float32. Raises BadImage where none can be decoded."""
        blocks = [self._block(start) for start in self._starts()]
        self._require_a_good_one()
        blank = np.full((1, max(rows.shape[1] for rows in blocks)), np.nan, np.float32)
        return np.concatenate([rows if rows.shape[1] else blank.repeat(len(rows), 0) for rows in blocks])

    def write(
        self, output: Path, save: Callable[[Path, np.ndarray], None], *, force: bool = False
    ) -> np.ndarray:
        """Compute the rows of all images, write them by `save` (a path that ends as `output`, rows); return them.

        Continues what an earlier call has begun, if images and network are the same. With `force`, a file that appears
        at `output` meanwhile is replaced. Raises BadImage where no image can be decoded, ConfigError for a file that
        appeared at `output`, CheckpointError for a disk that refuses or another process that writes there.
        """
        self._require_a_good_one()
        part = output.with_name(f".{output.name}.part")
        with disk_errors(output, "--output"):
            atomic_files.make_folder(part)
            with atomic_files.exclusive(part / ".lock") as held:
                if not held:
                    raise CheckpointError(
                        f"another process is writing {output}: wait for it, or choose another --output"
                    )
                try:
                    rows = self._continued(part)
                finally:
                    if not any(part.glob(f"*/{STATE}")):  # nothing is done that could be continued
                        atomic_files.remove(part)
                self._require_a_good_one()
                temporary = part / output.name
                save(temporary, rows)
                atomic_files.sync(temporary)
                refuse_existing(output, force)
                os.replace(temporary, output)
                atomic_files.sync(output.parent)
                atomic_files.remove(part)
        return rows

    def _require_a_good_one(self) -> None:
        if len(self.skipped) == len(self.index):
            replace(self.index, bad=dict(sorted(self.skipped.items()))).require_good()

    def _starts(self) -> range:
        """Return the first images of the blocks: the same in every call, so a continued pass has the same bits."""
        batches = max(1, SAVE_EVERY[self.place.device.type] // self.batch)
        return range(0, len(self.index), self.batch * batches)

    def _block(self, start: int) -> np.ndarray:
        """Return the outputs (n, width) float32 of the images from `start` on; the row of a skipped one is NaN."""
        network, numbers = self.network.to(self.place.device), np.arange(len(self.index))
        numbers = numbers[start : start + self._starts().step]
        found = np.empty((0, self.width), np.float32)
        while len(good := numbers[~np.isin(numbers, list(self.skipped))]):
            try:
                how = {"batch": self.batch, "view": self.view}
                rows = outputs(network, self.index, good, SETTINGS, self.place, **how)
                require_finite(rows)
                found = rows.cpu().numpy()
                break
            except BadImage as error:
                if not self.skip_bad:
                    raise
                number = {str(self.index.path(int(i))): int(i) for i in good}
                self.skipped |= {number[path]: reason for path, reason in error.files}
        rows = np.full((len(numbers), found.shape[1]), np.nan, np.float32)
        rows[good - start] = found
        return rows

    def _continued(self, part: Path) -> np.ndarray:
        """Return the rows of all images in a file in `part`; those that are done there are not computed."""
        identity = [self.index.fingerprint(), self.index.contents(), module_digest(self.network)]
        identity += [astuple(self.view), self.batch, self.place.device.type, self.skip_bad]
        begun = part / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        if others := [folder for folder in part.iterdir() if folder.is_dir() and folder != begun]:
            say_line(f"starting over: what was begun in {part} is of other images, another network or batch")
        for other in others:
            atomic_files.remove(other)
        atomic_files.make_folder(begun)
        images, starts, size = len(self.index), self._starts(), self.width * ROW.itemsize
        path, state = begun / "rows", begun / STATE
        path.touch()
        # A file server that fails for a moment raises: that must not cost the rows of hours.
        found = state.read_bytes() if atomic_files.exists(state) else b""
        whole = hashlib.sha256(found[DIGEST:]).digest() == found[:DIGEST]
        digests, skipped = json.loads(found[DIGEST:]) if whole else ({}, ())
        self.skipped |= dict(skipped)
        if digests:
            done = min(len(digests) * starts.step, images)
            say_line(f"continuing after {done:,} of {images:,} images")
        # tqdm's own format would begin with "? images/s".
        form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} images, {elapsed}"
        # Written, not mapped into memory: on a full disk a map ends the process without a message (SIGBUS).
        with open(path, "r+b") as file, tqdm(total=images, disable=None, bar_format=form) as bar:
            for start in starts:
                file.seek(start * size)
                rows = file.read(min(starts.step, images - start) * size)
                if digests.get(str(start)) != hashlib.sha256(rows).hexdigest():
                    rows = self._block(start).astype(ROW).tobytes()
                    file.seek(start * size)
                    file.write(rows)
                    file.flush()
                    os.fsync(file.fileno())
                    digests[str(start)] = hashlib.sha256(rows).hexdigest()
                    content = json.dumps([digests, list(self.skipped.items())]).encode()
                    atomic_files.replace(state, hashlib.sha256(content).digest() + content)
                    if bar.disable:
                        say_line(f"{min(start + starts.step, images):,} of {images:,} images")
                bar.update(len(rows) // size)
        return np.memmap(path, ROW, "r", shape=(images, self.width))


def embed(
    where: Path, folder: Path, output: Path, *, batch: int = 256, force: bool = False, skip_bad: bool = False
) -> None:
    """Write the features and names of the images below `folder` to `output`, by the encoder in `where`."""
    check_output(output, FORMATS, force)
    encoder = load_encoder(where)
    view = known_view(encoder)
    index, place = image_tree(folder, upright=view.upright), one_process()
    longest = max(index.files, key=len)
    # In an array of names each takes as much as the longest.
    if output.suffix == ".npz" and (size := 4 * len(longest) * len(index)) > MOST_NAMES:
        raise ConfigError(
            f"{len(index):,} names of up to {len(longest):,} characters take {size / 1e9:.1f} GB in a .npz file: write "
            f"a .parquet file, or rename {longest}"
        )
    save = partial(_save, index=index, about={"encoder": encoder.record(), "view": astuple(view)})
    with advising_skip_bad(skip_bad):
        work = FolderPass(encoder.module, encoder.width, index, view, place, batch, skip_bad)
        rows = work.write(output, save, force=force)
    say_skipped(work.skipped, index, "; their features are NaN")
    count = len(index) - len(work.skipped)
    say_line(f"wrote {output}: {count:,} images, {rows.shape[1]:,} features of {encoder.source}")


def _save(path: Path, rows: np.ndarray, index: ImageIndex, about: dict[str, Any]) -> None:
    """Write features, file names and, as JSON, `about`."""
    names = list(index.files)
    if path.suffix == ".npz":
        np.savez(path, features=rows, files=np.array(names), about=np.array(json.dumps(about)))
        return
    import pyarrow as pa  # pyright: ignore[reportMissingImports]
    from pyarrow import parquet  # pyright: ignore[reportMissingImports]

    width = rows.shape[1]
    kind = pa.list_(pa.float32(), width)
    fields = [pa.field("file", pa.string()), pa.field("features", kind)]
    schema = pa.schema(fields, metadata={"fastsuncet": json.dumps(about)})
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), width)
    parquet.write_table(pa.table([pa.array(names), vectors], schema=schema), path, row_group_size=4096)
