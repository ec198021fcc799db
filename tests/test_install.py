"""The wheel is complete: from an empty folder its command lists, plans and trains with what was installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastsuncet.config.reader import shipped

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "configs", "fastsuncet", "pipelines")
SYNTHETIC = (
    *("data.kind=synthetic", "data.root=null", "data.synthetic.classes=20", "data.synthetic.images=4000"),
    *("data.split.kind=all", "data.split.file=null", "optimization.epochs=12"),
    *("criterion.unsupervised_batch_size=2000", "criterion.supervised_imgs_per_class=8"),
)
pytestmark = pytest.mark.slow


def succeed(*words: str, folder: Path, **environment: str) -> str:
    """Run a command that must end with 0 in `folder`; return its output."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of the sources, without a network; return the folder it is installed in."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source, copy = ROOT / name, folder / "source" / name
        copy.parent.mkdir(exist_ok=True)
        shutil.copytree(source, copy, symlinks=True) if source.is_dir() else shutil.copy(source, copy)
    pip = ("-m", "pip", "--disable-pip-version-check")
    build = ("wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", ".", "./source")
    succeed(*pip, *build, folder=folder)
    (file,) = folder.glob("*.whl")
    target = folder / "installed"
    succeed(
        *pip, "install", "-q", "--no-index", "--no-deps", "--target", str(target), str(file), folder=folder
    )
    return target


@pytest.fixture
def run(wheel, tmp_path):
    """Return a function that runs the wheel's `fastsuncet` in an empty folder."""
    found = "import fastsuncet; print(fastsuncet.__file__)"
    printed = succeed("-c", found, folder=tmp_path, PYTHONPATH=str(wheel))
    assert printed == f"{wheel / 'fastsuncet' / '__init__.py'}\n"
    environment = {"PYTHONPATH": str(wheel), "OMP_NUM_THREADS": "1"}
    return lambda *words: succeed(*words, folder=tmp_path, **environment)


def test_wheel_lists_and_prints_the_shipped_configs(run):
    assert [line.split()[0] for line in run("-m", "fastsuncet", "configs").splitlines()] == list(shipped())
    assert "base: in1k_simclr\n" in run("-m", "fastsuncet", "configs", "in1k_10pct")


def test_wheel_plans_runs_the_demo_exports_and_embeds(run, tmp_path):
    (tmp_path / "photos").mkdir()
    for name in ("a.png", "b.png"):
        Image.effect_noise((20, 20), 60).convert("RGB").save(tmp_path / "photos" / name)
    trained = "runs/demo/digits_demo_seed0"
    commands = [
        ["train", "in1k_10pct", "--dry-run", *SYNTHETIC],
        ["demo", "optimization.steps=60", "optimization.warmup=1"],
        ["export", trained, "--to", "torchvision"],
        ["embed", f"{trained}/export/torchvision.pth", "photos", "--output", "photos.npz"],
    ]
    # In one process: importing torch and DALI takes seconds.
    out = run("-c", f"from fastsuncet.cli import main; assert not any(map(main, {commands}))")
    assert "dry run: all checks passed" in out and "After the same compute" in out
    made = {path.name for path in (tmp_path / "runs" / "demo").iterdir()}
    assert {"demo_seed0.json", "demo_seed0.png", "views.png"} <= made
    with np.load(tmp_path / "photos.npz") as found:
        assert found["files"].tolist() == ["a.png", "b.png"] and np.isfinite(found["features"]).all()
