"""CIFAR-10 and CIFAR-100 held in memory: the authors' files through torchvision, or folders of images.

torchvision compares the MD5 of every file with the published one before it unpickles any of them.
"""

import http.client
import socket
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipelines.data_errors import DataError
from pipelines.datasets.folders import image_folder
from pipelines.datasets.in_memory import pixel_index, resident
from pipelines.datasets.index import ImageIndex

if TYPE_CHECKING:
    from torchvision.datasets import CIFAR10

_FINE_LABELS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
# In the order of the labels: CIFAR-100's fine labels. Both are in alphabetical order, so that folders of images get the
# same numbers. Written here, because folders that older versions unpacked lack the authors' file of names.
CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "cifar100": tuple(_FINE_LABELS.split()),
}
_TIMEOUT = 60  # seconds without a byte


def cifar(kind: str, root: str | Path, *, train: bool = True, download: bool = False) -> ImageIndex:
    """Return the 50,000 training or 10,000 test images of `kind` ("cifar10", "cifar100"), uint8 32 x 32 RGB.

    Uses the first of these that exists:

    - the authors' Python files, in `root` or in `root`/cifar-10-batches-py (cifar-100-python), in their order;
    - folders of images, `root`/train/CLASS/ and `root`/test/CLASS/, in order of their paths;
    - the authors' archive in `root`, which is unpacked; with `download` it is fetched first.

    Raises DataError for anything else, and for a file whose MD5 is not the published one: it is not opened.
    """
    # Imported late: it takes more than a second, and most data sets do without.
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    root, part = Path(root).expanduser(), "train" if train else "test"
    published = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[kind]
    title = kind.upper().replace("CIFAR", "CIFAR-")
    flat = (root / published.train_list[0][0]).is_file()
    folder = root if flat else root / published.base_folder
    if not folder.is_dir() and (root / part).is_dir():
        index = image_folder(root / part)
        if index.classes != CLASSES[kind]:
            others = ", ".join(index.classes[:12])
            raise DataError(f"{root / part} has other class folders than {title}: {others}")
        return resident(index)

    class Files(published):
        base_folder = "." if flat else published.base_folder

        def _load_meta(self) -> None:
            """Skip the authors' file of class names: see CLASSES."""

    try:
        found = Files(root, train)
    except RuntimeError:
        if flat or not (download or check_integrity(root / published.filename, published.tgz_md5)):
            raise DataError(_problem(title, root, folder, published)) from None
        found = _fetched(Files, root, train)
    names = (f"{part}/{i:05d}" for i in range(len(found)))
    return pixel_index(names, np.array(found.targets), CLASSES[kind], np.ascontiguousarray(found.data))


def _problem(title: str, root: Path, folder: Path, published: "type[CIFAR10]") -> str:
    """Return why the authors' files in `folder` cannot be used, and what to do."""
    from torchvision.datasets.utils import check_integrity

    archive, remedy = root / published.filename, "or set data.download (transfer.download) to true"
    if folder.is_dir():
        files = published.train_list + published.test_list
        wrong = ", ".join(name for name, md5 in files if not check_integrity(folder / name, md5))
        return (
            f"{folder} is not {title} as published: missing, or with another MD5: {wrong}. Unpack {archive.name} "
            f"there again" + ("" if folder == root else f", {remedy}")
        )
    if archive.exists():
        return f"{archive} is not {title}'s archive: its MD5 is not {published.tgz_md5}. Delete it, {remedy}"
    return (
        f"no {title} under {root}: neither {folder.name}/ nor train/CLASS/ and test/CLASS/ nor {archive.name}. "
        f"Set data.root (transfer.root) to the folder with one of them, {remedy}"
    )


def _fetched(dataset: "type[CIFAR10]", root: Path, train: bool) -> "CIFAR10":
    """Return torchvision's data set, downloaded if its archive is not in `root` already, and unpacked."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)  # torchvision sets none: a silent server would hold every rank forever
    try:
        return dataset(root, train, download=True)
    except (RuntimeError, OSError, EOFError, tarfile.TarError, http.client.HTTPException) as error:
        raise DataError(
            f"cannot download or unpack {dataset.url} in {root}: {error or type(error).__name__}. Run the same command "
            f"again, or put {dataset.filename} there by other means"
        ) from error
    finally:
        socket.setdefaulttimeout(before)
