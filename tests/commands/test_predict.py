"""The classes of a folder: names, calibrated probabilities, a classifier that is fitted once, bad images."""

import csv
import json
from pathlib import Path

import PIL.Image
import pytest

import fastsuncet
from fastsuncet import cli
from fastsuncet.commands import folder_pass, prediction_page
from fastsuncet.config import ConfigErrors
from fastsuncet.evaluation import classifier
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.metrics.results import read_results
from pipelines.data_errors import BadImage, DataError
from tests.support.exports import save_run

COLORS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def picture(path: Path, color: str, number: int) -> None:
    """Write a picture of one color with noise that differs from picture to picture."""
    noise = PIL.Image.effect_noise((40 + number, 50), 40).convert("RGB")
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.blend(noise, PIL.Image.new("RGB", noise.size, COLORS[color]), 0.6).save(path)


def labels(folder: Path, *, each: int = 6, classes: tuple[str, ...] = tuple(COLORS)) -> None:
    lines = [f"{color}{i}.png,{color}" for color in classes for i in range(each)]
    (folder / "labels.csv").write_text("\n".join(["file,label", *lines]))


@pytest.fixture
def run(tmp_path) -> Path:
    """A run of a tiny encoder on 18 labeled pictures of three colors, and 12 unlabeled ones in a tree."""
    for color in COLORS:
        for i in range(6):
            picture(tmp_path / "mine" / f"{color}{i}.png", color, i)
        for i in range(4):
            picture(tmp_path / "photos" / f"part{i % 2}" / f"{color}{i}.png", color, 7 + i)
    labels(tmp_path)
    data = [f"data.root={tmp_path / 'mine'}", f"data.csv={tmp_path / 'labels.csv'}", "data.train=null"]
    kind = ["data.kind=csv", "data.split.kind=csv", "data.split.file=null", "data.split.sha256=null"]
    save_run(tmp_path / "run", "model.name=resnet_tiny", "data.augmentation.size=32", *data, *kind)
    return tmp_path / "run"


def words(run: Path, output: str = "predictions.csv") -> list[str]:
    return ["predict", str(run), str(run.parent / "photos"), "--output", output, "--batch", "4"]


