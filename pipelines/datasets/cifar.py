"""CIFAR as its authors publish it: Python batches, downloaded and verified or pointed at, or images in folders.

CIFAR-10 and CIFAR-100 differ in names and numbers only: those are a `Published`, the rest is here.
"""

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.cifar_batch import read_batch
from pipelines.datasets.download import download as fetch
from pipelines.datasets.download import sha256_of
from pipelines.datasets.folders import image_folder
from pipelines.datasets.image_headers import Progress
from pipelines.datasets.in_memory import resident as hold
from pipelines.datasets.index import ImageIndex


@dataclass(frozen=True)
class Published:
    """What the authors put on their page, and what is in it."""

    name: str  # for people
    url: str
    sha256: str  # of the archive
    size: int  # bytes of the archive
    folder: str  # that the archive unpacks to
    train: tuple[str, ...]  # batches in it, in the authors' order
    test: tuple[str, ...]
    key: bytes  # under which a batch keeps its labels
    classes: tuple[str, ...]  # in the order of the labels
    largest: int  # bytes that no batch reaches

    @property
    def archive(self) -> str:
        """The archive's file name."""
        return self.url.rpartition("/")[2]

    def open(
        self, root: Path, *, train: bool, download: bool, resident: bool, progress: Progress | None
    ) -> ImageIndex:
        """The images of one part from what lies under `root`; see `cifar10`, whose words these are."""
        names = self.train if train else self.test
        for folder in (root, root / self.folder):
            if (folder / names[0]).is_file():
                return self._from_batches(folder, train)
        images = root / ("train" if train else "test")
        if images.is_dir():
            return self._from_folders(images, resident, progress)
        archive = root / self.archive
        if download and not archive.exists():
            fetch(self.url, archive, sha256=self.sha256, size=self.size, progress=progress)
        if not archive.exists():
            raise DataError(
                f"no {self.name} under {root}: neither {self.folder}/ nor train/CLASS/ and test/CLASS/ nor "
                f"{self.archive}; set root (data.root, transfer.root) to where it is, or download (data.download, "
                f"transfer.download) to true"
            )
        self._unpack(archive, root / self.folder)
        return self._from_batches(root / self.folder, train)

    def _from_batches(self, folder: Path, train: bool) -> ImageIndex:
        names = self.train if train else self.test
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise DataError(f"{folder} lacks {', '.join(missing)}: unpack {self.archive} again")
        limits = {"key": self.key, "classes": len(self.classes), "largest": self.largest}
        batches = [read_batch(folder / name, **limits) for name in names]
        labels = np.concatenate([labels for _, labels in batches])
        part = "train" if train else "test"
        return ImageIndex(
            root=None,
            files=[f"{part}/{i:05d}" for i in range(len(labels))],
            labels=labels,
            classes=self.classes,
            sizes=np.full((len(labels), 2), 32, np.int32),
            pixels=np.concatenate([pixels for pixels, _ in batches]),
        )

    def _from_folders(self, images: Path, resident: bool, progress: Progress | None) -> ImageIndex:
        index = image_folder(images, progress=progress)
        if index.classes != self.classes:
            raise DataError(
                f"{images} has other class folders than {self.name}: {', '.join(index.classes[:12])}"
            )
        return hold(index, progress=progress) if resident else index

    def _unpack(self, archive: Path, folder: Path) -> None:
        """Writes the batches out of the archive. Raises DataError for any archive but the authors' own."""
        digest = sha256_of(archive)
        if digest != self.sha256:
            raise DataError(
                f"{archive} is not {self.name}'s archive: sha256 {digest}, not {self.sha256}; delete it"
            )
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {f"{self.folder}/{name}": name for name in (*self.train, *self.test)}
        # Members are read by name and written by us under names of ours: no path out of an archive is
        # ever used.
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                if member.name not in wanted or not member.isfile() or member.size > self.largest:
                    continue
                partial = folder / f".{wanted[member.name]}.{os.getpid()}.part"
                partial.write_bytes(tar.extractfile(member).read())
                os.replace(partial, folder / wanted.pop(member.name))
        if wanted:
            raise DataError(f"{archive} lacks {', '.join(wanted)}")
