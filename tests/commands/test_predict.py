"""The classes of a folder: names, calibrated probabilities, the best classifier of a run, bad images."""

import base64
import csv
import io
import json
import math
import os
import re
import shutil
import threading
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import fastsuncet
from fastsuncet.checkpoint import manager
from fastsuncet.commands import embed, pages
from fastsuncet.commands.data_pack import data_pack
from fastsuncet.commands.predict import Prediction
from fastsuncet.config import ConfigErrors
from fastsuncet.data import learned_labels
from fastsuncet.distributed.place import join
from fastsuncet.evaluation import classifier
from fastsuncet.evaluation.calibration import Calibration
from fastsuncet.evaluation.classifier import NearestNeighbors
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.evaluation.finetuning import frozen, job
from fastsuncet.evaluation.npi import npi_probabilities
from fastsuncet.metrics.results import read_results
from pipelines.data_errors import BadImage
from tests.support.exports import save_run
from tests.support.pictures import write_image

pytestmark = pytest.mark.slow

COLORS = ("red", "green", "blue")


def command(run: Path, output: str = "predictions.csv") -> str:
    return f"predict {run} photos --output {output} --batch 4"


def rows(output: str = "predictions.csv") -> list[dict[str, str]]:
    with open(output, newline="") as stream:
        return list(csv.DictReader(stream))


def test_predict_writes_probabilities_and_keeps_the_classifier(run, labels, picture, run_cli, monkeypatch):
    assert "no data folder nowhere" in run_cli(f"predict {run} nowhere --output predictions.csv", code=3)
    assert not (run / "classifier").exists(), "it was fitted first"
    printed, found = run_cli(command(run)), rows()
    assert list(found[0]) == ["file", "class", "probability", "second_class", "second_probability"]
    named = sorted(f"part{i % 2}/{color}{i}.png" for i in range(4) for color in COLORS)
    assert [each["file"] for each in found] == named
    for each in found:
        assert each["class"] in each["file"] and each["second_class"] in set(COLORS) - {each["class"]}
        assert 1 / 3 < float(each["probability"]) < 1
        assert float(each["second_probability"]) <= min(0.5, 1.0001 - float(each["probability"]))
    for part in (
        "18 labels of 3 classes",
        "100.0 % right, 95 % interval 82.4 to",
        "how far probabilities are off",
        "below 0.5",
    ):
        assert part in printed
    # The next call fits nothing, gives the same rows, and those of Python.
    with monkeypatch.context() as patch:
        patch.delattr(classifier, "fit_classifier")
        assert "fitted before" in run_cli(command(run, "again.csv")) and rows("again.csv") == found
        in_python = fastsuncet.predict(run, "photos", batch=4)
    theirs = [(each.file, each.label, f"{each.probability:.4f}") for each in in_python]
    assert theirs == [(each["file"], each["class"], each["probability"]) for each in found]
    # Photos that it was fitted to say nothing about the sureness of others.
    known = run_cli(f"predict {run} mine --output fitted.csv")
    assert "all of them are labeled, and it is less sure of others" in known
    picture(Path("mine/new.png"), "red", 30)
    printed, found = run_cli(f"predict {run} mine --output mine.csv --page"), rows("mine.csv")
    (mean,) = re.findall(r"mean probability (\S+) %; 0 of 1 \(0 %\) below 0\.5; the 18 labeled ones", printed)
    (new,) = (each["probability"] for each in found if each["file"] == "new.png")
    assert float(mean) == pytest.approx(100 * float(new), abs=0.06) and len(found) == 19
    page = Path("mine.html").read_text()
    assert "new.png" in page and "red0.png" not in page and "1 image<" in page
    trained = load_encoder(run).trained
    data_pack(trained, Path("shards"))
    Path("packed.yaml").write_text(trained.with_values({"data.pack": "shards"}).to_yaml())
    assert "; the 18 labeled ones" in run_cli("predict packed.yaml mine --output packed.csv")
    labels(5)
    photos = Path("photos").rename(os.fsdecode(b"photos\xff"))
    fewer = f"predict {run} {photos} --output fewer.csv --page"
    assert "15 labels of 3 classes" in run_cli(fewer)
    assert len(list((run / "classifier").iterdir())) == 2
    page = Path("fewer.html").read_text()
    assert page.count('<img src="data:image/jpeg;base64,') >= 12
    assert "% right, 95 % interval" in page and "://" not in page
    Path("fewer.csv").unlink()
    assert run_cli(fewer, code=2) and not Path("fewer.csv").exists()


