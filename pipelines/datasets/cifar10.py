"""CIFAR-10: 60,000 images of 10 classes."""

from pathlib import Path

from pipelines.datasets.cifar import Published
from pipelines.datasets.image_headers import Progress
from pipelines.datasets.index import ImageIndex

# The authors publish the md5 c58f30108f718f92721af3b95e74349a; this is the sha256 of that same archive.
CIFAR10 = Published(
    name="CIFAR-10",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    size=170_498_071,
    folder="cifar-10-batches-py",
    train=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test=("test_batch",),
    key=b"labels",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    largest=64 << 20,  # a batch has 31 MB
)


def cifar10(
    root: str | Path,
    *,
    train: bool = True,
    download: bool = False,
    resident: bool = True,
    progress: Progress | None = None,
) -> ImageIndex:
    """The 50,000 training or 10,000 test images, 32 x 32, from what lies under `root`.

    Python batches (in `root` or in its cifar-10-batches-py) come first, in the authors' order, always in
    memory. Then folders of images, `root`/train/CLASS/... and `root`/test/CLASS/..., in order of their paths:
    decoded into memory, or with `resident=False` left as files. Then the archive, whose sha256 is verified,
    which with `download` is fetched. Raises DataError, for an empty `root` with what it could hold.
    """
    root = Path(root).expanduser()
    return CIFAR10.open(root, train=train, download=download, resident=resident, progress=progress)
