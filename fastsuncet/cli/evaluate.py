r"""Measure the accuracy: k-NN, NPI, linear, or the network's own.

knn: the class of a validation image is the most frequent class of the evaluation.knn_k labeled
training images most similar to it (paper, appendix G). Each of these is cropped at random once.
Nothing is trained.

npi: SuNCEt's non-parametric inference (paper, appendix G). The probability of a class is the
softmax over all labeled images of similarity / temperature, summed over the images of the class.
Nothing is trained. npi.views is the number of random crops of each labeled image; npi.temperature
is by default the temperature of the training. The paper fine-tunes its model first: give the folder
of the fine-tuning with --encoder.

linear: logistic regression on the frozen features of the labeled training images. linear.strength
is the inverse of the L2 penalty (scikit-learn's C): a number, or auto, which chooses it by 5-fold
cross-validation on the labeled images. With data.split.kind=all it is the usual protocol on all
training images.

accuracy: that of a network which has a classifier: a run with cross-entropy, a fine-tuning, or a
file of torchvision or timm with its fc layer.

Each validation image is counted once, on any number of processes. With data.validation=null, knn
and linear are cross-validated on the labeled images: 5 folds, 5 times, with a 95 % interval. Each
result is a file in <logging.folder>/<logging.write_tag>/results, with the accuracy of each class,
and a picture of which classes are taken for which; repeating an evaluation replaces both.

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
