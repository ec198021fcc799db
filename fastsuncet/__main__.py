"""`python -m fastsuncet`: the same as the command `fastsuncet`. Launchers start ranks this way."""

import sys

from fastsuncet.cli import main

if __name__ == "__main__":
    sys.exit(main())
