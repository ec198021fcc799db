"""The command line as a process, started in a folder that holds packages with the names of ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastsuncet.paths import cli_command
from tests.support.scripts import shadow

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "names", "pythonpath"),
    [
        (cli_command(), ("fastsuncet", "pipelines", "yaml.py"), None),
        (cli_command(), ("fastsuncet", "pipelines"), f"{os.pathsep}{ROOT}"),  # an empty entry is the folder
        ([sys.executable, "-m", "fastsuncet"], ("pipelines", "yaml.py"), str(ROOT)),
    ],
    ids=["child", "child, folder in PYTHONPATH", "-m"],
)
def test_main_imports_nothing_from_the_working_directory_in_any_locale(tmp_path, command, names, pythonpath):
    shadow(tmp_path, *names)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if pythonpath is not None:
        environment["PYTHONPATH"] = pythonpath
    name = "abs\xe9nt.yaml".encode()
    words = [*command, "train", name]  # the code that is imported before this refusal is enough
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 2, done.stderr
    assert name in done.stderr  # a locale that is not UTF-8 makes no difference


@pytest.mark.parametrize(
    ("given", "rounds"),
    [({}, "10000"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "30000000000")],
    ids=["default", "as set"],
)
def test_threads_of_torch_give_way_unless_the_environment_says_how_they_wait(given, rounds):
    """OMP_DISPLAY_ENV prints what torch's OpenMP has read, so the setting was there before torch was loaded."""
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **given}
    words = [*cli_command(), "embed", "nowhere", ".", "--output", "rows.npz"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and f"GOMP_SPINCOUNT = '{rounds}'" in done.stderr