def rows(output: str = "predictions.csv") -> list[dict[str, str]]:
    with open(output, newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_predict_writes_names_and_probabilities_and_keeps_the_classifier(run, capsys, monkeypatch):
    assert cli.main(words(run)) == 0
    printed, found = capsys.readouterr().out, rows()
    assert list(found[0]) == ["file", "class", "probability", "second_class", "second_probability"]
    assert [each["file"] for each in found] == sorted(
        f"part{i % 2}/{color}{i}.png" for i in range(4) for color in COLORS
    )
    for each in found:
        assert each["class"] in each["file"] and each["second_class"] in set(COLORS) - {each["class"]}
        assert 1 / 3 < float(each["probability"]) < 1
        assert float(each["second_probability"]) <= min(0.5, 1.0001 - float(each["probability"]))
    for part in (
        "18 labels of 3 classes",
        "100.0 % right, 95 % interval 82.4 to 100.0",
        "probabilities are off by",
        "below 0.5",
    ):
        assert part in printed
    # The next call fits nothing, gives the same rows, and those of Python.
    with monkeypatch.context() as patch:
        patch.delattr(classifier, "fit_classifier")
        assert cli.main(words(run, "again.csv")) == 0
        assert "fitted before" in capsys.readouterr().out and rows("again.csv") == found
        in_python = fastsuncet.predict(run, run.parent / "photos", batch=4)
    assert [(each.file, each.label, f"{each.probability:.4f}") for each in in_python] == [
        (each["file"], each["class"], each["probability"]) for each in found
    ]
    labels(run.parent, each=5)
    assert cli.main(words(run, "fewer.csv")) == 0
    assert "15 labels of 3 classes, strength" in capsys.readouterr().out
    assert len(list((run / "classifier").iterdir())) == 2


@pytest.mark.slow
def test_predict_lists_skipped_images_and_continues_with_them(run, capsys, monkeypatch):
    photos, save_every = run.parent / "photos", folder_pass.SAVE_EVERY
    monkeypatch.setitem(save_every, "cpu", 1)
    (photos / "a.png").write_bytes(b"no image")
    whole = (photos / "part0" / "red0.png").read_bytes()
    (photos / "part0" / "red0.png").write_bytes(whole[: len(whole) // 2])  # its header is good
    assert cli.main(words(run)) == 3 and not Path("predictions.csv").exists()
    assert "a.png" in capsys.readouterr().err

    def stopped(*_, count=[], outputs=folder_pass.outputs, **__):  # noqa: B006 - counts its calls
        count.append(0)
        if len(count) == 4:
            raise KeyboardInterrupt
        return outputs(*_, **__)

    with monkeypatch.context() as patch:
        patch.setattr(folder_pass, "outputs", stopped)
        assert cli.main([*words(run), "--skip-bad"]) == 130
    assert cli.main([*words(run), "--skip-bad"]) == 0
    printed = capsys.readouterr().out
    assert "continuing after" in printed and "2 images that cannot be decoded" in printed
    assert "a.png: not an image" in printed and "part0/red0.png: " in printed
    empty = [each["file"] for each in rows() if not each["class"] + each["probability"]]
    assert empty == ["a.png", "part0/red0.png"] and len(rows()) == 13
    with pytest.raises(BadImage):
        fastsuncet.predict(run, photos)
    assert len(fastsuncet.predict(run, photos, skip_bad=True)) == 11
    for path in sorted(photos.rglob("red*.png")):  # a whole block, and then all
        path.write_bytes(path.read_bytes()[:-40])
    assert len(fastsuncet.predict(run, photos, skip_bad=True, batch=1)) == 8
    for path in photos.rglob("*.png"):
        path.write_bytes(whole[: len(whole) // 2])
    assert cli.main([*words(run, "none.csv"), "--skip-bad"]) == 3 and not Path("none.csv").exists()
    assert "13 images cannot be decoded" in capsys.readouterr().err
    assert fastsuncet.predict(run, photos, skip_bad=True) == []


@pytest.mark.slow
def test_predict_says_what_labels_cannot_tell_and_refuses_too_few(run, capsys):
    labels(run.parent, each=1)
    assert cli.main(words(run)) == 0
    assert "unknown: no class has two labels" in capsys.readouterr().out
    labels(run.parent, each=3, classes=("red",))
    with pytest.raises(DataError, match="all 3 labeled images are of the class red: a classifier needs two"):
        fastsuncet.predict(run, run.parent / "photos")
    (run.parent / "labels.csv").write_text("file,label\nred0.png,red\nred1.png,red\ngreen0.png,green\n")
    fastsuncet.predict(run, run.parent / "photos")
    assert "on 2 labels; single labels of 1 classes cannot be judged" in capsys.readouterr().out
    unlabeled = ["data.kind=images", f"data.root={run.parent / 'mine'}", "criterion.supervised_epochs=0"]
    unlabeled += [f"{key}=null" for key in ("data.split.file", "data.train", "evaluation.knn_every_epochs")]
    tiny = ("model.name=resnet_tiny", "data.augmentation.size=32", "data.split.kind=none")
    save_run(run.parent / "plain", *tiny, *unlabeled, "data.split.sha256=null", "data.validation=null")
    with pytest.raises(ConfigErrors, match="no image has a label"):
        fastsuncet.predict(run.parent / "plain", run.parent / "photos")


@pytest.mark.slow
def test_predict_page_shows_the_surest_and_what_lies_between_without_a_network(run, monkeypatch):
    monkeypatch.setattr(prediction_page, "OF_CLASS", 1)
    monkeypatch.setattr(prediction_page, "GAP", 1.1)  # every image
    photos = run.parent / "photos"
    (photos / "part0" / "red0.png").rename(photos / "part0" / '<script>&".png')
    assert cli.main([*words(run), "--page"]) == 0
    page, found = Path("predictions.html").read_text(), rows()
    assert page.count('<img src="data:image/jpeg;base64,') == 3 * 2 + 12
    assert "://" not in page and "<script>" not in page and "&lt;script&gt;&amp;&quot;.png" in page
    for color in COLORS:
        part = page.split(", 4 images</h2>")[1 + sorted(COLORS).index(color)].split("<h2")[0]
        mine = sorted((float(each["probability"]) for each in found if each["class"] == color), reverse=True)
        surest, least = part.split("least sure")
        assert f"{color} {100 * mine[0]:.0f} %" in surest and f"{color} {100 * mine[-1]:.0f} %" in least
    assert "12 images whose two best classes" in page and "% right, 95 % interval" in page
    assert cli.main([*words(run, "other.csv"), "--page"]) == 0
    Path("other.csv").unlink()
    assert cli.main([*words(run, "other.csv"), "--page"]) == 2 and not Path("other.csv").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["linear", "knn"])
def test_evaluate_without_validation_images_leaves_out_labels(run, capsys, monkeypatch, kind):
    changes = {"data.validation": None, "evaluation.knn_every_epochs": None, "evaluation.knn_k": 3}
    config = load_encoder(run).trained.with_values(changes)
    Path("mine.yaml").write_text(config.to_yaml())
    assert cli.main(["evaluate", kind, "mine.yaml", "logging.write_tag=run"]) == 0
    printed = capsys.readouterr().out
    assert "18 labeled ones" in printed and "95 % interval " in printed
    (record,) = read_results(run)
    assert record["images"] == 18 and record["setting"]["folds"] == record["setting"]["repeats"] == 5
    assert record["metrics"]["top1"] > 0.9
    # Labels that mean nothing are not recognized, although each is among the images that are learned from.
    names = [f"{color}{i}" for color in COLORS for i in range(6)]
    mixed = [f"{name}.png,{'ab'[i % 2]}" for i, name in enumerate(names)]
    (run.parent / "labels.csv").write_text("\n".join(["file,label", *mixed]))
    assert cli.main(["evaluate", kind, "mine.yaml", "logging.write_tag=run"]) == 0
    assert min(each["metrics"]["top1"] for each in read_results(run)) < 0.85
    (run.parent / "labels.csv").write_text("file,label\nred0.png,red\nblue0.png,blue\n")
    assert cli.main(["evaluate", kind, "mine.yaml", "logging.write_tag=run"]) == 3
    assert "no class has two labels" in capsys.readouterr().err
    (run.parent / "labels.csv").write_text("file,label\nred0.png,red\nred1.png,red\nblue0.png,blue\n")
    assert cli.main(["evaluate", kind, "mine.yaml", "logging.write_tag=run"]) == 0
    assert "2 classes have fewer than 5 labels (blue, red)" in capsys.readouterr().out


@pytest.mark.slow
def test_suggest_writes_unlabeled_images_and_a_page(run, capsys):
    for i in range(8):
        picture(run.parent / "mine" / f'new"<{i}>.png', "red", 20 + i)
    words = ["suggest", str(run), "--count", "5", "--output", "next.csv"]
    assert cli.main([*words, "--page"]) == 0
    with open("next.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 5 and all(row["file"].startswith("new") and row["label"] == "" for row in rows)
    assert "5 of 8 images without a label" in capsys.readouterr().out
    page = Path("next.html").read_text()
    assert page.count("data:image/jpeg") == 5 and "<0>" not in page and "https:" not in page
    guesses = json.loads(page.split('id="data">')[1].split("</script>")[0])["guesses"]
    assert [each[0][0] for each in guesses] == ["red"] * 5 and all(len(each) == 2 for each in guesses)
    assert fastsuncet.suggest(run, 5) == [row["file"] for row in rows]
    assert cli.main(words) == 2 and "exists" in capsys.readouterr().err
    assert cli.main([*words[:3], "9", "--output", "more.csv"]) == 3
    assert "only 8 images" in capsys.readouterr().err and not Path("more.csv").exists()
