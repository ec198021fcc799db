"""`fastsuncet export`: the encoder of a checkpoint as a file for torchvision, timm, Hugging Face or an ONNX runtime.

docs/export.md has the formats. The JSON next to each, its record, is what `fastsuncet.load_encoder` reads them by.
"""

import contextlib
import hashlib
import io
import json
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastsuncet.checkpoint import format, manager
from fastsuncet.checkpoint.format import record_path
from fastsuncet.checkpoint.run_folder import disk_errors, on_rank_0, refuse_existing
from fastsuncet.config import Config
from fastsuncet.config.schema import TIMM
from fastsuncet.distributed.place import Place
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError
from fastsuncet.evaluation.encoder import RECORD_BYTES, WEIGHTS, Encoder, choose, load_encoder
from fastsuncet.metrics import results, writer
from fastsuncet.models import export_formats, timm_backbone
from fastsuncet.versions import versions
from pipelines import atomic_files
from pipelines.output import first_five, say_line

FOLDER = "export"  # in the run's folder
FILES = {
    "torchvision": "torchvision.pth",
    "timm": "timm.pth",
    "safetensors": "safetensors",
    "onnx": "onnx.onnx",
}
ENDINGS = {"torchvision": (".pth", ".pt", ".bin"), "timm": (".pth", ".pt", ".bin"), "onnx": (".onnx",)}
FOLDER_FILES = (WEIGHTS, "config.json", "README.md", record_path(Path(WEIGHTS)).name)  # of safetensors
FORMAT = 1  # of the record


def export(
    where: Path,  # a run's folder or one of its checkpoints
    to: str,  # of FILES
    *,
    output: Path | None = None,  # a file, with safetensors a folder; None: in the run's folder
    step: int | None = None,
    force: bool = False,  # replace what is at `output`, and what was changed since it was exported
) -> Path:
    """Write the encoder of the newest good checkpoint, or of `step`'s, and its record; return the file or folder.

    The encoder is in float32, without the projection head; a fine-tuned one keeps its classifier. What was there before
    stays whole until the new one is. Raises ConfigError for a format that cannot hold this network, for an `output`
    that exists, has a record already or ends as no file of this format, for files there that no export wrote or that
    were changed since; CheckpointError for no good checkpoint, another process that exports to the same place, or a
    disk that refuses.
    """
    if output is not None:
        check_output(output, to, force)
    (found,) = choose(where, step=step)
    if found.is_file():
        raise ConfigError(
            f"{where} is an export or another file of weights, and only a checkpoint can be exported. Give the folder "
            "of a run or of one of its checkpoints"
        )
    run = found.parent.parent if found.parent.name == manager.FOLDER else found.parent
    try:
        encoder = load_encoder(found)
        assert encoder.trained is not None, "the encoder is a checkpoint's"
        export_formats.check(encoder.trained, to)
        record = _record(encoder, to, run)
    except (FastSuncetError, FileNotFoundError):
        if step is not None or found.exists():
            raise
        # Its run goes on, and checkpoint.keep has removed it: there is a newer one.
        return export(where, to, output=output, force=force)
    target = output or run / FOLDER / FILES[to]
    with disk_errors(target, "--output"):
        atomic_files.make_folder(target.parent)
        with atomic_files.only_writer(target) as alone:
            if not alone:
                raise CheckpointError(f"another process is exporting to {target}: wait for its end")
            _require_replaceable(target, force)
            replaced = " (replaced)" if atomic_files.exists(target) else ""
            write = _write_folder if to == "safetensors" else _write_file
            write(target, encoder, record)
    end = f"step {encoder.step:,}" if encoder.tuned is None else f"fine-tuned, step {encoder.tuned:,}"
    say_line(f"exported {target}{replaced}: {encoder.name}, {end}")
    return target


