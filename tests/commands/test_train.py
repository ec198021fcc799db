"""The step of a dry run, and what a run says at its end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from fastsuncet.config import load_config
from fastsuncet.distributed.place import Place
from fastsuncet.optim import LARS
from fastsuncet.training import step
from fastsuncet.tuning import fast_paths
from tests.support.methods import METHODS
from tests.support.reports import result
from tests.support.runs import SMALL, tiny_config
from tests.support.runs import train as run

ROOT = Path(__file__).resolve().parents[2]
PLAIN_COLORS = "data.augmentation.strength=0"
DRY = ["train", "digits_demo", "--dry-run=step", *SMALL]


@pytest.mark.slow
def test_run_records_its_paths_and_a_continued_one_is_given_them(tmp_path, monkeypatch, capsys):
    """In the summary, config.yaml, the first metrics line and the checkpoint. The continued one is complete.

    If its folder is moved, its config names the old place, where a new run begins with a note and without old results.
    """
    asked = []

    def choose(config, arithmetic, place, per_class, before, stopped):
        asked.append(before)
        return {"x.cu": None, "y.cu": "slower"}

    monkeypatch.setattr(Place, "on_gpu", True)
    monkeypatch.setattr(fast_paths, "choose", choose)
    # The graph of colors by DALI's operators takes a second of each run.
    config = tiny_config(tmp_path, "optimization.steps=2", "optimization.warmup=0", PLAIN_COLORS)
    run(config)
    said = capsys.readouterr().out
    assert "speed    x.cu; not y.cu: slower; not torch.compile: " in said and "complete" not in said
    assert f"weights  {config.run_folder}/checkpoints/step_00000002\nnext     fastsuncet evaluate" in said
    old = result(config.run_folder, 2, 0.5)
    run(config)
    said = f"complete {config.run_folder} has had all its 2 updates: nothing was trained"
    assert said in capsys.readouterr().out
    assert asked == [{}, {"x.cu": True, "y.cu": False}]
    assert len((config.run_folder / "learned.csv").read_text().splitlines()) == 1 + 70
    chosen = '"precision": "fp32", "paths": ["x.cu"]}\n'
    first, *_ = (config.run_folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert first == '{"step": 0, "kind": "chosen", ' + chosen
    assert "# chosen for this hardware: {" + chosen in (config.run_folder / "config.yaml").read_text()
    assert old.exists()
    moved = config.run_folder.rename(tmp_path / "moved")
    result(config.run_folder, 2, 0.5).with_suffix(".png").touch()
    other = result(config.run_folder, None, 0.5, source="/weights/resnet50.pth")
    run(load_config(moved / "config.yaml"))
    add = f"Add logging.folder={tmp_path} logging.write_tag=moved to continue {moved}"
    said, aside = capsys.readouterr().out, config.run_folder / "results.superseded-1"
    assert f"note: a new run begins in {config.run_folder}. {add}\n" in said
    assert f"results: a fresh start; 1 earlier result moved to {aside}\n" in said
    assert [*old.parent.iterdir()] == [other] and {*aside.glob(f"{old.stem}.*")} == {*aside.iterdir()}


@pytest.mark.slow
def test_dry_run_step_times_a_few_updates_and_keeps_nothing(tmp_path, monkeypatch, run_cli):
    update, calls = LARS.step, []
    monkeypatch.setattr(LARS, "step", lambda *given: calls.append(given) or update(*given))
    plan, end = run_cli(*DRY).rsplit("\n\n", 1)
    assert "steps    4 an epoch, 10 in all" in plan and len(calls) == 1 + 2 + 2
    speed, end = end.split("\n", 1)
    assert speed == "speed    PyTorch's operators, as on any CPU"
    numbers = re.match(
        r"dry run: the first step took ([\d.]+) s \(([\d.]+) s of it waiting for images\) and at most ([\d.]+) GB of "
        r"resident memory on a process; nt_xent ([\d.]+), suncet ([\d.]+)\. Later steps take ([\d.]+) s, so that "
        r"the run takes about ([\d.]+) s without its evaluations\. Nothing was saved",
        end,
    )
    assert numbers is not None, end
    seconds, wait, memory, instance, supervised, later, whole = map(float, numbers.groups())
    assert seconds >= wait > 0 and memory > 0.1 and instance > 1 and supervised > 0.1
    assert whole == pytest.approx(10 * later, rel=0.1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dry", [True, False])
def test_run_that_does_not_fit_a_gpu_names_its_key_and_line(dry, tmp_path, monkeypatch, run_cli):
    call = step.nn.Module.__call__

    def full(module, *given):
        if not module.training:  # the plan counts the network's cost
            return call(module, *given)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...")

    monkeypatch.setattr(step.nn.Module, "__call__", full)
    words = DRY if dry else ["train", "digits_demo", *SMALL, f"logging.folder={tmp_path}"]
    error = run_cli(*words, code=2)
    assert "command line: criterion.unsupervised_batch_size=360" in error
    assert "does not fit the GPU's memory: CUDA out of memory. Tried to allocate 20.00 GiB. Lower it" in error
    for status in tmp_path.glob("*/status.json"):
        said = json.loads(status.read_text())
        assert said["exit_code"] == 2 and "does not fit the GPU's memory" in said["message"]


@pytest.mark.parametrize(
    ("processes", "method", "words", "said"),
    [
        (1, "labels alone, cross-entropy", "criterion.classes_per_batch=1 criterion.supervised_imgs_per_class=1",
         "criterion.supervised_imgs_per_class=1 must be 2 or more, or criterion.classes_per_batch, in a run on labels"),
        (2, "PAWS", "criterion.unsupervised_batch_size=2 swav.small_crops=1 model.sync_batchnorm=false",
         "model.sync_batchnorm=false must be true where each of 2 processes has one image of a size"),
    ],
)  # fmt: skip
def test_run_of_one_image_a_process_is_refused(
    tmp_path, monkeypatch, run_cli, processes, method, words, said
):
    """With the key, in place of torch's error in the first step."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    keys = [*METHODS[method], *words.split(), "model.head_batchnorm=true", "optimization.warmup=0"]
    for more in (["--dry-run"], [f"logging.folder={tmp_path}"])[: 3 - processes]:
        error = run_cli("train digits_demo", *keys, *more, code=2)
        assert said in " ".join(error.split())


