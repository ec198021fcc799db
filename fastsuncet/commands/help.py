"""What the command `fastsuncet` says of itself: help that teaches, with examples and exit codes."""

from typing import NamedTuple


class Help(NamedTuple):
    """A sub-command's help: its usage, what it is for, and what stands below its options."""

    usage: str
    purpose: str
    more: str = ""


EXIT_CODES = """\
exit codes:
  0    done
  1    a bug: please report it with its traceback
  2    the config or the command line is wrong; nothing was started
  3    the data is: a missing folder, an image that cannot be decoded
  4    a loss stopped being a number; nothing of that step was saved
  5    no checkpoint can be used, or none can be written
  75   stopped by a signal and saved: run the same command again (schedulers: requeue)
  130  interrupted from the keyboard"""

OVERVIEW = f"""\
usage: fastsuncet COMMAND ...

Pre-trains image encoders with SimCLR + SuNCEt: contrast between images, helped by some labels.

commands:
  train CONFIG [section.key=value ...]    pre-train, or continue a run where it stopped
  finetune CONFIG [section.key=value ...] train encoder and classifier on the labeled images
  transfer CONFIG [section.key=value ...] fine-tune on CIFAR-10, CIFAR-100, VOC 2007, over a grid
  evaluate knn CONFIG [...]               nearest labeled neighbours, nothing is trained
  evaluate npi CONFIG [...]               SuNCEt's own classifier on them, which has no parameters
  evaluate linear CONFIG [...]            a linear classifier on them, fitted to the labeled images
  evaluate accuracy CONFIG [...]          a network that has its classifier already
  sweep SWEEP [section.key=value ...]     several runs from one file, each with its commands
  preview CONFIG [section.key=value ...]  draw the augmented views a config makes as a picture
  data check FOLDER or CONFIG             decode every image once and name the bad ones
  data pack CONFIG --output FOLDER        the training images as tar shards, for shared file systems
  demo                                    both methods on small real images, compared in minutes
  report RUN ... [--baseline RUN]         runs side by side: accuracy against cost, compute saved
  doctor                                  what is installed here, what is missing, what to do
  version                                 versions, for a bug report

`fastsuncet COMMAND --help` says more and shows examples. First steps, without any data of your own:

  fastsuncet doctor
  fastsuncet demo

{EXIT_CODES}"""

TRAIN = Help(
    "CONFIG [section.key=value ...] [--dry-run]",
    """\
Pre-trains the encoder that CONFIG describes. A run lives in <logging.folder>/<logging.write_tag>,
by default runs/ and the name of the config file; the same command continues it from its newest good
checkpoint.

Several GPUs: started alone, one process is started on each; under torchrun or Slurm this process
joins the others. Batch sizes count images over all processes, so a config is the same experiment on
any number of them.""",
    f"""\
examples:
  fastsuncet train configs/digits_demo.yaml                 small real images: no download, no GPU
  fastsuncet train configs/cifar10_suncet.yaml --dry-run    check all, print the plan, train nothing
  fastsuncet train configs/in1k_10pct.yaml data.root=/data/imagenet optimization.epochs=100
  fastsuncet train my.yaml 'data.augmentation.crop_scale=[0.2, 1.0]' checkpoint.every_epochs=10
  torchrun --nproc-per-node 8 -m fastsuncet train configs/in1k_10pct.yaml

--dry-run prints every key there is, with its value in this run.

{EXIT_CODES}""",
)

FINETUNE = Help(
    "CONFIG [section.key=value ...] [--encoder PATH] [--step N | --every-checkpoint]",
    """\
Fine-tunes a pre-trained encoder on the labeled images of data.split and counts the accuracy on all
validation images (paper, appendix B): the projection head is dropped, a linear classifier begins at
zero, and all weights are trained by SGD with Nesterov momentum; images are cropped at random and
flipped. The numbers are those of the section finetune.

The encoder is that of the config's own run, its newest checkpoint, or --encoder's: a run's folder,
one of its checkpoints, or a file of weights (torchvision, timm, the authors' checkpoints; as
torch.save or .safetensors).

Each fine-tuning has a folder in <run>/finetune, named after its labels and checkpoint, or by
finetune.write_tag. One that was stopped is continued by the same command, one that has ended is not
trained again. Its number goes to <run>/results, its network stays in its folder: `fastsuncet
evaluate npi CONFIG --encoder FOLDER` takes it.""",
    f"""\
examples:
  fastsuncet finetune configs/digits_demo.yaml finetune.epochs=20 finetune.batch_size=64
  fastsuncet finetune configs/cifar10_suncet.yaml --every-checkpoint
  fastsuncet finetune configs/in1k_10pct.yaml finetune.accumulate=4 --step 140740
  fastsuncet finetune configs/in1k_10pct.yaml data.root=/data/imagenet --encoder resnet50.pth \\
      'data.augmentation.mean=[0.485, 0.456, 0.406]' 'data.augmentation.std=[0.229, 0.224, 0.225]'

Not enough memory: finetune.accumulate=A makes each update in A passes, BatchNorm then sees 1/A of a
process's images.

{EXIT_CODES}""",
)