def export_at_end(config: Config, place: Place) -> None:
    """Write the exports of `checkpoint.export` that are not there yet, for a run that is complete. Collective.

    Raises CheckpointError on every rank; the run itself is saved.
    """

    def missing() -> None:
        folder = config.run_folder
        try:
            (newest,) = choose(folder) if config.checkpoint.export else (folder,)
            for to in export_formats.exports(config):
                path = folder / FOLDER / FILES[to]
                if not _is_of(newest, path / WEIGHTS if to == "safetensors" else path):
                    export(newest, to)
        except (FastSuncetError, OSError, RuntimeError) as error:
            text = f"the run is complete and saved, but its encoder could not be exported: {error}"
            raise CheckpointError(
                f"{text}\n`fastsuncet export {folder} --to FORMAT` tries it again"
            ) from error

    on_rank_0(place, missing)


def next_commands(run: Path, config: Config) -> list[str]:
    """Return two commands that use a run: how good it is, and the classes or the features of any images."""
    name, labeled = shlex.quote(str(run)), config.data.split.kind != "none"
    look = f"report --page {name}"
    if labeled and config.data.validation is not None:
        # If the run was moved, its config names its first folder.
        look = f"evaluate linear {shlex.quote(f'{run}/config.yaml')}{config.arguments_for(run)}"
    use, output = ("predict", "predictions.csv --page") if labeled else ("embed", "features.npz")
    return [f"fastsuncet {look}", f"fastsuncet {use} {name} FOLDER --output {output}"]


def check_output(output: Path, to: str, force: bool) -> None:
    """Raise ConfigError where an export to `output` could not be loaded, or would replace what is there unasked."""
    if to in ENDINGS and output.suffix not in ENDINGS[to]:
        raise ConfigError(f"--output {output}: a file for {to} must end in {' or '.join(ENDINGS[to])}")
    if output.is_dir() and (to in ENDINGS or not record_path(output / WEIGHTS).is_file()):
        raise ConfigError(
            f"--output {output} is a folder, and not an export to {to}, so --force does not replace it. "
            "Choose another name"
        )
    refuse_existing(output, force)
    if to in ENDINGS:
        refuse_existing(record_path(output), force)


def _require_replaceable(target: Path, force: bool) -> None:
    """Raise ConfigError where an export to `target` would replace files that no export wrote, or wrote otherwise.

    --force replaces them, but removes nothing else from a folder, such as a .git.
    """
    about = record_path(target / WEIGHTS if target.is_dir() else target)
    # A kill can leave a file without its record.
    paths = target.iterdir() if target.is_dir() else (target, about) if about.exists() else ()
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        content = atomic_files.read_bytes(about, RECORD_BYTES)
        record = json.loads(content)
        own = record.pop("record_sha256")
        known = dict(record["files"])
        if _sha256(atomic_files.as_json(record)) == own:
            known[about.name] = _sha256(content)
    changed = sorted(
        path.name
        for path in paths
        if path.is_symlink() or not path.is_file() or _sha256(path.read_bytes()) != known.get(path.name)
    )
    if force:
        changed = [name for name in changed if target.is_dir() and name not in FOLDER_FILES]
    if changed:
        raise ConfigError(
            f"{target} is not replaced: no export wrote {first_five(changed)}, or it was changed since. Move them "
            f"away, {'' if force else 'add --force, '}or choose another --output"
        )


