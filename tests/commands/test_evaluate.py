"""`fastsuncet evaluate`: what it prints, what it writes, and its exit codes."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision

from fastsuncet import cli
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.place import Place, join
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.metrics.results import read_results
from fastsuncet.models.resnet import build_model
from pipelines.output import say_once
from tests.support.checkpoints import save_model
from tests.support.colors import write_colors
from tests.support.runs import CONFIGS, small_config
from tests.support.trackers import tensorboard

pytestmark = pytest.mark.slow

LABELS = r"labels   160 labeled images, \d+ to \d+ in each of 10 classes \(Bernoulli\(0\.1\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two checkpoints with untrained encoders, and files of weights with a classifier."""
    folder = tmp_path_factory.mktemp("evaluate")
    config = small_config(folder)
    for step in (10, 20):
        model = build_model("resnet_tiny", stem=config.model.stem, seed=step)
        save_model(config.run_folder, config, model, step)
    torch.save(torchvision.models.resnet18(num_classes=10).state_dict(), folder / "ten.pth")
    torch.save(build_model("resnet_tiny", stem="imagenet").encoder.state_dict(), folder / "tiny.pth")
    return folder


@pytest.fixture
def evaluate(folder, run_cli):
    """A function that evaluates the run in `folder` and returns what is printed."""
    run = f"{CONFIGS}/digits_demo.yaml logging.folder={folder} meta.threads=1"
    return lambda words, *last, **code: run_cli(f"evaluate {words} {run}", *last, **code)


def results(folder) -> dict[str, dict]:
    return {f"{one['kind']} {one['encoder']['step']}": one for one in read_results(folder / "digits_demo")}


def test_evaluate_refuses_where_it_cannot_write_before_it_opens_images(folder, evaluate, monkeypatch):
    monkeypatch.setattr("fastsuncet.commands.evaluate.open_images", None)
    Path("digits_demo").touch()
    said = evaluate(f"knn --encoder {folder}/digits_demo", "logging.folder=.", code=5)
    assert "results/result.json cannot be written" in said


@pytest.mark.parametrize("kind", ["knn", "npi", "linear"])
def test_evaluate_prints_and_writes_its_number(folder, evaluate, kind):
    lines = evaluate(f"{kind} logging.tensorboard=true").splitlines()
    assert lines[0].startswith(f"{kind:<9}")
    assert re.match(LABELS, lines[1])
    assert lines[2] == "images   355 for validation, each once"
    said = re.fullmatch(
        r"step 20 \(epoch 5, SimCLR \+ SuNCEt\)  (\d+\.\d\d) %, standard error (\d\.\d\d).*", lines[3]
    )
    result = results(folder)[f"{kind} 20"]
    sent = tensorboard(folder / "digits_demo")["numbers"][f"results/{kind}/top1"]
    assert sent == [(20, pytest.approx(result["metrics"]["top1"]))]
    assert float(said[1]) == pytest.approx(100 * result["metrics"]["top1"], abs=0.005)
    path = next((folder / "digits_demo" / "results").glob(f"{kind}-*step00000020*.json"))
    assert lines[4] == f"written  {path}" and ("; top 5 " in lines[3]) == ("top5" in result["metrics"])
    assert result["images"] == 355
    assert result["labels"] == {"kind": "bernoulli", "fraction": 0.1, "count": 160}
    assert result["encoder"]["ledger"]["petaflops"] == 0.1
    assert result["run"] == "digits_demo" and result["versions"]["torch"]
    assert result["setting"]["size"] == result["setting"]["resize"] == 16
    right = result["metrics"]["top1"] * 355
    assert right == pytest.approx(round(right), abs=1e-9) and 0 < right < 355


def test_evaluate_npi_on_the_projection_takes_center_crops(folder, evaluate):
    """PAWS's evaluation: the same as by hand."""
    assert "features projection" in evaluate("npi npi.features=projection npi.views=0")
    (result,) = (one for one in read_results(folder / "digits_demo") if one["setting"].get("views") == 0)
    config = small_config(folder)
    images = open_images(config, Place(0, 1, torch.device("cpu")), validation=True)
    model = build_model("resnet_tiny", stem=config.model.stem, seed=20).eval()

    def rows(pixels) -> torch.Tensor:
        shown = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
        with torch.no_grad():
            return F.normalize(model(F.interpolate(shown, size=16, mode="bilinear")))

    labeled = images.split.indices
    p = (rows(images.validation.pixels) @ rows(images.train.pixels[labeled]).T / 0.2).softmax(1)
    by_class = p @ F.one_hot(torch.from_numpy(images.train.labels[labeled])).float()
    right = (by_class.argmax(1) == torch.from_numpy(images.validation.labels)).float().mean().item()
    assert result["metrics"]["top1"] == pytest.approx(right, abs=2.5 / 355)  # another interpolation
    said = evaluate(f"npi npi.features=projection --encoder {folder}/tiny.pth", code=2)
    assert "holds no projection head" in " ".join(said.split())
    evaluate(f"knn npi.features=projection --encoder {folder}/tiny.pth")  # needs none


