"""Write the training images as tar shards, for shared file systems.

Copies the training images of CONFIG, byte for byte, into tar shards of 1 GB (WebDataset's layout) that a
run reads with data.pack=FOLDER. The pixels are the same to the bit, so a run can switch to the pack when it
is resumed. `fastsuncet data check CONFIG data.pack=FOLDER` verifies the checksum of every image.

data.pack also reads WebDataset shards of other programs: a folder of .tar files, or a pattern such as
'/data/train-{0000..1023}.tar', with images in KEY.jpg and class numbers in KEY.cls.

The same command continues a stopped packing. FOLDER exists only once it is complete.

examples:
  fastsuncet data pack in1k_10pct --output /data/imagenet/shards
  fastsuncet train in1k_10pct data.pack=/data/imagenet/shards

exit codes: 0 packed now or before; 2 the config is wrong or has no files; 3 a file is gone or has changed,
or more images are bad than data.bad_images allows; 5 the pack cannot be written
"""

from fastsuncet.cli._parser import Parser


def arguments(parser: Parser) -> None:
    parser.writes("the pack (default: data.pack)", metavar="FOLDER", required=False)
    parser.takes_config()