def _is_of(checkpoint: Path, weights: Path) -> bool:
    """Return whether `weights` was exported from `checkpoint`, by the record beside it."""
    try:
        record = json.loads(record_path(weights).read_bytes())
        meta = json.loads((checkpoint / "meta.json").read_bytes())
        return weights.is_file() and record["encoder"]["sha256"] == meta["files"][format.MODEL]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _record(encoder: Encoder, to: str, run: Path) -> dict[str, Any]:
    config, view, source = encoder.trained, encoder.view, Path(encoder.source)
    step = encoder.step if encoder.tuned is None else encoder.tuned
    assert config is not None and view is not None and step is not None, "the encoder is a checkpoint's"
    lines = writer.read(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    # Of each kind of line the newest up to this checkpoint: losses and speed, and the k-NN accuracy of the training.
    newest = json.dumps({line["kind"]: line for line in lines if line.get("step", step + 1) <= step})
    metrics = json.loads(newest, parse_constant=lambda _: None)  # JSON has no NaN and no infinity
    return {
        "format": FORMAT,
        "to": to,
        "architecture": encoder.name,
        "stem": encoder.stem,
        "width": encoder.width,
        "classes": list(encoder.classes),
        "classifier": encoder.classifier is not None,
        "image_size": view.size,
        "resize": view.resize,
        "exif_orientation": view.upright,
        "mean": list(view.mean),
        "std": list(view.std),
        "encoder": encoder.record() | {"tuned": encoder.tuned},
        "metrics": metrics,
        "results": _results(source.resolve(), run.resolve()),
        "config": config.canonical(),
        "versions": versions(),
    }


def _results(checkpoint: Path, run: Path) -> list[dict[str, Any]]:
    """Return what was measured of a checkpoint; the folder of a fine-tuning's run has its results too."""
    tuned, found = run.parent.name == "finetune", []
    for each in results.read_results(run.parent.parent if tuned else run):
        name, *step = Path(each["encoder"].get("source") or "").resolve().parts[-3:]
        # A run can have another name since.
        known = name == run.name or (name == each["run"] and not tuned)
        measured = known and step == list(checkpoint.parts[-2:])
        folder = each.get("finetuned", {}).get("folder", "")
        if measured or (tuned and Path(folder).name == run.name):
            found.append({key: each[key] for key in ("kind", "metrics", "labels", "setting")})
    return found


def _tensors(encoder: Encoder) -> dict[str, Tensor]:
    """Return the weights by torchvision's and timm's names: `fc` is the classifier, where the encoder has one."""
    tensors = dict(encoder.module.state_dict())
    if encoder.classifier is not None:
        layer = {f"fc.{key}": value for key, value in encoder.classifier.state_dict().items()}
        if encoder.name.startswith(TIMM):
            shapes = timm_backbone.linear_shapes(encoder.name, encoder.classifier.out_features)
            layer = {key: layer[ours].reshape(shapes[key]) for key, ours in zip(shapes, sorted(layer))}
        tensors |= layer
    return tensors


def _write_file(path: Path, encoder: Encoder, record: dict[str, Any]) -> None:
    if record["to"] == "onnx":
        payload = _onnx(encoder, record)
    else:
        stream = io.BytesIO()
        torch.save(_tensors(encoder), stream)
        payload = stream.getvalue()
    beside = record_path(path)
    about = _sealed(record, payload, {path.name: payload})
    with atomic_files.replacing(beside) as record_file, atomic_files.replacing(path) as weights_file:
        for stream, content in ((record_file, about), (weights_file, payload)):
            stream.write(content)
            stream.flush()
            # A disk that fails here leaves the old weights with their record.
            os.fsync(stream.fileno())
        # A kill between the two renames leaves whole weights without a record, never with the record of others.
        atomic_files.remove(beside)


def _write_folder(path: Path, encoder: Encoder, record: dict[str, Any]) -> None:
    payload = format.safetensors_of(_tensors(encoder))
    texts = atomic_files.as_json(_timm_config(record)), _model_card(record).encode()
    files = dict(zip(FOLDER_FILES, (payload, *texts)))
    files[FOLDER_FILES[-1]] = _sealed(record, payload, files)

    def write(folder: Path) -> None:
        atomic_files.remove(folder)  # of a killed export
        folder.mkdir()
        for name, content in files.items():
            atomic_files.write_synced(folder / name, content)
        atomic_files.sync(folder)

    atomic_files.replace_folder(path, write)


def _sealed(record: dict[str, Any], weights: bytes, files: dict[str, bytes]) -> bytes:
    """Return the JSON of a record with the sha256 of `files` and of itself, by which a later export knows its own."""
    record = record | {"bytes": len(weights), "sha256": _sha256(weights)}
    record["files"] = {name: _sha256(content) for name, content in files.items()}
    return atomic_files.as_json(record | {"record_sha256": _sha256(atomic_files.as_json(record))})


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _timm_config(record: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the Hugging Face hub's timm models."""
    size, name = record["image_size"], record["architecture"]
    pixels = {"input_size": [3, size, size], "mean": record["mean"], "std": record["std"]}
    # Rounded down, because timm resizes to size / share, rounded down.
    share = size * 10**6 // record["resize"] / 10**6
    pixels |= {"crop_pct": share, "crop_mode": "center", "interpolation": "bilinear"}
    names = record["classes"] if record["classifier"] else []
    shape = {"num_classes": len(names), "num_features": record["width"], "global_pool": "avg"}
    shape |= {"label_names": names} if names else {}
    layers = {"first_conv": "conv1", "classifier": "fc"}
    if name.startswith(TIMM):
        network = timm_backbone.create(name, "meta")
        theirs = network.pretrained_cfg
        layers = {key: theirs[key] for key in layers}
        arguments: dict[str, Any] = {"dynamic_img_size": True} if hasattr(network, "dynamic_img_size") else {}
        # As `timm_backbone.create` built it: of the size in timm's own config, whatever images it was trained on.
        arguments |= {"img_size": theirs["input_size"][1:]} if theirs.get("fixed_input_size") else {}
        del shape["global_pool"]  # as the network has it
        shape |= {"model_args": arguments} if arguments else {}
    pixels |= {"num_classes": len(names), **layers}
    return {"architecture": name.removeprefix(TIMM), **shape, "pretrained_cfg": pixels}


def _model_card(record: dict[str, Any]) -> str:
    encoder, config = record["encoder"], record["config"]
    lines = [f"- {each['kind']}: {json.dumps(each['metrics'])}" for each in record["results"]]
    count, output = len(record["classes"]), "logits" if record["classifier"] else "features"
    kept = f"with a classifier of {count} classes" if record["classifier"] else "without a classifier"
    named = "model.pretrained_cfg['label_names'][logits.argmax()]  # the class by name\n"
    # Weights of another program have no method.
    method, tuned = encoder["method"], encoder["tuned"]
    turned = "turned as the EXIF tag says, " if record["exif_orientation"] else ""
    made = [f"pre-trained with {method} for {encoder['step']} updates"] if method else []
    made += [f"fine-tuned for {tuned} updates"] if tuned is not None else []
    return f"""\
---
library_name: timm
tags: [image-feature-extraction, timm, fastsuncet]
---
# {record["architecture"]}, {method or "fine-tuned"}

A {record["architecture"]} encoder {kept}, {" and ".join(made)} on
`{config["data"]["kind"]}` images by fastsuncet {record["versions"]["fastsuncet"]}. The config is in `fastsuncet.json`.

```python
import timm

model = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or "local-dir:" and the path of this folder
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
{output} = model(transform(image).unsqueeze(0))  # (1, {count if record["classifier"] else record["width"]})
{named if record["classifier"] else ""}```

Pixels: {turned}shorter side {record["resize"]}, center crop {record["image_size"]}, mean {record["mean"]},
std {record["std"]}.

Results:
{chr(10).join(lines) or "none recorded"}
"""


def _onnx(encoder: Encoder, record: dict[str, Any]) -> bytes:
    """Return the encoder as ONNX: input "images" (B, 3, S, S), output "features", of any B.

    With a classifier the output is "logits". The metadata has class names, sizes, mean and std, each as JSON.
    """
    parts = [encoder.module] if encoder.classifier is None else [encoder.module, encoder.classifier]
    size = record["image_size"]
    output = "features" if encoder.classifier is None else "logits"
    names: dict[str, Any] = {"input_names": ["images"], "output_names": [output]}
    with warnings.catch_warnings():  # of the exporter, on its own code
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            nn.Sequential(*parts).eval(),
            (torch.zeros(2, 3, size, size),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
            **names,
        )
    assert program is not None, "dynamo=True without a file returns the program"
    model = program.model_proto
    for key in ("classes", "image_size", "resize", "mean", "std"):
        model.metadata_props.add(key=key, value=json.dumps(record[key]))
    return model.SerializeToString()
