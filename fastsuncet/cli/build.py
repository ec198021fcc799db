"""Compile the fast operator of the views, once for this machine.

It makes color, blur and normalization in one pass, and is compared with DALI's own to the bit. It
needs a C++ compiler. A first run does the same.

exit codes: 0 built now or before; 1 it cannot be built: DALI's own operators make the same pixels,
slower
"""

from fastsuncet.cli._parser import Options, Parser


def arguments(parser: Parser) -> None:
    parser.flag("--prebuilt", "keep it for all users of this installation")


def run(parser: Parser, options: Options) -> int:
    from pipelines.dali.view_operator.__main__ import main

    return main(["--prebuilt"] if options.prebuilt else [])