def test_dry_run_prints_the_notes_of_several_processes(monkeypatch, run_cli):
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = run_cli("train digits_demo --dry-run criterion.supervised_imgs_per_class=20")
    assert "fewer labeled images than the 20 a batch takes: several ranks take the same image" in plan


def test_dry_run_refuses_a_tracker_whose_package_is_missing(monkeypatch, run_cli):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = run_cli("train digits_demo --dry-run logging.wandb=project", code=2)
    assert "logging.wandb=project" in error and "`pip install wandb`" in error


AUDIT = """
import json, os, sys
seen = set()


def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & os.O_ACCMODE != os.O_WRONLY:
        seen.add(os.path.abspath(os.fsdecode(arguments[0])))


sys.addaudithook(hook)
import fastsuncet
early = {"fastsuncet.config", "pipelines", "torch", "numpy", "pydantic", "yaml"} & set(sys.modules)
import fastsuncet.commands.train
early |= {"torch._dynamo", "torchvision", "timm", "nvidia", "sklearn", "matplotlib"} & set(sys.modules)
early |= {"fastsuncet.commands.export", "fastsuncet.evaluation"} & set(sys.modules)
from fastsuncet import cli
assert cli.main(sys.argv[1:]) == 0
read = sorted(path for path in seen if not os.path.isdir(path))
from fastsuncet.tuning.fast_paths import PATHS
from tests.support.pretended import paper
assert PATHS["norm.cu"].excluded(*paper(1)) is None
print("\\n" + json.dumps([sorted(early), sorted({"torch._dynamo", "sympy"} & set(sys.modules)), read]))
"""


@pytest.mark.slow
def test_start_imports_and_reads_only_what_it_needs(tmp_path):
    """The first six libraries took as long as torch itself, and so do Dynamo and SymPy.

    torchvision imports those two, so DALI makes the views. What decides about BatchNorm's kernels, which a run on a CPU
    does not ask, needs neither. Besides programs and the system, a run reads only the files of its own folder; the
    digits are in a package.
    """
    pytest.importorskip("nvidia.dali")
    small = (*SMALL, "criterion.unsupervised_batch_size=8", "checkpoint.export=[]", PLAIN_COLORS)
    # Without the view operator, which is compiled for minutes in an empty home.
    quick = ("data.view_operator=false", "optimization.steps=2", "optimization.warmup=0")
    words = ["train", "digits_demo", *small, *quick, f"logging.folder={tmp_path / 'runs'}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("FASTSUNCET_CACHE", "XDG_CACHE_HOME")}
    (temporary := tmp_path / "temporary").mkdir()
    environment |= {"HOME": str(tmp_path), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", AUDIT, *words]
    done = subprocess.run(program, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    early, late, read = json.loads(done.stdout.splitlines()[-1])
    if Version(torch.__version__) < Version("2.15"):
        late = [name for name in late if name != "sympy"]  # torch 2.10 loads it for a network without memory
    assert early == late == []
    folders = (sys.prefix, sys.base_prefix, str(ROOT), "/usr", "/lib", "/etc", "/proc", "/sys", "/dev")
    own = str(tmp_path / "runs")
    # The folder of the test can be in /dev/shm.
    read = [path for path in read if path.startswith(str(tmp_path)) or not path.startswith(folders)]
    read = [path for path in read if not path.startswith(str(temporary))]
    # An editable installation looks for a file of that name.
    assert [path for path in read if not path.startswith(own) and not path.endswith("path_hook__")] == []
    assert any(path.startswith(own) for path in read)
