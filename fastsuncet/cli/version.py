"""Print versions, for a bug report."""

import sys
from argparse import Namespace

from fastsuncet.cli._parser import Parser
from fastsuncet.versions import DALI, __version__, installed


def run(parser: Parser, options: Namespace) -> None:
    print(f"fastsuncet {__version__}\npython {sys.version.split()[0]}")
    for name in ("torch", "torchvision", "timm", *DALI, "numpy"):
        if found := installed(name):
            print(f"{name} {found}")