TRANSFER = Help(
    "CONFIG [section.key=value ...] [--encoder PATH] [--step N] [--cell I/N]",
    """\
Fine-tunes an encoder on each data set of transfer.datasets, once for every learning rate and weight
decay of the grid (paper, appendix C: 7 x 8 cells of 20,000 steps). Cells are compared on validation
images; the best is trained once more on all training images and counted once on the test images,
and that number goes to the run's results.

Data sets lie below transfer.root as their authors publish them: cifar-10-batches-py,
cifar-100-python (transfer.download fetches these two), VOCdevkit; or each in a folder named
cifar10, cifar100, voc07.

A finished cell is read, not trained again, and one that was stopped is continued: run the same
command again. With --cell each job of an array takes its share of the cells, and whichever finishes
a data set's last one makes the choice.""",
    f"""\
examples:
  fastsuncet transfer configs/in1k_10pct.yaml transfer.root=/data
  fastsuncet transfer configs/in1k_10pct.yaml transfer.root=/data --step 227000
  fastsuncet transfer configs/in1k_10pct.yaml transfer.root=/data --encoder resnet50.pth
  sbatch --array=1-28 job.sh    with: fastsuncet transfer my.yaml --cell $SLURM_ARRAY_TASK_ID/28

{EXIT_CODES}""",
)

EVALUATE = "CONFIG [section.key=value ...] [--encoder PATH] [--step N | --every-checkpoint]"
EVALUATED = """\
The encoder is that of the config's own run, its newest checkpoint, or --encoder's: a run's folder,
one of its checkpoints, a folder that fine-tuning wrote, or a file of weights (torchvision, timm,
the authors' checkpoints; as torch.save or .safetensors). Each validation image is counted once, on
any number of processes. The numbers go to <logging.folder>/<logging.write_tag>/results, a file
each; the same evaluation done again replaces its file."""

KNN = Help(
    EVALUATE,
    f"""\
Nearest neighbours: each validation image is given the class of most of the evaluation.knn_k labeled
training images most similar to it, cropped at random once (paper, appendix G). Nothing is trained.

{EVALUATED}""",
    f"""\
examples:
  fastsuncet evaluate knn configs/digits_demo.yaml
  fastsuncet evaluate knn configs/cifar10_suncet.yaml evaluation.knn_k=20 --every-checkpoint
  fastsuncet evaluate knn configs/in1k_10pct.yaml data.root=/data/imagenet --encoder resnet50.pth \\
      'data.augmentation.mean=[0.485, 0.456, 0.406]' 'data.augmentation.std=[0.229, 0.224, 0.225]'

{EXIT_CODES}""",
)

NPI = Help(
    EVALUATE,
    f"""\
SuNCEt's non-parametric inference (paper, appendix G): the probability of a class is the softmax
over all labeled images of their similarity / temperature, summed over the class. Nothing is
trained. npi.views random crops of each labeled image join in; npi.temperature is training's unless
given. The paper's model is fine-tuned first: name its folder with --encoder.

{EVALUATED}""",
    f"""\
examples:
  fastsuncet evaluate npi configs/digits_demo.yaml
  fastsuncet evaluate npi configs/in1k_10pct.yaml npi.views=10 --step 140740

{EXIT_CODES}""",
)

LINEAR = Help(
    EVALUATE,
    f"""\
The linear protocol: logistic regression on the frozen representations of the labeled training
images, fitted to its optimum. linear.strength is the inverse of the penalty (scikit-learn's C).
data.split.kind=all makes it the usual protocol on every training image.

{EVALUATED}""",
    f"""\
examples:
  fastsuncet evaluate linear configs/digits_demo.yaml
  fastsuncet evaluate linear configs/cifar10_simclr.yaml data.split.kind=all

{EXIT_CODES}""",
)

ACCURACY = Help(
    EVALUATE,
    f"""\
Counts how often a network that has a classifier is right: one that `fastsuncet finetune` trained,
or a file of torchvision or timm with its fc.

{EVALUATED}""",
    f"""\
examples:
  fastsuncet evaluate accuracy configs/in1k_10pct.yaml --encoder resnet50.pth \\
      'data.augmentation.mean=[0.485, 0.456, 0.406]' 'data.augmentation.std=[0.229, 0.224, 0.225]'

{EXIT_CODES}""",
)