def test_evaluate_every_checkpoint_writes_one_file_for_each(folder, evaluate):
    lines = evaluate("knn --every-checkpoint").splitlines()
    assert [line.split(" (")[0] for line in lines[3:5]] == ["step 10", "step 20"]
    assert lines[5].endswith("results, 2 results")
    one, two = (results(folder)[f"knn {step}"]["metrics"]["top1"] for step in (10, 20))
    assert f"{100 * one:.2f} %" in evaluate("knn --step 10") and one != two  # replaces its file
    assert len(list((folder / "digits_demo" / "results").glob("knn-bernoulli-0.1-step*.json"))) == 2


def test_evaluate_accuracy_needs_a_classifier(folder, evaluate):
    out = evaluate(f"accuracy --encoder {folder}/ten.pth")
    assert "labels" not in out
    assert "pixels   0 to 1; the weights of torchvision and timm expect data.augmentation.mean=[0.485," in out
    assert f"encoder  {folder / 'ten.pth'} (resnet18, imagenet stem)\ntop 1  " in out
    assert 0 <= results(folder)["accuracy None"]["metrics"]["top1"] < 0.5, "untrained"
    said = evaluate("accuracy", code=2)
    assert "step_00000020 has no classifier" in said and "fastsuncet finetune" in said


def colors_config(folder) -> str:
    """Write images of three colors, two lists of four of them, and two folders to validate on; return a config."""
    write_colors(folder)
    shutil.copytree(folder / "val", folder / "val2")
    (folder / "val2" / "r" / "0.png").rename(folder / "val2" / "r" / "9.png")
    for name, second in (("a", 1), ("b", 2)):
        (folder / f"{name}.txt").write_text(f"r/0.png\nr/{second}.png\ng/0.png\nb/0.png\n")
    split = f"data.split.kind=names data.split.file={folder}/a.txt"
    return f"{folder}/colors.yaml data.backend=torchvision {split} meta.device=cpu"


def test_evaluate_of_other_labels_images_or_pixels_has_another_file(folder, run_cli, tmp_path):
    """As many labels and as many images: only their names differ. Three classes have no top 5."""
    command = f"evaluate knn {colors_config(tmp_path)} --encoder={folder}/tiny.pth"
    others = [f"data.split.file={tmp_path}/b.txt", "data.validation=val2"]
    others += [f"data.augmentation.{key}=[0.5,0.5,0.5]" for key in ("mean", "std")]
    for words in ("", *others, ""):
        said = run_cli(f"{command} {words}")
        assert "top 5" not in said and ("pixels   0 to 1" in said) == ("augmentation" not in words)
    found = read_results(tmp_path / "runs" / "colors")
    assert len(found) == 1 + len(others)
    assert all(each["metrics"].keys() == {"top1", "top1_weighted"} for each in found)


