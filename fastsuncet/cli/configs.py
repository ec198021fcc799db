"""List the shipped configs, or copy one to start from.

Every command takes one by its name, where no file has this name. NAME prints one, with its base
written by name, so that a copy works in any folder.

examples:
  fastsuncet configs
  fastsuncet configs cifar10_suncet
  fastsuncet configs in1k_simclr --copy my.yaml
  fastsuncet train in1k_10pct data.root=/data/imagenet

exit codes: 0 done; 2 no such config, or the file exists
"""

from pathlib import Path

from fastsuncet.cli._parser import Options, Parser, output_path


def arguments(parser: Parser) -> None:
    parser.takes("name", "NAME", "print this config (default: list all)", nargs="?")
    parser.takes(
        "--copy", "FILE", "write it to FILE (default: its name)", type=output_path, nargs="?", const=""
    )


def run(parser: Parser, options: Options) -> None:
    from fastsuncet.config import shipped
    from pipelines.output import say_line

    if options.copy is not None:
        if options.name is None:
            parser.error(f"which config? For example: {parser.prog} in1k_10pct --copy my.yaml")
        file = options.copy if options.copy.name else Path(f"{Path(options.name).name}.yaml")
        shipped.copy(options.name, file)
        say_line(f"wrote {file}")
    elif options.name is not None:
        print(shipped.config_text(options.name), end="")
    else:
        print("\n".join(shipped.listing()))
