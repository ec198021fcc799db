r"""Measure the accuracy: k-NN, NPI, linear, or the network's own.

knn: a validation image has the most frequent class of the evaluation.knn_k labeled training images most
similar to it, of which a random crop is taken (paper, appendix G; a run's own lines have center crops).
Nothing is trained.

npi: SuNCEt's non-parametric inference (paper, appendix G), with npi.views random crops of each labeled
image. Nothing is trained. The paper fine-tunes its model first: give the fine-tuning's folder as --encoder.

linear: logistic regression on the frozen features of the labeled training images; linear.strength is the
inverse of its L2 penalty. With data.split.kind=all it is the usual protocol on all training images.

accuracy: that of a network which has a classifier: a run with cross-entropy, a fine-tuning, or a file of
torchvision or timm with its fc layer.

Each validation image is counted once, on any number of processes. With data.validation=null, knn and linear
are cross-validated on the labeled images, with a 95 % interval. Each result is a file in RUN/results, with
a picture of which classes are taken for which; repeating an evaluation replaces both.

examples:
  fastsuncet evaluate knn digits_demo
  fastsuncet evaluate knn cifar10_suncet evaluation.knn_k=20 --every-checkpoint
  fastsuncet evaluate npi in1k_10pct npi.views=10 --step 140740
  fastsuncet evaluate linear cifar10_simclr data.split.kind=all
  fastsuncet evaluate accuracy in1k_10pct --encoder resnet50.pth \
      'data.augmentation.mean=[0.485, 0.456, 0.406]' \
      'data.augmentation.std=[0.229, 0.224, 0.225]'
"""

from fastsuncet.cli._parser import Parser


def arguments(parser: Parser) -> None:
    kinds = ("knn", "npi", "linear", "accuracy")
    parser.takes("kind", "KIND", ", ".join(kinds), choices=kinds)
    parser.takes_encoder(every=True)
    parser.takes_config(ranks=True)
