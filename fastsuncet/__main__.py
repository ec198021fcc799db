"""Run the command line as `python -m fastsuncet`, or as `python .../fastsuncet/__main__.py`, the way ranks are started.

Packages are never imported from the working directory: a folder `pipelines` or a file `yaml.py` there does not hide
ours. There is one exception: with `-m`, Python itself looks for `fastsuncet` in the working directory first. The
installed command `fastsuncet` and the ranks and runs that this program starts are not affected by it.
"""

import os
import sys

if __name__ == "__main__":
    # Python puts the working directory (-m) or this file's folder first on the path, unless it runs in safe mode.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        del sys.path[0]
    import typing  # noqa: F401 - `import fastsuncet` needs it, while the path below is without the standard library

    root, rest = os.path.dirname(os.path.dirname(os.path.abspath(__file__))), sys.path[:]
    # PYTHONPATH can name the working directory too, for example by an empty entry. So both packages come from here.
    sys.path[:] = [root]
    import fastsuncet  # noqa: F401
    import pipelines  # noqa: F401

    # Not in front of the others where it is site-packages: an old backport there would hide the standard library.
    sys.path[:] = rest if root in rest else [root, *rest]
    from fastsuncet.cli import main

    sys.exit(main())
