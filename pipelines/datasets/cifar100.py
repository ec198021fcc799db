"""CIFAR-100: 60,000 images of 100 classes, by their fine labels."""

from pathlib import Path

from pipelines.datasets.cifar import Published
from pipelines.datasets.image_headers import Progress
from pipelines.datasets.index import ImageIndex

# Of the fine labels in their order. It is the alphabet's, so folders of images have the same numbers.
_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
# The authors publish the md5 eb9058c3a382ffc7106e4002c42a8d85; this is the sha256 of that same archive.
CIFAR100 = Published(
    name="CIFAR-100",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
    sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
    size=169_001_437,
    folder="cifar-100-python",
    train=("train",),
    test=("test",),
    key=b"fine_labels",  # beside them lie b"coarse_labels", 20 groups of five
    classes=tuple(_CLASSES.split()),
    largest=256 << 20,  # the training batch has 155 MB
)


def cifar100(
    root: str | Path,
    *,
    train: bool = True,
    download: bool = False,
    resident: bool = True,
    progress: Progress | None = None,
) -> ImageIndex:
    """The 50,000 training or 10,000 test images, 32 x 32, with fine labels. Everything else as `cifar10`.

    The batches are called train and test and lie in cifar-100-python.
    """
    root = Path(root).expanduser()
    return CIFAR100.open(root, train=train, download=download, resident=resident, progress=progress)
