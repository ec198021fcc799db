"""The help of each command: what it does, then examples and exit codes.

The text before "examples:" or "exit codes:" stands above the options, the rest below them. A command without exit codes
of its own has EXIT_CODES.
"""

import re
from collections.abc import Iterable

EXPORTS = ("torchvision", "timm", "safetensors", "onnx")  # of `fastsuncet export --to`

EXIT_CODES = """\
exit codes:
  0    done
  1    a bug: please report it with its traceback
  2    the config or the command line is wrong; nothing was started
  3    the data is wrong: a missing folder, an image that cannot be decoded
  4    a loss is not finite; nothing of that step was saved
  5    no checkpoint can be used, or none can be written; or an export cannot (the run is saved)
  75   stopped by a signal and saved: run the same command again (schedulers: requeue)
  124  a rank hung and is named: run the same command again
  130  interrupted from the keyboard"""

ENCODER = """\
By default the encoder is the newest checkpoint of the config's own run. --encoder takes the folder
of another run, one of its checkpoints, or a file of weights (torchvision, timm, the authors'
checkpoints; torch.save or .safetensors)."""

EVALUATED = f"""\
{ENCODER} It also takes the folder of a fine-tuning.

Each validation image is counted once, on any number of processes. With data.validation=null, knn
and linear are cross-validated on the labeled images: 5 folds, 5 times, with a 95 % interval. Each
result is a file in <logging.folder>/<logging.write_tag>/results; repeating an evaluation replaces
its file."""

# Command -> its summary for the list of commands.
COMMANDS = {
    "init": "look at your images and this machine, and write a config",
    "train": "pre-train, or continue a run where it stopped",
    "tune": "find what makes a run faster on this machine",
    "finetune": "train the encoder and a classifier on the labeled images",
    "transfer": "fine-tune on CIFAR-10, CIFAR-100, VOC 2007, over a grid",
    "evaluate knn": "accuracy of the nearest labeled neighbors",
    "evaluate npi": "accuracy of SuNCEt's classifier without parameters",
    "evaluate linear": "accuracy of a linear classifier on the frozen encoder",
    "evaluate accuracy": "accuracy of a network that already has a classifier",
    "export": "write the encoder for torchvision, timm, Hugging Face or ONNX",
    "embed": "write the features of every image below a folder",
    "predict": "the class of every image below a folder, with a probability",
    "suggest": "the unlabeled images to label next, and a page to label them on",
    "sweep": "several runs, and several commands on each, from one file",
    "preview": "draw the augmented views of a config as a picture",
    "data check": "decode every image once and name the bad ones",
    "data pack": "the training images as tar shards, for shared file systems",
    "demo": "compare both methods on small real images, in minutes",
    "report": "compare runs: accuracy against cost, compute saved",
    "configs": "list the shipped configs, or copy one to start from",
    "config": "explain a key of a config: meaning, type, default, allowed values",
    "build": "compile the fast operator of the views, once for this machine",
    "completion": "print the completion script of bash or zsh",
    "doctor": "show what is installed, what is missing, what to do",
    "version": "print versions, for a bug report",
}

