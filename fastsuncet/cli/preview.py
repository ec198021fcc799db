"""Draw the augmented views of a config as a picture.

Draws what the network sees at one step of a run on one process: the first images of the batch, two
augmented views of each, and labeled images if the step uses them.

examples:
  fastsuncet preview digits_demo
  fastsuncet preview in1k_10pct data.root=/data/imagenet --output views.png
"""

from fastsuncet.cli._parser import Options, Parser, whole


def arguments(parser: Parser) -> None:
    parser.writes("the picture (default: views.png)", force=True, required=False, default="views.png")
    parser.takes("--step", "N", "draw the views of this step (default: 0)", type=whole(0), default=0)
    parser.takes_config()


def run(parser: Parser, options: Options) -> None:
    options.config.require_data()
    from fastsuncet.commands.preview import preview
    from pipelines.output import say_line

    say_line(f"wrote {preview(options.config, options.output, step=options.step, force=options.force)}")
