"""Fine-tune on CIFAR-10, CIFAR-100 and VOC 2007, over a grid.

Fine-tunes an encoder on each data set of transfer.datasets, for every learning rate and weight decay of a
grid (paper, appendix C: 7 x 8 cells of 20,000 steps). Cells are compared on validation images. The best is
trained again on all training images and measured once on the test images; that number is the result.

The data sets are below transfer.root as their authors publish them: cifar-10-batches-py, cifar-100-python
(transfer.download fetches these two), VOCdevkit; or each in a folder named cifar10, cifar100, voc07.

The same command continues a grid that was stopped, and does not repeat finished cells. In a job array each
job takes its share of the cells with --cell; the one that finishes the last cell chooses the best.

examples:
  fastsuncet transfer in1k_10pct transfer.root=/data
  fastsuncet transfer in1k_10pct transfer.root=/data --encoder resnet50.pth
  sbatch --array=1-28 job.sh, with the line
    fastsuncet transfer my.yaml --cell $SLURM_ARRAY_TASK_ID/28
"""

from fastsuncet.cli._parser import Parser, share


def arguments(parser: Parser) -> None:
    text = "share I of N of the grid's cells, for a job array"
    parser.takes("--cell", "I/N", text, type=share, default="1/1")
    parser.takes_encoder(every=False)
    parser.takes_config(ranks=True)
