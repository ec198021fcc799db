"""Print versions, for a bug report."""

import sys

from fastsuncet.cli._parser import Options, Parser
from fastsuncet.versions import DALI, __version__, installed


def run(parser: Parser, options: Options) -> None:
    print(f"fastsuncet {__version__}\npython {sys.version.split()[0]}")
    for name in ("torch", "torchvision", "timm", *DALI, "numpy"):
        if found := installed(name):
            print(f"{name} {found}")
