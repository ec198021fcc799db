"""The command line as a process, in a folder with packages of our names, and from a wheel, which is complete.

Versions are looked up without an import.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet import cli, versions
from fastsuncet.config.shipped import shipped
from fastsuncet.paths import cli_command
from tests.support.ranks import run_code
from tests.support.scripts import shadow

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "configs", "fastsuncet", "pipelines")
KINDS = {".py", ".typed", ".yaml", ".csv", ".md", ".cu", ".cuh", ".cc", ".h", ".css", ".js"}


def install(folder: Path) -> Path:
    """Build the wheel from a copy of the sources, without a network; return the folder it is installed in."""
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy, symlinks=True) if source.is_dir() else shutil.copy(source, copy)
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    command = [sys.executable, "-m", "pip", "install", "-q", *offline, "--target", "installed", "./source"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "installed"


def files(folder: Path) -> set[str]:
    """Return the files of both packages, without what was compiled."""
    walked = [
        each for part in ("fastsuncet", "pipelines") for each in os.walk(folder / part, followlinks=True)
    ]
    paths = {os.path.join(at, name) for at, _, names in walked for name in names}
    return {os.path.relpath(path, folder) for path in paths if Path(path).suffix in KINDS}


@pytest.mark.slow
def test_wheel_has_all_files_and_lists_plans_trains_exports_and_embeds(tmp_path):
    wheel, folder = install(tmp_path / "wheel"), tmp_path / "empty"
    assert files(wheel) == files(tmp_path / "wheel" / "source")
    (folder / "photos").mkdir(parents=True)
    for name in ("a.png", "b.png"):
        Image.effect_noise((20, 20), 60).convert("RGB").save(folder / "photos" / name)
    trained = "runs/digits_demo"
    commands = [
        ["configs"],
        ["configs", "in1k_10pct"],
        ["train", "digits_demo", "--dry-run"],
        ["train", "digits_demo", "optimization.steps=2", "optimization.warmup=0"],
        ["export", trained, "--to", "torchvision"],
        ["embed", f"{trained}/export/torchvision.pth", "photos", "--output", "photos.npz"],
    ]
    code = f"import fastsuncet.cli as cli; print(cli.__file__); assert not any(map(cli.main, {commands}))"
    exit_code, printed = run_code(code, wheel, folder)
    assert exit_code == 0, printed
    first, *lines = printed.splitlines()
    assert first == f"{wheel / 'fastsuncet' / 'cli' / '__init__.py'}"
    assert [line.split()[0] for line in lines[: len(shipped())]] == list(shipped())
    assert "base: in1k_simclr\n" in printed and "dry run: all checks passed" in printed
    with np.load(folder / "photos.npz") as found:
        assert found["files"].tolist() == ["a.png", "b.png"] and np.isfinite(found["features"]).all()


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


def test_threads_of_torch_give_way_unless_the_environment_says_how_they_wait(tmp_path, monkeypatch):
    """OMP_DISPLAY_ENV prints what OpenMP has read, so the setting was there before torch was loaded.

    Of torch only its OpenMP is loaded: the rest takes three seconds.
    """
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    openmp = re.search(r"\S+libgomp\S+", Path("/proc/self/maps").read_text())[0]
    (tmp_path / "torch.py").write_text(f"import ctypes; ctypes.CDLL({openmp!r}); raise SystemExit(9)")
    words = [*cli_command(), "embed", "nowhere", ".", "--output", "rows.npz"]
    environment = os.environ | {"OMP_DISPLAY_ENV": "VERBOSE", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 9 and "GOMP_SPINCOUNT = '10000'" in done.stderr
    monkeypatch.setattr(sys, "argv", ["fastsuncet", "version"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert cli.main() == 0 and "GOMP_SPINCOUNT" not in os.environ


def test_version_is_that_of_the_installed_build_or_none_and_imports_nothing(monkeypatch):
    before = set(sys.modules)
    versions.installed("scikit-learn"), versions.dali()
    assert not {name.split(".")[0] for name in set(sys.modules) - before} & {"sklearn", "nvidia"}
    for build, found in (("torch", metadata.version("torch")), ("nor-this", None)):
        monkeypatch.setattr(versions, "DALI", ("no-such-package", build))
        assert versions.dali() == found