TEXTS = {
    "init": """\
Looks at the images below FOLDER (number, sizes, classes, labels, bad files) and at this machine
(GPU, memory, cores, one timed step), and writes a config in which every choice has its reason:
method, network, image size, batch, length for the hours given, optimizer, fine-tuning. Prints the
plan, the predicted hours and the next command. It replaces no file.

FOLDER holds train/CLASS/IMAGE or CLASS/IMAGE (the folders are the classes), or any tree of images
with --labels, a CSV whose first line is `file,label`; or tar shards. Without labels the method is
SimCLR. The network starts from the weights that timm has published; --weights none, or no network
connection the first time, trains from scratch.

examples:
  fastsuncet init photos --labels labels.csv
  fastsuncet init photos --labels labels.csv --hours 0.5 --weights none
  fastsuncet init shards --output shards.yaml
  fastsuncet init photos --weights convnext_tiny
  fastsuncet init photos --weights runs/mine --output again.yaml""",
    "train": """\
Pre-trains the encoder that CONFIG describes. The run's folder is
<logging.folder>/<logging.write_tag>, by default runs/ and the name of the config file. The same
command continues the run from its newest good checkpoint.

On several GPUs the command starts one process for each; under torchrun or Slurm it joins the
processes that they start. Batch sizes count the images of all processes, so a config is the same
experiment on any number of GPUs.

examples:
  fastsuncet train digits_demo                   small real images: no download, no GPU
  fastsuncet train cifar10_suncet --dry-run      check and print the plan only
  fastsuncet train in1k_10pct --dry-run=step     also make steps: memory, and hours of the run
  fastsuncet train in1k_10pct data.root=/data/imagenet optimization.epochs=100
  fastsuncet train my.yaml 'data.augmentation.crop_scale=[0.2, 1.0]' checkpoint.every_epochs=10
  torchrun --nproc-per-node 8 -m fastsuncet train in1k_10pct

--dry-run --show-config prints the plan, and then all keys with their values in this run.""",
    "tune": """\
Times whole steps of CONFIG on this machine with what could make them faster and is not written in
it: a CUDA graph, torch.compile, threads, read-ahead, the hardware JPEG decoder. Each is tried on
top of those that won, in a process of its own. It must first prove that it computes the same, and
wins if it is 3 % faster, and faster than the noise.

Writes a config with CONFIG as its base and the keys that won, each with its times. It replaces no
file. Kernels that are right and not slower need no tuning: every run uses them. On several GPUs it
starts one process for each, as `train` does.

examples:
  fastsuncet tune digits_demo --output fast.yaml --minutes 3
  fastsuncet tune in1k_10pct data.root=/data/imagenet --output fast.yaml

`fastsuncet train fast.yaml` then trains with them, with the same changes behind it.""",
    "finetune": f"""\
Fine-tunes a pre-trained encoder on the labeled images of data.split and measures the accuracy on
all validation images (paper, appendix B). The projection head is dropped, and all weights are
trained by SGD with Nesterov momentum on random crops and flips. The settings are in the config's
section finetune.

With finetune.head=linear, the default, the classifier starts as the linear fit on the frozen
features, the learning rate is bounded by their scale, and the result is the mean of the first and
the last weights: few labels then do not undo the pre-training. There are at least 300 updates, with
batches of at most all labels. The accuracies of the frozen encoder are printed beside the new one.
finetune.head=zero is the paper's: the configs of the paper have it.

{ENCODER}

Each fine-tuning has a folder in <run>/finetune, named after its labels and checkpoint, or by
finetune.write_tag. The same command continues one that was stopped, and does not repeat one that is
finished. The accuracy is written to <run>/results. The network stays in the folder: measure it with
`fastsuncet evaluate npi CONFIG --encoder FOLDER`.

examples:
  fastsuncet finetune digits_demo finetune.epochs=20 finetune.batch_size=64
  fastsuncet finetune cifar10_suncet --every-checkpoint
  fastsuncet finetune in1k_10pct finetune.accumulate=4 --step 140740
  fastsuncet finetune in1k_10pct data.root=/data/imagenet --encoder resnet50.pth \\
      'data.augmentation.mean=[0.485, 0.456, 0.406]' 'data.augmentation.std=[0.229, 0.224, 0.225]'

If memory is not enough, finetune.accumulate=A makes each update in A passes. BatchNorm then sees
1/A of a process's images.""",
    "transfer": f"""\
Fine-tunes an encoder on each data set of transfer.datasets, for every learning rate and weight
decay of a grid (paper, appendix C: 7 x 8 cells of 20,000 steps). Cells are compared on validation
images. The best is trained again on all training images and measured once on the test images; that
number goes to the run's results.

{ENCODER}

The data sets are below transfer.root as their authors publish them: cifar-10-batches-py,
cifar-100-python (transfer.download fetches these two), VOCdevkit; or each in a folder named
cifar10, cifar100, voc07.

The same command continues a grid that was stopped, and does not repeat finished cells. In a job
array each job takes its share of the cells with --cell. The job that finishes the last cell of a
data set chooses the best.

examples:
  fastsuncet transfer in1k_10pct transfer.root=/data
  fastsuncet transfer in1k_10pct transfer.root=/data --step 227000
  fastsuncet transfer in1k_10pct transfer.root=/data --encoder resnet50.pth
  sbatch --array=1-28 job.sh    with: fastsuncet transfer my.yaml --cell $SLURM_ARRAY_TASK_ID/28""",
    "evaluate knn": f"""\
Nearest neighbors: the class of a validation image is the most frequent class of the
evaluation.knn_k labeled training images most similar to it (paper, appendix G). Each of these is
cropped at random once. Nothing is trained.

{EVALUATED}

examples:
  fastsuncet evaluate knn digits_demo
  fastsuncet evaluate knn cifar10_suncet evaluation.knn_k=20 --every-checkpoint
  fastsuncet evaluate knn in1k_10pct data.root=/data/imagenet --encoder resnet50.pth \\
      'data.augmentation.mean=[0.485, 0.456, 0.406]' 'data.augmentation.std=[0.229, 0.224, 0.225]'""",
    "evaluate npi": f"""\
SuNCEt's non-parametric inference (paper, appendix G): the probability of a class is the softmax
over all labeled images of similarity / temperature, summed over the images of the class. Nothing is
trained. npi.views is the number of random crops of each labeled image; npi.temperature is by
default the temperature of the training. The paper fine-tunes its model first: give the folder of
the fine-tuning with --encoder.

{EVALUATED}

examples:
  fastsuncet evaluate npi digits_demo
  fastsuncet evaluate npi in1k_10pct npi.views=10 --step 140740""",
    "evaluate linear": f"""\
The linear protocol: logistic regression on the frozen representations of the labeled training
images, fitted until it converges. linear.strength is the inverse of the L2 penalty (scikit-learn's
C): a number, or auto, which chooses it by 5-fold cross-validation on the labeled images. With
data.split.kind=all it is the usual protocol on all training images.

{EVALUATED}

examples:
  fastsuncet evaluate linear digits_demo
  fastsuncet evaluate linear cifar10_simclr data.split.kind=all""",
    "evaluate accuracy": f"""\
The accuracy of a network that has a classifier: one that `fastsuncet finetune` trained, or a file
of torchvision or timm with its fc layer.

{EVALUATED}

examples:
  fastsuncet evaluate accuracy in1k_10pct --encoder resnet50.pth \\
      'data.augmentation.mean=[0.485, 0.456, 0.406]' 'data.augmentation.std=[0.229, 0.224, 0.225]'""",
    "export": """\
Writes the encoder of a run's newest good checkpoint, or of --step, for other programs: the weights
without the projection head, in float32, and a JSON with the config, the normalization, the image
size, the sha256 and the results. A fine-tuned encoder keeps its classifier.

  torchvision   RUN/export/torchvision.pth   torchvision.models.resnet50().load_state_dict
  timm          RUN/export/timm.pth          the same for timm.create_model
  safetensors   RUN/export/safetensors       a folder for timm.create_model("local-dir:...") and for
                                             the Hugging Face hub: weights, config.json, README.md
  onnx          RUN/export/onnx.onnx         needs pip install onnx onnxscript onnxruntime

`fastsuncet train` does this at the end of a run for the formats in checkpoint.export. An export
replaces the earlier one in RUN/export in one step. What is at --output stays, unless --force is
given. docs/export.md shows how to load each format.

examples:
  fastsuncet export runs/in1k_10pct --to torchvision
  fastsuncet export in1k_10pct --to safetensors --output ~/hub/in1k_10pct
  fastsuncet export runs/in1k_10pct/finetune/10pct --to onnx --step 9000""",
    "embed": """\
Writes the features of every image below FOLDER, at any depth, to one file, by the encoder of a run,
a checkpoint or an export: the center crop and the normalization of the evaluation, float32, no
projection head. It uses one GPU, or the CPU.

A .npz file has the arrays features (N, width), files (N,) and about (JSON); a .parquet file has the
columns file and features and needs pip install pyarrow.

The same command continues one that was stopped. The file exists only once it is complete, and what
is at --output stays, unless --force is given. A bad image ends the command with its name;
`fastsuncet data check FOLDER` finds them all.

examples:
  fastsuncet embed runs/in1k_10pct ~/photos --output photos.npz
  fastsuncet embed encoder/torchvision.pth /data/imagenet/val --output val.parquet""",
    "predict": """\
Writes the class of every image below FOLDER, at any depth, to one file, with columns file, class,
probability, second_class and second_probability. The classifier is linear, fitted to the labeled
images of the run (data.split; all that have a label where that is none) and kept in RUN/classifier:
the next call takes it from there. Where the run has a fine-tuning on the same labels that is better
on the validation images, that is used, with a line that says so.

Probabilities are calibrated: one temperature is fitted to the labels by cross-validation. The
command prints how many predictions should be right, by how much the probabilities are off, and how
many images are below 0.5. Take the config as RUN to use labels that its CSV has by now.

The same command continues one that was stopped. The file exists only once it is complete, and what
is at --output stays, unless --force is given. A bad image ends the command with its name; with
--skip-bad it is printed and has empty cells. --page also writes an HTML file that any browser opens
without a network: of each class the surest and the least sure pictures, and those between two
classes. A .parquet file needs pip install pyarrow.

examples:
  fastsuncet predict mine.yaml ~/photos --output predictions.csv --page
  fastsuncet predict runs/in1k_10pct ~/photos --output predictions.parquet --skip-bad""",
    "suggest": """\
Writes N images of the run's data that have no label: typical ones that differ from each other and
from the labeled ones (TypiClust). Of more than 100,000 it looks at a random part. FILE has lines of
a labels.csv with empty labels: write them, and add the lines to your CSV.

--page also writes an HTML file that any browser opens without a network: a picture, what the run's
linear classifier takes it for, a key for each class, and a button that saves new-labels.csv. Append
that to the CSV that the run reads: cat new-labels.csv >> labels.csv

Compared with random images (RESULTS.md): on CIFAR-10 better with 10, 20 and 100 labels in the end,
on clothing photos with 100 only. All other numbers from 10 to 250 were undecided, none was worse.
What is at --output stays, unless --force is given.

examples:
  fastsuncet suggest mine.yaml --count 50 --output next.csv --page
  fastsuncet predict mine.yaml ~/photos --output predictions.csv   # with the new labels""",
    "sweep": """\
Runs the commands of SWEEP (train, finetune, evaluate ..., transfer) on every run that it defines,
one after the other, each in its own process on all GPUs of this machine. All configs are checked
before anything starts. The same command continues a sweep: it skips what is finished and continues
what was stopped. Overrides apply to all runs.

In a Slurm array, task T does run T; with --task each job does its share of the runs. A signal is
passed on to the running command, and its exit code 75 is passed back.

  base: cifar10_suncet.yaml                 a config; the path is relative to the sweep file
  name: cifar10-p{data.split.fraction}      of each run (default: the sweep's name and what varies)
  set: {checkpoint.keep: 10}                the same in all runs
  vary: {data.split.fraction: [0.01, 0.1]}  a run for each combination of these values
  runs: {a: {meta.seed: 0}, b: {}}          a run for each entry, which can have its own base
  commands:                                 or a plain list: [train, finetune]
    train:
    finetune: {set: {finetune.epochs: 90}, every_checkpoint: true}
    evaluate knn: {vary: {evaluation.knn_k: [10, 20]}}

examples:
  fastsuncet sweep paper/cifar10_suncet --dry-run
  fastsuncet sweep paper/cifar10_suncet --list
  fastsuncet sweep paper/in1k_suncet_10pct data.root=/data/imagenet --only '*-100ep'
  sbatch --array=1-6 --gpus-per-node=1 --cpus-per-task=8 tools/cluster/sweep.sbatch \\
      paper/cifar10_suncet""",
    "preview": """\
Draws what the network sees at one step of a run on one process: the first images of the batch, two
augmented views of each, and labeled images if the step uses them.

examples:
  fastsuncet preview digits_demo
  fastsuncet preview in1k_10pct data.root=/data/imagenet --output views.png""",
    "data check": """\
Decodes every image once with the decoder of the training, and names each bad file with the reason.
A truncated file can go unnoticed for weeks, until a crop reaches its missing rows; this finds it in
one pass. The index of files and sizes is kept for the runs of the config.

examples:
  fastsuncet data check in1k_10pct data.root=/data/imagenet
  fastsuncet data check /data/imagenet/train

exit codes: 0 every image is good, or data.bad_images allows the bad ones; 2 the config is wrong;
3 there are bad images, or no images""",
    "data pack": """\
Copies the training images of CONFIG, byte for byte, into tar shards of 1 GB (WebDataset's layout)
that a run reads with data.pack=FOLDER. The pixels are the same to the bit, so a run can switch to
the pack when it is resumed. `fastsuncet data check CONFIG data.pack=FOLDER` verifies the checksum
of every image and decodes it.

data.pack also reads WebDataset shards of other programs: a folder of .tar files, or a pattern such
as '/data/train-{0000..1023}.tar', with images in KEY.jpg and class numbers in KEY.cls.

The same command continues a stopped packing. FOLDER exists only once it is complete.

examples:
  fastsuncet data pack in1k_10pct --output /data/imagenet/shards
  fastsuncet train in1k_10pct data.pack=/data/imagenet/shards

exit codes: 0 packed now or before; 2 the config is wrong or has no files; 3 a file is gone or has
changed, or more images are bad than data.bad_images allows; 5 the pack cannot be written""",
    "demo": """\
Trains SimCLR and SimCLR + SuNCEt on scikit-learn's digits with 10 % of the labels and the same
compute, draws accuracy against compute, and explains what this run showed. It takes minutes on two
CPU cores and downloads nothing.

examples:
  fastsuncet demo
  fastsuncet demo --seed 1 --folder /tmp/demo""",
    "report": """\
Compares runs in pictures and tables: accuracy against epochs, updates, petaFLOPs, hours and joules,
and the share of the baseline's compute that each method needed to match the baseline. It reads
the results of `evaluate`, `finetune` and `transfer` in each run, and the nearest-neighbor
accuracies of its training. Runs that differ only in their seed are averaged. With --lengths, runs
that differ only in their number of epochs become one curve, as the paper draws ImageNet. With
--paper the points of the paper are drawn too; without a RUN, only they.

--page shows how runs stand instead: for each RUN one HTML file, RUN/page.html, with curves,
results, weights, settings and versions. --watch writes it anew while the run goes on.

examples:
  fastsuncet report runs/cifar10_simclr runs/cifar10_suncet
  fastsuncet report runs/cifar10_* --baseline runs/cifar10_simclr_seed0 --metric top1 --metric top5
  fastsuncet report runs/in1k_10pct --paper imagenet-10pct --output reports/in1k
  fastsuncet report runs/in1k_simclr-*ep runs/in1k_suncet_10pct-*ep --lengths --paper
  fastsuncet report --paper                  the paper's curves, and the savings that it claims
  fastsuncet report --watch runs/in1k_10pct  then open runs/in1k_10pct/page.html in a browser

figures: imagenet-10pct (the default) and imagenet-1pct are curves; transfer, related, npi and
losses are single points

exit codes: 0 written; 2 no such metric or figure; 3 no such run, or it was not evaluated yet;
5 a result is damaged, or the report cannot be written""",
    "configs": """\
Lists the configs of the package. Every command takes one by its name, where no file has this name.
NAME prints one. Its base is then written by name, so that a copy works in any folder.

examples:
  fastsuncet configs
  fastsuncet configs cifar10_suncet
  fastsuncet configs in1k_simclr --copy my.yaml
  fastsuncet train in1k_10pct data.root=/data/imagenet

exit codes: 0 done; 2 no such config, or the file exists""",
    "config": """\
Prints what a key of a config means, its type, its default and what is allowed; or all keys of a
section. --json-schema prints the same for editors. With the YAML language server, a config that
begins with `# yaml-language-server: $schema=fastsuncet.json` is then checked and completed.

examples:
  fastsuncet config criterion
  fastsuncet config criterion.temperature
  fastsuncet config --json-schema > fastsuncet.json

exit codes: 0 done; 2 no such key""",
    "build": """\
Compiles the operator that makes color, blur and normalization in one pass, and compares it with
DALI's own to the bit. It needs a C++ compiler. A first run does the same.

exit codes: 0 built now or before; 1 it cannot be built: DALI's own operators make the same pixels,
slower""",
    "completion": """\
Prints a script that completes commands, options, the names of shipped configs and the keys of a
config.

examples:
  source <(fastsuncet completion bash)                             for this shell
  fastsuncet completion zsh > ~/.fastsuncet && echo 'source ~/.fastsuncet' >> ~/.zshrc

exit codes: 0 printed; 2 another shell""",
    "doctor": """\
Shows what is installed, what is missing, and what to do.

exit codes: 0 a run can start here; 1 something would stop it""",
}


def overview(names: Iterable[str] = COMMANDS) -> str:
    """Return the list of commands, with their summaries."""
    lines = "\n".join(f"  {name:<18} {COMMANDS[name]}" for name in names)
    return f"""\
usage: fastsuncet COMMAND ...

Pre-trains image encoders with SimCLR + SuNCEt: contrastive learning that uses the labels of some
images.

commands:
{lines}

`fastsuncet COMMAND --help` explains a command with examples. First steps, without your own data:

  fastsuncet doctor
  fastsuncet demo

{EXIT_CODES}"""


def help_of(name: str) -> tuple[str, str]:
    """Return the help of a command above its options, and below them."""
    text = TEXTS.get(name, f"Command to {COMMANDS[name]}.")
    above, *below = re.split(r"\n\n(?=examples:|exit codes:)", text, maxsplit=1)
    if "exit codes:" not in text:
        below.append(EXIT_CODES)
    return above, "\n\n".join(below)
