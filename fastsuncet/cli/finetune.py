r"""Train the encoder and a classifier on the labeled images.

Fine-tunes a pre-trained encoder on the labeled images of data.split and measures the accuracy on
all validation images (paper, appendix B). The projection head is dropped, and all weights are
trained by SGD with Nesterov momentum on random crops and flips. The settings are in the config's
section finetune.

With finetune.head=linear, the default, the classifier starts as the linear fit on the frozen
features, the learning rate is bounded by their scale, the gradient's norm by 1, and the result is
the mean of the first and the last weights: few labels then do not undo the pre-training. There are
at least 300 updates, with batches of at most all labels. The accuracies of the frozen encoder are
printed beside the new one. finetune.head=zero is the paper's: the configs of the paper have it.

Each fine-tuning has a folder in <run>/finetune, named after its labels and checkpoint, or by
finetune.write_tag. The same command continues one that was stopped, and does not repeat one that is
finished. The accuracy is written to <run>/results, with what each class is taken for and a picture
of it. With data.validation=null it is measured by leaving out labels: five more networks, and about
six times as long. The network stays in the folder: measure it with
`fastsuncet evaluate npi CONFIG --encoder FOLDER`.

examples:
  fastsuncet finetune digits_demo finetune.epochs=20 finetune.batch_size=64
  fastsuncet finetune cifar10_suncet --every-checkpoint
  fastsuncet finetune in1k_10pct finetune.accumulate=4 --step 140740
  fastsuncet finetune in1k_10pct --encoder resnet50.pth \
      'data.augmentation.mean=[0.485, 0.456, 0.406]' \
      'data.augmentation.std=[0.229, 0.224, 0.225]'

If memory is not enough, finetune.accumulate=A makes each update in A passes. BatchNorm then sees
1/A of a process's images.
"""

from fastsuncet.cli._parser import Parser


def arguments(parser: Parser) -> None:
    parser.takes_encoder(every=True)
    parser.takes_config(ranks=True)
