"""An export loads into the libraries that it is for, gives the same features, and is whole or absent."""

import hashlib
import importlib.util
import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import timm
import torch
import torchvision

from fastsuncet.checkpoint import manager
from fastsuncet.commands import export as command
from fastsuncet.commands.embed import embed
from fastsuncet.commands.export import export
from fastsuncet.config import ConfigErrors, load_config
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation import encoder as encoders
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.evaluation.features import outputs
from fastsuncet.models import export_formats
from pipelines.datasets.folders import image_tree
from tests.support.colors import ALONE
from tests.support.exports import CLASSES, features, save_run
from tests.support.power_cut import intercept
from tests.support.reports import result, write_lines
from tests.support.runs import small_config, train


@pytest.fixture
def tiny(tmp_path) -> Path:
    save_run(tmp_path / "run", "model.name=timm/test_resnet")
    return tmp_path / "run"


@pytest.mark.slow
def test_export_fine_tuned_network_gives_its_logits_with_a_library_alone(tmp_path):
    """Names, preprocessing and logits are those of the evaluation. ONNX's are in test_predict.py."""
    model, vision = save_run(tmp_path / "vision", classes=4), torchvision.models.resnet18(num_classes=4)
    weights = torch.load(export(tmp_path / "vision", "torchvision"), weights_only=True)
    vision.load_state_dict(weights, strict=True)
    assert torch.equal(features(vision), features(torch.nn.Sequential(model.encoder, model.classifier)))
    # 443 / (443 / 506) is less than 506 in floating point, and timm rounds down. Of a small network it takes less time.
    run, words = tmp_path / "run", ("model.name=timm/test_resnet", "data.augmentation.size=443")
    model = save_run(run, *words, classes=4)
    network, folder = torch.nn.Sequential(model.encoder, model.classifier), export(run, "safetensors")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    assert torch.equal(features(theirs), features(network))
    record, loaded = json.loads((folder / "fastsuncet.json").read_text()), load_encoder(folder)
    assert record["classes"] == CLASSES == list(theirs.pretrained_cfg["label_names"])
    assert record["classifier"] and record["encoder"]["tuned"] == loaded.tuned == 7
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    assert loaded.classes == load_encoder(run).classes == tuple(CLASSES)
    for i in range(3):
        PIL.Image.effect_noise((150, 120 + 20 * i), 90).convert("RGB").save(tmp_path / f"{i}.png")
    expected = outputs(network, image_tree(tmp_path), np.arange(3), load_encoder(run).trained, ALONE)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(theirs))
    assert transform.transforms[0].size == record["resize"] == 506
    images = [transform(PIL.Image.open(tmp_path / f"{i}.png").convert("RGB")) for i in range(3)]
    with torch.no_grad():
        torch.testing.assert_close(theirs(torch.stack(images)), expected, atol=0.02, rtol=0.02)


@pytest.mark.slow
def test_export_gives_timm_a_classifier_that_is_a_convolution(tmp_path):
    model = save_run(tmp_path / "run", "model.name=timm/dla46x_c", classes=4)
    folder = export(tmp_path / "run", "safetensors")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True)
    expected = features(torch.nn.Sequential(model.encoder, model.classifier))
    torch.testing.assert_close(features(theirs), expected)


@pytest.mark.slow
def test_export_cifar_stem_loads_after_two_lines(tmp_path):
    model = save_run(tmp_path / "run", "model.stem=cifar")
    with pytest.raises(ConfigError, match=r"docs/export\.md for the two lines"):
        export(tmp_path / "run", "safetensors")
    path = export(tmp_path / "run", "torchvision")
    vision = torchvision.models.resnet18()
    vision.conv1 = torch.nn.Conv2d(3, 64, 3, padding=1, bias=False)
    vision.maxpool = vision.fc = torch.nn.Identity()
    vision.load_state_dict(torch.load(path, weights_only=True), strict=True)
    assert torch.equal(features(vision), features(model.encoder))
    for file in (path, path.with_name("weights.pth")):
        with pytest.raises(ConfigError, match="is an export or another file of weights"):
            export(file if file.exists() else path.rename(file), "timm")


