"""Pre-train an encoder, or continue a run where it stopped.

Pre-trains the encoder that CONFIG describes. The run's folder is <logging.folder>/<logging.write_tag>, by
default runs/ and the name of the config file. The same command continues it from its newest good checkpoint.

On several GPUs the command starts one process for each; under torchrun or Slurm it joins the processes that
they start. Batch sizes count the images of all processes: a config is the same experiment on any number.

examples:
  fastsuncet train digits_demo                   digits: no download, no GPU
  fastsuncet train cifar10_suncet --dry-run      check, and print the plan
  fastsuncet train in1k_10pct --dry-run=step     also make steps: memory, hours
  fastsuncet train in1k_10pct data.root=/data/imagenet optimization.epochs=100
  fastsuncet train my.yaml 'data.augmentation.crop_scale=[0.2, 1.0]'
  torchrun --nproc-per-node 8 -m fastsuncet train in1k_10pct

"""

from fastsuncet.cli._parser import Options, Parser


def arguments(parser: Parser) -> None:
    parser.flag("--dry-run", "check everything and print the plan; train nothing")
    # An option of its own: with a value that may be absent, `--dry-run CONFIG` would take the config for it.
    text = "the same, then make a few real steps; print their time and memory, keep nothing"
    parser.add_argument("--dry-run=step", dest="dry_run", action="store_const", const="step", help=text)
    parser.flag("--show-config", "print all keys behind the plan of a dry run, with their values in this run")
    parser.takes_config(ranks=True)


def run(parser: Parser, options: Options) -> None:
    config, arguments, show = options.config, options.arguments, options.show_config
    if options.dry_run:
        from fastsuncet.commands.dry_run import run as dry_run

        return dry_run(config, arguments, steps=options.dry_run == "step", show_config=show)
    if show:
        parser.error("--show-config goes with --dry-run")
    config.require_data()  # a dry run prints a plan without data too
    from fastsuncet.commands.train import run as train

    train(config, arguments)
