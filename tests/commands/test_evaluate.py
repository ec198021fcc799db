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

CONFIG = str(CONFIGS / "digits_demo.yaml")
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


def evaluate(folder, capsys, kind: str, *words: str) -> tuple[int, str, str]:
    code = cli.main(["evaluate", kind, *words, CONFIG, f"logging.folder={folder}", "meta.threads=1"])
    said = capsys.readouterr()
    return code, said.out, said.err


def results(folder) -> dict[str, dict]:
    return {f"{one['kind']} {one['encoder']['step']}": one for one in read_results(folder / "digits_demo")}


def test_evaluate_refuses_where_it_cannot_write_before_it_opens_images(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fastsuncet.commands.evaluate.open_images", None)
    (tmp_path / "digits_demo").touch()
    code, _, err = evaluate(tmp_path, capsys, "knn", "--encoder", str(folder / "digits_demo"))
    assert code == 5 and "results/result.json cannot be written" in err


@pytest.mark.parametrize("kind", ["knn", "npi", "linear"])
def test_evaluate_prints_and_writes_its_number(folder, capsys, kind):
    code, out, err = evaluate(folder, capsys, kind, "logging.tensorboard=true")
    assert (code, err) == (0, "")
    lines = out.splitlines()
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
    assert lines[4] == f"written  {path}"
    assert result["images"] == 355
    assert result["labels"] == {"kind": "bernoulli", "fraction": 0.1, "count": 160}
    assert result["encoder"]["ledger"]["petaflops"] == 0.1
    assert result["run"] == "digits_demo" and result["versions"]["torch"]
    assert result["setting"]["size"] == result["setting"]["resize"] == 16
    right = result["metrics"]["top1"] * 355
    assert right == pytest.approx(round(right), abs=1e-9) and 0 < right < 355


def test_evaluate_npi_on_the_projection_takes_center_crops(folder, capsys):
    """PAWS's evaluation: the same as by hand."""
    code, out, err = evaluate(folder, capsys, "npi", "npi.features=projection", "npi.views=0")
    assert (code, err) == (0, "") and "features projection" in out
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
    words = ("npi.features=projection", "--encoder", str(folder / "tiny.pth"))
    code, _, err = evaluate(folder, capsys, "npi", *words)
    assert code == 2 and "holds no projection head" in " ".join(err.split())


def test_evaluate_every_checkpoint_writes_one_file_for_each(folder, capsys):
    code, out, _ = evaluate(folder, capsys, "knn", "--every-checkpoint")
    assert code == 0
    assert [line.split(" (")[0] for line in out.splitlines()[3:5]] == ["step 10", "step 20"]
    assert out.splitlines()[5].endswith("results, 2 results")
    one, two = (results(folder)[f"knn {step}"]["metrics"]["top1"] for step in (10, 20))
    code, out, _ = evaluate(folder, capsys, "knn", "--step", "10")  # replaces its file
    assert f"{100 * one:.2f} %" in out and one != two
    assert len(list((folder / "digits_demo" / "results").glob("knn-bernoulli-0.1-step*.json"))) == 2


def test_evaluate_accuracy_needs_a_classifier(folder, capsys):
    code, out, err = evaluate(folder, capsys, "accuracy", "--encoder", str(folder / "ten.pth"))
    assert (code, err) == (0, "")
    assert "labels" not in out
    assert "pixels   0 to 1; the weights of torchvision and timm expect data.augmentation.mean=[0.485," in out
    assert f"encoder  {folder / 'ten.pth'} (resnet18, imagenet stem)\ntop 1  " in out
    assert 0 <= results(folder)["accuracy None"]["metrics"]["top1"] < 0.5, "untrained"
    code, _, err = evaluate(folder, capsys, "accuracy")
    assert code == 2 and "step_00000020 has no classifier" in err and "fastsuncet finetune" in err


def colors_config(folder) -> list[str]:
    """Write images of three colors, two lists of four of them, and two folders to validate on; return a config."""
    write_colors(folder)
    shutil.copytree(folder / "val", folder / "val2")
    (folder / "val2" / "r" / "0.png").rename(folder / "val2" / "r" / "9.png")
    for name, second in (("a", 1), ("b", 2)):
        (folder / f"{name}.txt").write_text(f"r/0.png\nr/{second}.png\ng/0.png\nb/0.png\n")
    words = ["data.backend=torchvision", "data.split.kind=names", f"data.split.file={folder}/a.txt"]
    return [str(folder / "colors.yaml"), *words, "meta.device=cpu"]


def test_evaluate_of_other_labels_images_or_pixels_has_another_file(folder, capsys, tmp_path):
    """As many labels and as many images: only their names differ. Three classes have no top 5."""
    command = ["evaluate", "knn", *colors_config(tmp_path), f"--encoder={folder / 'tiny.pth'}"]
    others = [f"data.split.file={tmp_path}/b.txt", "data.validation=val2"]
    others += [f"data.augmentation.{key}=[0.5,0.5,0.5]" for key in ("mean", "std")]
    for words in ([], *([other] for other in others), []):
        assert cli.main([*command, *words]) == 0
    assert "top 5" not in capsys.readouterr().out
    found = read_results(tmp_path / "runs" / "colors")
    assert len(found) == 1 + len(others)
    assert all(each["metrics"].keys() == {"top1", "top1_weighted"} for each in found)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--step=7 --every-checkpoint", 2, "not allowed with argument"),
        ("data.validation=null", 2, "measured on validation images: set their folder"),
        ("--encoder=FOLDER/tiny.pth data.validation=nowhere", 3, "no data folder DATA/nowhere"),
        ("--encoder=FOLDER/tiny.pth logging.wandb=project", 2, "`pip install wandb`"),
    ],
)
def test_evaluate_refuses_wrong_input_and_writes_nothing(
    folder, capsys, tmp_path, monkeypatch, words, code, said
):
    """Further faults are in tests/evaluation (encoder, scoring) and tests/pipelines/datasets (images, labels)."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    words, said = (x.replace("FOLDER", str(folder)).replace("DATA", str(tmp_path)) for x in (words, said))
    given = cli.main(["evaluate", "npi", *colors_config(tmp_path), *words.split()])
    out, err = capsys.readouterr()
    assert (given, out) == (code, "") and said in " ".join(err.split())
    assert not (tmp_path / "runs" / "colors").exists()


def test_evaluate_reports_a_fit_that_did_not_converge(folder, capsys):
    words = ("linear.max_iterations=2", "linear.strength=auto", "data.split.fraction=0.02", "--step", "10")
    code, out, _ = evaluate(folder, capsys, "linear", *words)
    assert code == 0 and "NOT fitted: after 2 iterations" in out
    setting = results(folder)["linear 10"]["setting"]
    assert setting["converged"] is False and setting["strength"] == "auto"
    assert f"strength {setting['chosen_strength']:g}, by cross-validation from 1e-05 to 100" in out


@pytest.mark.parametrize("kind", ["linear", "knn"])
def test_evaluate_without_validation_images_leaves_out_labels(run, labels, capsys, kind):
    Path("mine.yaml").write_text(load_encoder(run).trained.to_yaml())
    assert cli.main(["evaluate", kind, "mine.yaml", "logging.write_tag=run"]) == 0
    printed = capsys.readouterr().out
    assert "18 labeled ones" in printed and "95 % interval " in printed
    assert {"linear": "strength 0.1", "knn": "k 3"}[kind] in printed.splitlines()[0]
    (record,) = read_results(run)
    assert record["images"] == 18 and record["setting"]["folds"] == record["setting"]["repeats"] == 5
    assert record["setting"].get("strength") == {"linear": 0.1, "knn": None}[kind]
    assert record["metrics"]["top1"] > 0.9
    assert record["classes"]["red"]["images"] == 30, "six labels, each left out in five repeats"
    assert "learned" not in record


def test_evaluate_of_left_out_labels_says_what_they_cannot_tell(run, labels, capsys):
    Path("mine.yaml").write_text(load_encoder(run).trained.to_yaml())
    command = ["evaluate", "knn", "mine.yaml", "logging.write_tag=run"]
    # Labels that mean nothing are not recognized, although each is among the images that are learned from.
    names = [f"{color}{i}.png,{'ab'[i % 2]}" for color in ("red", "green", "blue") for i in range(6)]
    labels(text="\n".join(["file,label", *names]))
    (run / "learned.csv").write_text((run.parent / "labels.csv").read_text())
    assert cli.main(command) == 0 and "has learned from these labels" in capsys.readouterr().out
    (record,) = read_results(run)
    assert record["metrics"]["top1"] < 0.85 and record["learned"] == 18
    labels(text="file,label\nred0.png,red\nblue0.png,blue\n")
    assert cli.main(command) == 3
    assert "no class has two labels" in capsys.readouterr().err
    labels(text="file,label\nred0.png,red\nred1.png,red\nblue0.png,blue\n")
    assert cli.main(command) == 0
    assert "2 classes have fewer than 5 labels (blue, red)" in capsys.readouterr().out


def test_judging_leaves_out_validation_images_that_were_learned(run, capsys):
    """More labels make another draw of a share. Where all were learned, all stay, and the accuracy is too high."""
    config = load_encoder(run).trained.with_values({"data.validation": 0.34})
    Path("mine.yaml").write_text(config.to_yaml())
    with join(config) as place:
        names = [*open_images(config, place, validation=True).validation.files]
    tune = ("finetune", "mine.yaml", "finetune.epochs=1", "finetune.lr=0.001", "finetune.batch_size=4")
    for known, left, learned in ((names[:2], 4, 0), (names, 6, 6)):
        (run / "learned.csv").write_text("\n".join(["file,label", *(f"{x},{x[:-5]}" for x in known)]))
        for command in (("evaluate", "knn", "mine.yaml"), tune):
            say_once.cache_clear()
            assert cli.main([*command, "logging.write_tag=run", f"finetune.write_tag=of{left}"]) == 0
            printed = capsys.readouterr().out
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
    for where in (tuned, moved):
        say_once.cache_clear()
        command = ["evaluate", "accuracy", "mine.yaml", "logging.write_tag=run", "--encoder", str(where)]
        assert cli.main(command) == 0
        printed = capsys.readouterr().out
        assert ("2 of 6 validation images are left out" in printed) == (where == tuned)
        assert ("the accuracy on other images is lower" in printed) == (where != tuned)
    labels = run.parent / "labels.csv"
    labels.write_text(labels.read_text().replace(",red", ",rot"))
    again = ["evaluate", "accuracy", "mine.yaml", "logging.write_tag=run", "--encoder", str(tuned)]
    assert cli.main(again) == 3
    assert "other classes than the images: red, rot. Give classes the names" in capsys.readouterr().err