def test_export_record_describes_the_weights_that_load_encoder_reads(tmp_path):
    run = tmp_path / "run"
    model = save_run(run, "model.name=timm/test_resnet")
    line = {"kind": "knn", "knn_accuracy": 0.5, "rankme": None}
    write_lines(run, *(line | {"step": step, "nonfinite": {"rankme": "nan"}} for step in (6, 7, 8)))
    for path in map(partial(export, run), ("safetensors", "timm")):
        encoder = load_encoder(path)
        assert torch.equal(features(encoder.module), features(model.encoder))
        assert (encoder.step, encoder.method) == (7, "SimCLR + SuNCEt")
        assert (encoder.view.size, encoder.view.resize, encoder.view.mean) == (112, 128, (0.5, 0.4, 0.3))
    record = json.loads(path.with_suffix(".json").read_text())
    assert record["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert record["metrics"] == {"knn": line | {"step": 7}}  # up to that of the checkpoint
    assert (record["mean"], record["std"]) == ([0.5, 0.4, 0.3], [0.2, 0.3, 0.4])
    assert (record["image_size"], record["resize"], record["width"]) == (112, 128, encoder.width)
    assert record["config"]["model"]["name"] == "timm/test_resnet" and record["versions"]["fastsuncet"]
    with pytest.raises(CheckpointError, match=r"json is damaged or is not a file of tensors"):
        load_encoder(path.with_suffix(".json"))


def test_export_has_the_results_of_its_weights_in_a_renamed_run_and_of_a_fine_tuning(tiny):
    save_run(tiny / "finetune" / "ft", "model.name=timm/test_resnet", classes=4)
    result(tiny, 6, 0.1, kind="knn")
    result(tiny, 7, 0.2, kind="knn")
    result(tiny, 7, 0.3, tag="ft")
    result(tiny, 7, 0.4, kind="accuracy", home=tiny / "finetune" / "ft", finetuned=7)
    run = tiny.rename(tiny.parent / "renamed")
    for folder, wanted in ((run, [0.3, 0.2]), (run / "finetune" / "ft", [0.4, 0.3])):
        record = json.loads(export(folder, "timm").with_suffix(".json").read_text())
        assert [each["metrics"]["top1"] for each in record["results"]] == wanted


@pytest.mark.slow
def test_export_never_replaces_an_output_unasked(tiny, tmp_path, run_cli):
    command = f"export {tiny} --to timm --output mine.pth"
    Path("mine.pth").write_text("mine")
    assert "add --force" in run_cli(command, code=2) and Path("mine.pth").read_text() == "mine"
    Path("mine.json").write_text("mine")
    for name, to, message in (
        ("mine.pt", "timm", r"mine\.json exists"),
        ("mine.onnx", "onnx", r"mine\.json exists"),
        ("mine.safetensors", "timm", r"must end in \.pth or \.pt or \.bin"),
        ("new.json", "timm", "must end in"),
        ("new.pth", "onnx", r"must end in \.onnx"),
    ):
        with pytest.raises(ConfigError, match=message):
            export(tiny, to, output=Path(name))
    assert Path("mine.json").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"mine.pth", "mine.json"}
    Path("folder.pth").mkdir()
    for name, to in (("run", "safetensors"), (".", "safetensors"), ("folder.pth", "timm")):
        with pytest.raises(ConfigError, match="is a folder, and not an export"):
            export(tiny, to, output=Path(name), force=True)
    assert (tiny / "checkpoints").is_dir()
    assert "mine.pth (replaced): timm/test_resnet, step 7" in run_cli(command, "--force")


@pytest.mark.slow
@pytest.mark.parametrize("to", ["timm", "safetensors"])
def test_export_of_two_processes_at_once_leaves_one_whole(tiny, to):
    """The second one, between any two files of the first, is refused and takes nothing away."""
    path, refused = export(tiny, to), []

    def also_there(name, call, arguments, keywords):
        call(*arguments, **keywords)
        with pytest.raises(CheckpointError, match="another process is exporting"):
            export(tiny, to, output=path, force=True)
        refused.append(name)

    with intercept(also_there, ("fsync",)):
        export(tiny, to, output=path, force=True)
    assert len(refused) == {"timm": 6, "safetensors": 6}[to]  # each file of timm twice, and the folders
    load_encoder(path)
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