SWEEP = Help(
    "SWEEP [section.key=value ...] [--only NAME] [--task I/N] [--dry-run | --list] [--keep-going]",
    """\
Does what SWEEP lists (train, finetune, evaluate ..., transfer) with every run that it makes of a
config, one command after the other, each as a process of its own on all GPUs of this machine.
Nothing starts before all configs are sound. What is done is skipped and what was stopped is
continued: after any end the same command goes on. Overrides are for all runs.

In a Slurm array task T does run T; with --task each job does its share of the runs. A signal is
passed on to the command that runs, and 75 is passed back.

  base: cifar10_suncet.yaml                 a config, taken from the sweep's own folder
  name: cifar10-p{data.split.fraction}      of each run; without it the sweep's name and what varies
  set: {checkpoint.keep: 10}                the same in all runs
  vary: {data.split.fraction: [0.01, 0.1]}  a run for each combination of what is listed here
  runs: {a: {meta.seed: 0}, b: {}}          a run for each entry, with a base if it likes
  commands:                                 or a plain list: [train, finetune]
    train:
    finetune: {set: {finetune.epochs: 90}, every_checkpoint: true}
    evaluate knn: {vary: {evaluation.knn_k: [10, 20]}}""",
    f"""\
examples:
  fastsuncet sweep configs/paper/cifar10_suncet.yaml --dry-run
  fastsuncet sweep configs/paper/cifar10_suncet.yaml --list
  fastsuncet sweep configs/paper/in1k_suncet_10pct.yaml data.root=/data/imagenet --only '*-100ep'
  sbatch --array=1-6 tools/cluster/sweep.sbatch configs/paper/cifar10_suncet.yaml

{EXIT_CODES}""",
)

PREVIEW = Help(
    "CONFIG [section.key=value ...] [--output FILE] [--step N]",
    """\
Draws what the network will see at one step of a run on one process: the batch's first images, two
augmented views of each, and labeled images where the step learns from any.""",
    """\
examples:
  fastsuncet preview configs/digits_demo.yaml
  fastsuncet preview configs/in1k_10pct.yaml data.root=/data/imagenet --output views.png""",
)

CHECK = Help(
    "FOLDER or CONFIG [section.key=value ...]",
    """\
Decodes every image once with the decoder that trains, keeps the index of files and sizes for the
runs of that config, and names each bad file with the reason. A file that is cut short can pass for
weeks, until a crop reaches the rows it lacks; this finds it in one pass.""",
    """\
examples:
  fastsuncet data check configs/in1k_10pct.yaml data.root=/data/imagenet
  fastsuncet data check /data/imagenet/train

exit codes: 0 every image is good, or data.bad_images allows for the bad ones; 2 the config is
wrong; 3 there are bad images, or none at all""",
)

PACK = Help(
    "CONFIG [section.key=value ...] [--output FOLDER]",
    """\
Copies the training images of CONFIG, byte for byte, into tar shards of 1 GB (WebDataset's layout)
that a run reads with data.pack=FOLDER. The pixels are the same to the bit, so a run can switch to
the pack when it is resumed. `fastsuncet data check CONFIG data.pack=FOLDER` verifies the checksum
of every image and decodes it.

data.pack also reads WebDataset shards of other programs: a folder of .tar files, or a pattern such
as '/data/train-{0000..1023}.tar', with images in KEY.jpg and class numbers in KEY.cls.

The same command continues a stopped packing. FOLDER exists only once it is complete.""",
    """\
examples:
  fastsuncet data pack configs/in1k_10pct.yaml --output /data/imagenet/shards
  fastsuncet train configs/in1k_10pct.yaml data.pack=/data/imagenet/shards

exit codes: 0 packed, or there already; 2 the config is wrong or has no files; 3 a file is gone or
has changed, more images are bad than data.bad_images allows, or the pack cannot be written""",
)

DEMO = Help(
    "[section.key=value ...] [--seed N] [--folder DIR]",
    """\
Trains SimCLR and SimCLR + SuNCEt on scikit-learn's digits, 10 % of them labeled, on the same
compute; draws accuracy against compute, and says in words what this run showed. Minutes on two CPU
cores; nothing is downloaded.""",
    """\
examples:
  fastsuncet demo
  fastsuncet demo --seed 1 --folder /tmp/demo""",
)

REPORT = Help(
    "RUN ... [--baseline RUN] [--metric NAME] [--lengths] [--paper [FIGURE]] [--output DIR]",
    """\
Puts runs side by side: accuracy against epochs, updates, petaFLOPs, hours and joules, as pictures
and tables, and how much of the baseline's compute each method needed to match the baseline's best.
Reads what `evaluate`, `finetune` and `transfer` wrote into each run, and the nearest-neighbour
lines it wrote itself. Runs that only their seed sets apart are averaged. With --lengths, runs that
only their number of epochs sets apart become one curve, as the paper draws ImageNet. With --paper
the paper's own points are drawn too; without any RUN, they alone.""",
    """\
examples:
  fastsuncet report runs/cifar10_simclr runs/cifar10_suncet
  fastsuncet report runs/cifar10_* --baseline runs/cifar10_simclr_seed0 --metric top1 --metric top5
  fastsuncet report runs/in1k_10pct --paper imagenet-10pct --output reports/in1k
  fastsuncet report runs/in1k_simclr-*ep runs/in1k_suncet_10pct-*ep --lengths --paper
  fastsuncet report --paper                  the paper's curves, and what it says was saved

figures: imagenet-10pct (the default) and imagenet-1pct are curves; transfer, related, npi and
losses single points

exit codes: 0 written; 2 no such metric or figure; 3 no such run, or nothing in it was evaluated
yet; 5 a result is damaged, or the report cannot be written""",
)

DOCTOR = Help(
    "",
    "Looks at what is installed here, and says what is missing and what to do about it.",
    "exit codes: 0 a run can start here; 1 something would stop it",
)

VERSION = Help("", "Prints versions, for a bug report.")
