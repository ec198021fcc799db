r"""Train the encoder and a classifier on the labeled images.

Trains all weights of a pre-trained encoder, without its projection head, by SGD with Nesterov momentum on
random crops and flips of the labeled images, and measures the accuracy on all validation images (paper,
appendix B). The settings are in the config's section finetune.

With finetune.head=linear, the default, the classifier starts as the linear fit on the frozen features, and
the result is the mean of the first and the last weights: few labels then do not undo the pre-training.
There are at least 300 updates. finetune.head=zero is the paper's: the configs of the paper have it.

Each fine-tuning has a folder in RUN/finetune, named after its labels and checkpoint, or by
finetune.write_tag. The same command continues one that was stopped, and does not repeat one that is
finished. The accuracy is written to RUN/results. With data.validation=null it is measured by leaving out
labels, which takes about six times as long. If memory is not enough, finetune.accumulate=A makes each
update in A passes; BatchNorm then sees 1/A of a process's images.

examples:
  fastsuncet finetune digits_demo finetune.epochs=20 finetune.batch_size=64
  fastsuncet finetune cifar10_suncet --every-checkpoint
  fastsuncet finetune in1k_10pct finetune.accumulate=4 --step 140740
  fastsuncet evaluate npi in1k_10pct --encoder runs/in1k_10pct/finetune/FOLDER
"""

from fastsuncet.cli._parser import Parser


def arguments(parser: Parser) -> None:
    parser.takes_encoder(every=True)
    parser.takes_config(ranks=True)