@pytest.mark.slow
def test_export_tells_how_an_encoder_was_made(tmp_path, capsys):
    """Nobody knows it of one that was fine-tuned from another program's weights."""
    tuned, of_weights = {"classes": 4}, {"classes": 4, "encoder": {"source": "w.pth"}}
    for name, options, title, made in (
        ("one", {}, "SimCLR + SuNCEt", "pre-trained with SimCLR + SuNCEt for 7 updates on"),
        ("two", tuned, "SimCLR", "pre-trained with SimCLR for 5 updates and fine-tuned for 7 updates on"),
        ("three", of_weights, "fine-tuned", ", fine-tuned for 7 updates on"),
    ):
        save_run(tmp_path / name, "model.name=timm/test_resnet", **options)
        card = (export(tmp_path / name, "safetensors") / "README.md").read_text()
        assert f"# timm/test_resnet, {title}\n" in card and made in card
        assert ("fine-tuned, step 7\n" if options else "step 7\n") in capsys.readouterr().out


@pytest.mark.slow
def test_export_keeps_files_that_no_export_wrote(tiny):
    """In the run's folder too, where nobody named an output."""
    folder, file = export(tiny, "safetensors"), export(tiny, "timm")
    (folder / "README.md").write_text("my card")
    with pytest.raises(ConfigError, match=r"safetensors is not replaced: no export wrote README\.md, or it"):
        export(tiny, "safetensors")
    (folder / ".git").mkdir()
    (folder / "README.md").rename(folder / "mine.md")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"no export wrote \.git, mine\.md, or"):
            export(tiny, "safetensors", force=force)
    (folder / ".git").rmdir()
    (folder / "mine.md").rename(folder / "README.md")
    export(tiny, "safetensors", force=True)
    assert "library_name: timm" in (folder / "README.md").read_text()
    record = file.with_suffix(".json")
    record.write_text(record.read_text().replace('"resize": 128', '"resize": 129'))
    with pytest.raises(ConfigError, match=r"no export wrote timm\.json, or"):
        export(tiny, "timm")
    export(tiny, "timm", force=True)
    file.write_text("other weights")
    with pytest.raises(ConfigError, match=r"no export wrote timm\.pth, or"):
        export(tiny, "timm")
    assert file.read_text() == "other weights"


@pytest.mark.slow
def test_load_encoder_refuses_a_record_that_no_export_wrote(tiny, monkeypatch):
    """Without memory for a network that a record only claims."""
    path, build = export(tiny, "timm"), encoders.build_model
    record = path.with_suffix(".json")
    sound = json.loads(record.read_text())

    def without_memory(*words, device="cpu", **options):
        assert device == "meta"
        return build(*words, device=device, **options)

    monkeypatch.setattr(encoders, "build_model", without_memory)
    for change, said in (
        ({"encoder": [1]}, "is no record"),
        ({"classes": 3}, "is no record"),
        ({"classes": [3]}, "is no record"),
        ({"config": 3}, "is no record"),
        ({"sha256": 1}, "was changed after it was exported"),
        ({"config": sound["config"] | {"model": {"name": "timm/resnet26"}}}, "does not fit the network"),
    ):
        record.write_text(json.dumps(sound | change))
        with pytest.raises(CheckpointError, match=said):
            load_encoder(path)
    record.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is no record"):
        load_encoder(path)


def test_export_of_a_run_that_prunes_takes_a_newer_checkpoint(tiny, monkeypatch, capsys):
    load, folder = command.load_encoder, tiny / "checkpoints"

    def pruned(found):
        monkeypatch.setattr(command, "load_encoder", load)
        saved = manager.load(found)
        meta = {key: saved.meta[key] for key in ("config", "ledger", "epoch", "world_size")}
        manager.save(folder, 8, model=saved.model, state={}, meta=meta, keep=1)
        return load(found)

    monkeypatch.setattr(command, "load_encoder", pruned)
    export(tiny, "timm")
    assert "timm/test_resnet, step 8" in capsys.readouterr().out