def test_evaluate_refuses_and_writes_nothing(folder, capsys, tmp_path, monkeypatch):
    """Further faults are in tests/evaluation (encoder, scoring) and tests/pipelines/datasets (images, labels)."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = colors_config(tmp_path)
    for words, code, said in (
        ("--step=7 --every-checkpoint", 2, "not allowed with argument"),
        ("data.validation=null", 2, "measured on validation images: set their folder"),
        (f"--encoder={folder}/tiny.pth data.validation=nowhere", 3, f"no data folder {tmp_path}/nowhere"),
        (f"--encoder={folder}/tiny.pth logging.wandb=project", 2, "`pip install wandb`"),
    ):
        ended = cli.main(f"evaluate npi {config} {words}".split())
        out, err = capsys.readouterr()
        assert (ended, out) == (code, "") and said in " ".join(err.split())
        assert not (tmp_path / "runs" / "colors").exists()


def test_evaluate_reports_a_fit_that_did_not_converge(folder, evaluate):
    out = evaluate("linear linear.max_iterations=2 linear.strength=auto data.split.fraction=0.02 --step 10")
    assert "NOT fitted: after 2 iterations" in out
    setting = results(folder)["linear 10"]["setting"]
    assert setting["converged"] is False and setting["strength"] == "auto"
    assert f"strength {setting['chosen_strength']:g}, by cross-validation from 1e-05 to 100" in out


@pytest.mark.parametrize(
    ("kind", "key", "value"), [("linear", "strength", 0.1), ("linear", "strength", "auto"), ("knn", "k", 3)]
)
def test_evaluate_without_validation_images_leaves_out_labels(run, labels, run_cli, kind, key, value):
    Path("mine.yaml").write_text(load_encoder(run).trained.to_yaml())
    auto = ["linear.strength=auto"] * (value == "auto")
    printed = run_cli(f"evaluate {kind} mine.yaml logging.write_tag=run", *auto)
    assert "18 labeled ones" in printed and "95 % interval " in printed
    assert f"{key} {value}" in printed.splitlines()[0]
    (record,) = read_results(run)
    setting = record["setting"]
    if auto:
        assert f"; strength {setting['chosen_strength']:g}, by cross-validation from 1e-05 to 100" in printed
    assert (record["images"], setting["folds"], setting["repeats"], setting[key]) == (18, 5, 5, value)
    assert record["metrics"]["top1"] > 0.9
    assert record["classes"]["red"]["images"] == 30, "six labels, each left out in five repeats"
    assert "learned" not in record


def test_evaluate_of_left_out_labels_says_what_they_cannot_tell(run, labels, run_cli):
    Path("mine.yaml").write_text(load_encoder(run).trained.to_yaml())
    command = "evaluate knn mine.yaml logging.write_tag=run"
    # Labels that mean nothing are not recognized, although each is among the images that are learned from.
    names = [f"{color}{i}.png,{'ab'[i % 2]}" for color in ("red", "green", "blue") for i in range(6)]
    labels(text="\n".join(["file,label", *names]))
    shutil.copy("labels.csv", run / "learned.csv")
    assert "has learned from these labels" in run_cli(command)
    (record,) = read_results(run)
    assert record["metrics"]["top1"] < 0.85 and record["learned"] == 18
    labels(text="file,label\nred0.png,red\nblue0.png,blue\n")
    assert "no class has two labels" in run_cli(command, code=3)
    labels(text="file,label\nred0.png,red\nred1.png,red\nblue0.png,blue\n")
    assert "2 classes have fewer than 5 labels (blue, red)" in run_cli(command)


def test_judging_leaves_out_validation_images_that_were_learned(run, run_cli):
    """More labels make another draw of a share. Where all were learned, all stay, and the accuracy is too high."""
    config = load_encoder(run).trained.with_values({"data.validation": 0.34})
    Path("mine.yaml").write_text(config.to_yaml())
    with join(config) as place:
        names = [*open_images(config, place, validation=True).validation.files]
    tune = "finetune mine.yaml finetune.epochs=1 finetune.lr=0.001 finetune.batch_size=4"
    for known, left, learned in ((names[:2], 4, 0), (names, 6, 6)):
        (run / "learned.csv").write_text("\n".join(["file,label", *(f"{x},{x[:-5]}" for x in known)]))
        for command in ("evaluate knn mine.yaml", tune):
            say_once.cache_clear()
            printed = run_cli(command, "logging.write_tag=run", f"finetune.write_tag=of{left}")
            assert ("note: 2 of 6 validation images are left out" in printed) == (left == 4)
            assert ("the accuracy on other images is lower" in printed) == (left == 6)
            newest = max((run / "results").glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            record = json.loads(newest.read_text())
            assert (record["images"], record.get("learned", 0)) == (left, learned)
    (tuned,) = (run / "finetune").glob("of4*")
    # The fine-tuning has learned from its own labels too, also where it lies without them.
    table = tuned / "learned.csv"
    of_both = {line.split(",")[0] for line in table.read_text().split()[1:]}
    assert len(of_both) == 12 + 2 and set(names) & of_both == set(names[:2])
    moved = Path(shutil.copytree(tuned, "elsewhere"))
    (moved / "learned.csv").unlink()
    command = "evaluate accuracy mine.yaml logging.write_tag=run --encoder"
    for where in (tuned, moved):
        say_once.cache_clear()
        printed = run_cli(command, where)
        assert ("2 of 6 validation images are left out" in printed) == (where == tuned)
        assert ("the accuracy on other images is lower" in printed) == (where != tuned)
    labels = Path("labels.csv")
    labels.write_text(labels.read_text().replace(",red", ",rot"))
    said = run_cli(command, tuned, code=3)
    assert "other classes than the images: red, rot. Give classes the names" in said
