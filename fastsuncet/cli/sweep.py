r"""Run several configs, and several commands on each, from one file.

Runs the commands of SWEEP (train, finetune, evaluate ..., transfer) on every run that it defines, one after
the other, each in its own process on all GPUs of this machine. All configs are checked before anything
starts. The same command continues a sweep: it skips what is finished and continues what was stopped.
Overrides apply to all runs. Without `name` a run has the sweep's name and what varies.

In a Slurm array, task T does run T; with --task each job does its share of the runs. A signal is passed on
to the running command, and its exit code 75 is passed back.

  base: cifar10_suncet.yaml                 a config, relative to this file
  name: cifar10-p{data.split.fraction}      of each run
  set: {checkpoint.keep: 10}                in all runs
  vary: {data.split.fraction: [0.01, 0.1]}  a run for each combination
  runs: {a: {meta.seed: 0}, b: {}}          a run for each, also of other bases
  commands:                                 or a plain list: [train, finetune]
    train:
    finetune: {set: {finetune.epochs: 90}, every_checkpoint: true}
    evaluate knn: {vary: {evaluation.knn_k: [10, 20]}}
    evaluate npi: {encoder: finetune/a}     a path below the run's folder

examples:
  fastsuncet sweep paper/cifar10_suncet --dry-run
  fastsuncet sweep paper/in1k_suncet_10pct --only '*-100ep'
  sbatch --array=1-6 --gpus-per-node=1 --cpus-per-task=8 \
      tools/cluster/sweep.sbatch paper/cifar10_suncet
"""

from fastsuncet.cli._parser import Parser, share


def arguments(parser: Parser) -> None:
    parser.flag("--dry-run", "check all configs and print all commands; start nothing")
    parser.flag("--list", "print the state of every run; start nothing", dest="show")
    parser.takes("--only", "NAME", "only these runs; wildcards * and ?", action="append", default=[])
    parser.takes("--task", "I/N", "share I of N of the runs, for a job array", type=share)
    parser.flag("--keep-going", "continue with the other runs after a failure")
    parser.takes_config("SWEEP")