@pytest.mark.slow
def test_export_refuses_what_a_format_cannot_hold(tmp_path, monkeypatch):
    """A run that would end with such an export does not start."""
    save_run(tmp_path / "tiny", "model.name=resnet_tiny")
    for to in ("timm", "safetensors"):
        with pytest.raises(ConfigError, match="timm has no resnet_tiny"):
            export(tmp_path / "tiny", to)
    save_run(tmp_path / "several", "model.name=timm/shvit_s1", classes=4)
    words = ("model.name=timm/shvit_s1", "criterion.supervision=cross_entropy")
    at_start = partial(export_formats.check, small_config(tmp_path, *words), "timm")
    for refused in (partial(export, tmp_path / "several", "timm"), at_start):
        with pytest.raises(ConfigError, match=r"one linear layer, .* but head\.bn\.bias, .* and 2 more"):
            refused()
    export_formats.check(small_config(tmp_path, *words, "criterion.supervised_epochs=0"), "timm")
    monkeypatch.setattr(export_formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs onnx and onnxscript: pip install onnx onnxscript"):
        export(tmp_path / "tiny", "onnx")
    config = small_config(tmp_path, "checkpoint.export=[onnx]")
    with pytest.raises(ConfigErrors, match=r"checkpoint\.export=\[onnx\]\n +an export to onnx needs"):
        train(config)
    assert not config.run_folder.exists()


@pytest.mark.slow
def test_train_exports_at_its_end_once_and_never_loses_the_run(tmp_path):
    config = small_config(tmp_path, "optimization.steps=2", "optimization.warmup=0")
    run = config.run_folder
    run.mkdir()
    (run / "export").write_text("in the way")
    said = "the run is complete and saved, but its encoder could not be exported"
    with pytest.raises(CheckpointError, match=said):
        train(config, stop_at=config.optimization.steps - 1)  # a signal in the last update
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 2, 5)
    assert status["message"].startswith(said)
    (run / "export").unlink()
    assert train(config) == {}  # the same command only exports
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("done", 2, 0)
    path = run / "export" / "torchvision.pth"
    encoder, stamp = load_encoder(path), path.stat().st_mtime_ns
    assert torch.equal(encoder.module.conv1.weight, load_encoder(run).module.conv1.weight)
    train(config)
    assert path.stat().st_mtime_ns == stamp
    assert load_config(run / "config.yaml").run_folder == run


@pytest.mark.slow
def test_docs_export_page_runs_as_it_is_written(tmp_path):
    run, without_onnx = Path("runs/in1k_10pct"), importlib.util.find_spec("onnxruntime") is None
    model = save_run(run, "data.augmentation.size=224")
    with torch.no_grad():
        expected = model.encoder(torch.zeros(1, 3, 224, 224))
    for to in command.FILES:
        if to != "onnx" or not without_onnx:
            export(run, to)
    (tmp_path / "photos").mkdir()
    PIL.Image.effect_noise((300, 260), 80).convert("RGB").save("photos/a.png")
    embed(run, tmp_path / "photos", tmp_path / "photos.npz")
    assert len(list((run / "export" / "safetensors").iterdir())) == 4
    page, names = (Path(__file__).parents[2] / "docs/export.md").read_text(), {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    # test_predict.py runs those of `classify`. A smaller network takes less time.
    blocks = [block.replace("resnet50", "resnet18") for block in blocks if "classify(" not in block]
    for block in blocks:
        if "onnxruntime" not in block or not without_onnx:
            exec(block, names)
            if "zeros(" in block:
                features = torch.as_tensor(names["features"]).detach()[:1]
                torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-4)
    assert len(blocks) >= 5
    pixels = names["transform"](PIL.Image.open("photos/a.png"))  # timm's, from the folder's config.json
    assert pixels.shape == (3, 224, 224)
    if without_onnx:
        pytest.skip("ONNX was left out: onnxruntime is not installed")
    for images in (pixels[None], torch.stack([pixels, pixels.flip(2), pixels.flip(0)])):
        (found,) = names["session"].run(None, {"images": images.numpy()})
        with torch.no_grad():
            wanted = model.encoder(images)
        torch.testing.assert_close(torch.from_numpy(found), wanted, atol=1e-4, rtol=1e-4)
    with pytest.raises(CheckpointError, match="is for ONNX runtimes"):
        load_encoder(run / "export" / "onnx.onnx")