def test_predict_lists_skipped_images_and_continues_with_them(run, run_cli, monkeypatch):
    photos = Path("photos")
    monkeypatch.setitem(embed.SAVE_EVERY, "cpu", 1)
    (photos / "a.png").write_bytes(b"no image")
    whole = (photos / "part0" / "red0.png").read_bytes()
    (photos / "part0" / "red0.png").write_bytes(whole[: len(whole) // 2])  # its header is good
    assert "a.png" in run_cli(command(run), code=3) and not Path("predictions.csv").exists()

    def stopped(*_, count=[], outputs=embed.outputs, **__):  # noqa: B006 - counts its calls
        count.append(0)
        if len(count) == 4:
            raise KeyboardInterrupt
        return outputs(*_, **__)

    with monkeypatch.context() as patch:
        patch.setattr(embed, "outputs", stopped)
        run_cli(command(run), "--skip-bad", code=130)
    printed = run_cli(command(run), "--skip-bad")
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
    assert "13 images cannot be decoded" in run_cli(command(run, "none.csv"), "--skip-bad", code=3)
    assert not Path("none.csv").exists()
    with pytest.raises(BadImage, match="13 images cannot be decoded"):
        fastsuncet.predict(run, photos, skip_bad=True)


def test_predict_skips_the_labels_of_images_that_cannot_be_decoded(run, run_cli, monkeypatch):
    """Those of a good header, in two batches, and that of none; the classifier of the others is kept."""
    monkeypatch.setattr(classifier, "outputs", partial(classifier.outputs, batch=4))
    for name, length in (("red0", 2000), ("red1", 2000), ("green0", 2000), ("blue1", 4)):
        os.truncate(f"mine/{name}.png", length)
    said = run_cli(command(run), code=3)
    assert "blue1.png: not an image" in said and "leave them out: --skip-bad" in said
    printed = run_cli(command(run), "--skip-bad")
    assert len(rows()) == 12
    skipped = re.findall(rf"^skipped      the label of {run.parent}/mine/(\w+)\.png: ", printed, re.M)
    assert sorted(skipped) == ["blue1", "green0", "red0", "red1"] and "14 labels of 3" in printed
    assert printed.count("fitting      a classifier") == 2
    monkeypatch.delattr(classifier, "fit_classifier")
    assert "fitted before" in run_cli(command(run), "--skip-bad", "--force")


def test_predict_of_a_run_whose_images_moved_takes_its_config(run, run_cli):
    trained = load_encoder(run).trained
    (run / "config.yaml").write_text(trained.to_yaml().replace("/mine", "/moved"))
    Path("mine").rename("moved")
    said = "mine: set data.root to the folder of the images, in config.yaml of the run, and give that file"
    for line in (command(run), f"suggest {run} --count 2 --output next.csv"):
        assert said in run_cli(line, code=3)
    run_cli(command(run / "config.yaml"))


def test_predict_judges_only_labels_that_the_network_has_not_learned(run, labels, run_cli, capsys):
    """All of them help to classify, those of data.validation too."""
    table = Path("labels.csv").read_text()
    (run / "learned.csv").write_text(table)
    printed = run_cli(command(run))
    assert "expected     unknown: the network has learned from these labels" in printed
    assert "calibration  not measured; as a rule the probabilities are too high" in printed
    (run / "learned.csv").write_text("\n".join(table.split("\n")[:13]))
    printed = run_cli(command(run), "--force")
    assert "cross-validation on 6 labels; the network has learned from the other 12)" in printed
    encoder = load_encoder(run)
    with join(encoder.trained) as place:
        index, _ = classifier.labeled_images(encoder.trained, place)

    def known(**changed) -> int:
        each = replace(encoder, **changed)
        return int(learned_labels.learned(each.lies_at, index, each.supervised).sum())

    # A fine-tuning without a table may have learned any label, and weights of another program none, wherever they lie.
    tuned = known(tuned=3, source=f"{run}/finetune/all")
    assert (known(), tuned, known(trained=None)) == (12, 18, 0)
    fastsuncet.predict(encoder.trained.with_values({"data.validation": 0.34}), "photos")
    assert "fitted before" in capsys.readouterr().out


def test_predict_says_what_labels_cannot_tell_and_refuses_too_few(run, labels, run_cli, monkeypatch):
    labels(1)
    assert "unknown: no class has two labels" in run_cli(command(run))
    labels(text="file,label\nred0.png,red\nred1.png,red\ngreen0.png,green\n")
    # Of three one is alone in its class: a new image can be of a class without a label, too.
    right = lambda x, y, classes, strength, _, out: torch.eye(classes)[y[out]]  # noqa: E731
    monkeypatch.setattr(classifier, "linear_logits", right)
    printed = run_cli(command(run), "--force")
    assert "66.7 % right" in printed and "on 2 labels; 1 alone in their class count as wrong)" in printed
    plain = {"data.kind": "images", "data.csv": None, "data.split.kind": "none"}
    plain = load_encoder(run).trained.with_values(plain | {"criterion.supervised_epochs": 0})
    with pytest.raises(ConfigErrors, match="no image has a label"):
        fastsuncet.predict(plain, "photos")


def test_network_whose_outputs_overflow_is_refused(run, picture, run_cli):
    picture(Path("mine/new.png"), "red", 9)
    loaded = manager.load_newest(run / "checkpoints")
    for name in ("weight", "bias"):
        loaded.model[f"encoder.layer3.0.bn2.{name}"].fill_(3e38)
    manager.save(run / "checkpoints", 8, model=loaded.model, state={}, meta=loaded.meta, keep=9)
    for words in (f"predict {run} photos", f"embed {run} photos", f"suggest {run} --count 1"):
        said = run_cli(words, "--output", "a.npz" if "embed" in words else "a.csv", code=4)
        assert "the network's outputs are not finite numbers" in said
    assert not list(run.glob("classifier/*"))


def as_paws(run: Path, step: int) -> None:
    """Save the newest checkpoint of a run at `step` as if PAWS had trained it."""
    loaded = manager.load_newest(run / "checkpoints")
    loaded.meta["config"]["criterion"] |= {"instance": "paws", "supervised_epochs": "all"}
    loaded.meta["config"]["swav"]["small_crops"] = 0
    loaded.meta["config"]["npi"]["temperature"] = 0.125
    manager.save(run / "checkpoints", step, model=loaded.model, state={}, meta=loaded.meta, keep=9)


def test_predict_takes_pawss_neighbors_where_they_are_better(run, run_cli, monkeypatch):
    """Than the linear classifier, in the same folds. They are kept with their projections."""
    as_paws(run, 8)
    monkeypatch.setattr(classifier, "log_p", log_p := mock.Mock(wraps=classifier.log_p))
    assert "classifier   linear" in run_cli(command(run)), "both are right on all: the first"
    monkeypatch.setattr(classifier, "linear_logits", lambda *given: torch.zeros(int(given[-1].sum()), 3))
    for path in (run / "classifier").iterdir():
        path.unlink()
    printed, first = run_cli(command(run, "near.csv")), rows("near.csv")
    assert "classifier   PAWS's nearest neighbors; 18 labels" in printed
    assert "because      linear 33.3 %, PAWS's nearest neighbors 100.0 %" in printed
    assert all(each["class"] in each["file"] for each in first)
    assert {call.args[-1] for call in log_p.mock_calls} == {0.125}, "npi.temperature"
    monkeypatch.delattr(classifier, "fit_classifier")
    assert "fitted before" in run_cli(command(run, "again.csv")) and rows("again.csv") == first


def test_nearest_neighbors_are_pawss_with_a_temperature_that_keeps_the_order():
    generator = torch.Generator().manual_seed(0)
    supports, queries = torch.randn(9, 4, generator=generator), torch.randn(5, 4, generator=generator)
    labels = torch.arange(9) % 3
    layer = NearestNeighbors(torch.nn.Identity(), supports, labels, torch.tensor([0.1, 2.0]))
    expected = npi_probabilities(queries, supports, labels, 3, 0.1) ** 0.5
    torch.testing.assert_close(layer(queries).softmax(1), expected / expected.sum(1, keepdim=True))


def test_predict_calibrates_a_fine_tuned_network_by_the_labels_it_left_out(run, run_cli, capsys, monkeypatch):
    """There are no validation images: five folds measure it. A stop within them continues to the same record."""
    monkeypatch.setattr(job, "LEAST_UPDATES", 2)
    monkeypatch.setattr(frozen, "STALE", math.inf)  # as of a long run
    Path("mine.yaml").write_text(load_encoder(run).trained.to_yaml())
    tune = "finetune mine.yaml logging.write_tag=run finetune.epochs=1 finetune.lr=0.001 finetune.head=linear"
    fit, calls, stop_at = job.fit, [], 3

    def watched(task, left_out, *more):
        """Note the images that a network learns from and those that judge it."""
        names = (task.stream.files(0, 0), [] if left_out is None else [*left_out.files])
        calls.append((task.folder.name, *map(set, names)))
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return fit(task, left_out, *more)

    monkeypatch.setattr(job, "fit", watched)
    run_cli(tune, code=130)
    assert [name for name, *_ in calls[1:]] == ["1", "2"] and not read_results(run)
    stop_at = None
    shutil.copy("labels.csv", run / "learned.csv")
    run_cli(tune)
    (run / "learned.csv").write_text("file,label\n")
    every, folds = calls[3][1], calls[4:]
    assert len(every) == 18 == sum(len(left_out) for _, _, left_out in folds)
    for _, learned, left_out in folds:
        assert not learned & left_out and learned < every and left_out < every
    (record,) = read_results(run)
    assert (record["images"], record["setting"]["folds"], record["learned"]) == (18, 5, 18)
    assert {name: of["images"] for name, of in record["classes"].items()} == dict.fromkeys(COLORS, 6)
    (folder,) = (run / "finetune").iterdir()
    printed = run_cli(command(folder, "known.csv"))
    assert "expected     unknown: the network has learned from these labels" in printed
    record["learned"] = 0
    assert {path.name for path in (folder / "folds").iterdir()} == set("12345")
    (path,) = (run / "results").glob("*.json")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    same = record["finetuned"]["labels"]
    for linear, digest, kind in ((0.0, same, "fine-tuned"), (1.0, same, "linear"), (0.0, "other", "linear")):
        changes = {"frozen": {"linear": linear}, "finetuned": {"labels": digest}}
        changed = record | {key: record[key] | change for key, change in changes.items()}
        path.write_text(json.dumps(changed))
        printed = run_cli(command(run), "--force")
        assert f"classifier   {kind}" in printed and "5-fold cross-validation on 18 labels" in printed
        said = f"not used     {folder}: learned from other labels than the 18 that can be read now"
        assert (said in printed) == (digest == "other")
    folder.rename(run / "away")
    printed = run_cli(command(run), "--force")
    assert "classifier   linear" in printed and "not used" not in printed
    (run / "away").rename(folder)
    # On validation images `evaluate npi` can be above it, and only a run of PAWS has that classifier.
    near = {key: value for key, value in record.items() if key != "frozen"}
    near |= {"kind": "npi", "metrics": {"top1": 1.0}, "setting": {"features": "projection"}}
    (run / "results" / "npi.json").write_text(json.dumps(near))
    for file, top1 in ((run / "results" / "0.json", 0.25), (path, 0.5), (run / "results" / "z.json", 0.25)):
        best = {"frozen": {"linear": 0.0}, "setting": {}, "metrics": {"top1": top1}}
        file.write_text(json.dumps(record | best))
    printed = run_cli(command(run), "--force")
    assert "classifier   fine-tuned" in printed
    assert "fine-tuned 50.0 %, linear 0.0 %, on the same images" in printed
    as_paws(run, 7)
    assert "classifier   linear" in run_cli(command(run), "--force")
    # By itself the fine-tuned network has the same temperature.
    kept = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(kept | {"record": record}))
    own = fastsuncet.predict(folder, "photos")
    temperature = record["calibration"]["temperature"]
    printed = capsys.readouterr().out
    assert "all of them are labeled" in run_cli(f"predict {folder} mine --output mine.csv")
    assert f"fine-tuned, of {folder};" in printed and f"temperature {temperature:.2f}" in printed
    # Its export elsewhere has none.
    run_cli(f"export {folder} --to torchvision --output away.pth")
    raw = fastsuncet.predict("away.pth", "photos")
    assert "not calibrated: it lies in no folder of a finished fine-tuning" in capsys.readouterr().out
    for ours, theirs in zip(own, raw, strict=True):
        after, before = (math.log(each.probability / each.second_probability) for each in (ours, theirs))
        assert ours.label == theirs.label and after * temperature == pytest.approx(before, rel=1e-3)


def test_prediction_page_shows_the_surest_and_what_lies_between(tmp_path, picture, capsys, monkeypatch):
    """DALI's decoders forgive a missing end, and a file can be gone by then: it is named and not shown."""
    monkeypatch.setattr(pages, "OF_CLASS", 1)
    names = ['<script>&".png', "gone.png", "short.png", "bomb.png"]
    found = [Prediction(name, "red", 0.9 - 0.13 * i, "blue", 0.1 + 0.13 * i) for i, name in enumerate(names)]
    for name in (names[0], "short.png"):
        picture(tmp_path / name, "red", 0)
    os.truncate(tmp_path / "short.png", 200)
    Image.new("1", (15_000, 15_000)).save(tmp_path / "bomb.png")
    page = pages.prediction_page(found, tmp_path, [])
    surest, least, close = re.split("least sure|Between two classes", page)
    assert "&lt;script&gt;&amp;&quot;.png" in surest and "<script>" not in page
    assert "<bdi>red</bdi> 90 %" in surest and "<bdi>red</bdi> 51 %" in least
    assert ">red</bdi>, 4 images<" in page
    assert "1 image whose two best classes" in close and "<small>bomb.png</small>" in close
    assert page.count('<img src="data:,"') == 2 and page.count('<img src="data:image/jpeg') == 1
    assert f"page: named but not shown: {tmp_path / 'bomb.png'}: " in capsys.readouterr().out
    for name in ("short", "gone"):
        assert pages.thumbnail(tmp_path / f"{name}.png", 160) == "data:,"
    labeling = pages.labeling_page(["bomb.png"], ["data:,"], ["red"])
    assert '"pictures": ["data:,"]' in labeling and "This picture cannot be shown." in labeling


def test_thumbnail_shows_what_the_network_sees(tmp_path):
    """16 bits of gray, which PIL clips to white, and turned by the EXIF tag."""
    half = np.repeat(np.array([[0, 25700]], np.uint16), 40, axis=1).repeat(20, axis=0)
    turned = Image.Exif()
    turned[0x0112] = 6  # the left side is the top
    Image.fromarray(half).save(tmp_path / "a.png", exif=turned)
    url = pages.thumbnail(tmp_path / "a.png", 160)
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    assert shown.shape == (80, 20, 3)
    assert shown[:35].max() < 10 and shown[45:].min() > 90 and shown[45:].max() < 110


def test_docs_serve_the_classes_and_probabilities_of_predict(run_cli, capsys):
    """docs/export.md, as it is written: by onnxruntime alone, over HTTP."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    folder = Path("runs/mine/finetune/all")
    save_run(folder, "model.name=resnet_tiny", "data.augmentation.size=96", classes=4)
    record = {"calibration": Calibration(2.5, 0.1, 0.2)._asdict(), "images": 40, "labels": {"count": 80}}
    record |= {"metrics": {"top1": 0.9}, "setting": {}}
    (folder / "result.json").write_text(json.dumps({"record": record}))
    run_cli(f"export {folder} --to onnx")
    for i in range(4):
        write_image(Path(f"photos/{i}.png"), 150, 120 + 20 * i)
    page = (Path(__file__).parents[2] / "docs/export.md").read_text()
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        if "classify(" in block:
            exec(block.replace("8000", "0"), names)
    for found in fastsuncet.predict(folder, "photos"):
        label, probability = names["classify"](f"photos/{found.file}")
        assert label == found.label and probability == pytest.approx(found.probability, abs=0.01)
    assert "(on 40 validation images)" in capsys.readouterr().out
    server = names["server"]
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    body = Path("photos/3.png").read_bytes()
    with urllib.request.urlopen(f"http://localhost:{server.server_port}", body, timeout=30) as answer:
        assert json.load(answer) == {"class": label, "probability": probability}
    thread.join()
    server.server_close()
