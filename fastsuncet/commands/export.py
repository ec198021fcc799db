"""`fastsuncet export`: the encoder of a checkpoint as a file for torchvision, timm, Hugging Face or an ONNX runtime.

    RUN/export/torchvision.pth, timm.pth   a state_dict: torch.load, then load_state_dict(strict=True)
    RUN/export/safetensors/                a folder for timm.create_model("local-dir:...") and the Hugging Face hub
    RUN/export/onnx.onnx                   images (B, 3, S, S) float32 -> features (B, width)

A JSON next to each (fastsuncet.json in the folder) has the config, the pixels that the encoder expects, the sha256 of
the weights, what the training cost and its results. `fastsuncet.load_encoder` reads all but ONNX.
"""

import hashlib
import importlib.util
import io
import json
import math
import os
import shlex
import warnings
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from fastsuncet.checkpoint import atomic_files, manager
from fastsuncet.checkpoint.format import versions
from fastsuncet.checkpoint.run_folder import disk_errors, on_rank_0, refuse_existing
from fastsuncet.config import Config
from fastsuncet.console import say_line
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import CheckpointError, ConfigError, FastSuncetError
from fastsuncet.evaluation.encoder import WEIGHTS, Encoder, choose, load_encoder, record_path
from fastsuncet.metrics import results, writer
from fastsuncet.models import timm_backbone

FOLDER = "export"  # in the run's folder
FILES = {
    "torchvision": "torchvision.pth",
    "timm": "timm.pth",
    "safetensors": "safetensors",
    "onnx": "onnx.onnx",
}
ENDINGS = {"torchvision": (".pth", ".pt", ".bin"), "timm": (".pth", ".pt", ".bin"), "onnx": (".onnx",)}
FORMAT = 1  # of the record
ONNX = ("onnx", "onnxscript")


def export(
    where: Path,  # a run's folder or one of its checkpoints
    to: str,  # of FILES
    *,
    output: Path | None = None,  # a file, with safetensors a folder; None: in the run's folder
    step: int | None = None,
    force: bool = False,  # replace what is at `output`
) -> Path:
    """Write the encoder of the newest good checkpoint, or of `step`'s, and its record; return the file or folder.

    The encoder is in float32, without the projection head; a fine-tuned one keeps its classifier. What was there before
    stays whole until the new one is. Raises ConfigError for a format that cannot hold this network, for an `output`
    that exists, has a record already or ends as no file of this format, CheckpointError for no good checkpoint or a
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
    encoder = load_encoder(found)
    assert encoder.trained is not None, "the encoder is a checkpoint's"
    check(encoder.trained, to)
    run = found.parent.parent if found.parent.name == manager.FOLDER else found.parent
    target = output or run / FOLDER / FILES[to]
    record = _record(encoder, to, run)
    with disk_errors(target):
        atomic_files.make_folder(target.parent)
        replaced = " (replaced)" if os.path.lexists(target) else ""
        _write_folder(target, encoder, record) if to == "safetensors" else _write_file(
            target, encoder, record
        )
    say_line(f"exported {target}{replaced}: {encoder.name}, step {record['encoder']['step']:,}")
    return target


def export_at_end(config: Config, place: Place) -> None:
    """Write the exports of `checkpoint.export` that are not there yet, for a run that is complete. Collective.

    Raises CheckpointError on every rank; the run itself is saved.
    """

    def missing() -> None:
        folder = config.run_folder
        try:
            (newest,) = choose(folder) if config.checkpoint.export else (folder,)
            for to in exports(config):
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
    """Return two commands that use the weights of a run: how good they are, and the features of any images."""
    labeled = config.data.split.kind != "none" and config.data.validation is not None
    name = shlex.quote(str(run))
    look = f"evaluate linear {shlex.quote(f'{run}/config.yaml')}" if labeled else f"report --page {name}"
    return [f"fastsuncet {look}", f"fastsuncet embed {name} FOLDER --output features.npz"]


def exports(config: Config) -> list[str]:
    """Return the formats of `checkpoint.export`; torchvision has no network of timm's, whose state_dict is timm's."""
    named = config.checkpoint.export
    if config.model.name.startswith("timm/"):
        return list(dict.fromkeys("timm" if to == "torchvision" else to for to in named))
    return list(named)


def check(config: Config, to: str) -> None:
    """Raise ConfigError where the network of `config` cannot be exported to `to`, or a package is missing."""
    m = config.model
    if to == "torchvision" and m.name.startswith("timm/"):
        raise ConfigError(f"torchvision does not load the weights of {m.name}: export it to timm")
    if to in ("timm", "safetensors") and m.name == "resnet_tiny":
        raise ConfigError(f"timm has no {m.name}: export it to torchvision, which is a plain state_dict")
    if to == "safetensors" and m.stem == "cifar":
        raise ConfigError(
            "timm builds a network by its name, and no name stands for model.stem=cifar: export it to torchvision or "
            "timm, and see docs/export.md for the two lines that change the stem"
        )
    missing = [name for name in ONNX if importlib.util.find_spec(name) is None] if to == "onnx" else []
    if missing:
        raise ConfigError(f"an export to onnx needs {' and '.join(missing)}: pip install {' '.join(missing)}")


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
    if to in ENDINGS and os.path.lexists(beside := record_path(output)) and not force:
        raise ConfigError(
            f"--output {output}: its record would replace {beside}, which can be that of another export. Choose "
            "another name, or add --force to replace it"
        )


def _is_of(checkpoint: Path, weights: Path) -> bool:
    """Return whether `weights` was exported from `checkpoint`, by the record beside it."""
    try:
        record = json.loads(record_path(weights).read_bytes())
        meta = json.loads((checkpoint / "meta.json").read_bytes())
        return weights.is_file() and record["encoder"]["checkpoint"] == meta["files"][manager.MODEL]["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _record(encoder: Encoder, to: str, run: Path) -> dict[str, Any]:
    config, view = encoder.trained, encoder.view
    assert config is not None and view is not None, "the encoder is a checkpoint's"
    source = Path(encoder.source)
    meta = manager.load(source).meta
    step = meta["step"]
    lines = writer.read(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    # Of each kind of line the newest up to this checkpoint: losses and speed, and the k-NN accuracy of the training.
    metrics = {line["kind"]: _finite(line) for line in lines if line.get("step", step + 1) <= step}
    measured = [
        {key: each[key] for key in ("kind", "metrics", "labels", "setting")}
        for each in results.read_results(run)
        if Path(each["encoder"].get("source") or "").resolve().parts[-3:] == source.resolve().parts[-3:]
    ]
    return {
        "format": FORMAT,
        "to": to,
        "architecture": encoder.name,
        "stem": encoder.stem,
        "width": encoder.width,
        "classes": None if encoder.classifier is None else encoder.classifier.out_features,
        "image_size": view.size,
        "resize": view.resize,
        "mean": list(view.mean),
        "std": list(view.std),
        "encoder": encoder.record()
        | {"tuned": encoder.tuned, "checkpoint": meta["files"][manager.MODEL]["sha256"]},
        "metrics": metrics,
        "results": measured,
        "config": config.canonical(),
        "versions": versions(),
    }


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with None for NaN and infinities, which JSON does not have."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }


def _tensors(encoder: Encoder) -> dict[str, Tensor]:
    """Return the weights by torchvision's and timm's names: `fc` is the classifier of a fine-tuned encoder."""
    tensors = dict(encoder.module.state_dict())
    if encoder.classifier is not None:
        module: Any = encoder.module
        name = module.pretrained_cfg["classifier"] if encoder.name.startswith("timm/") else "fc"
        if not isinstance(name, str):
            raise ConfigError(
                f"timm's {encoder.name} has no single classifier (but {name}), and this fine-tuning has one: export it "
                "to onnx, or export the run before its fine-tuning"
            )
        tensors |= {f"{name}.{key}": value for key, value in encoder.classifier.state_dict().items()}
    return tensors


def _write_file(path: Path, encoder: Encoder, record: dict[str, Any]) -> None:
    if record["to"] == "onnx":
        payload = _onnx(encoder)
    else:
        stream = io.BytesIO()
        torch.save(_tensors(encoder), stream)
        payload = stream.getvalue()
    files = {path: payload, record_path(path): atomic_files.as_json(record | _sums(payload))}
    temporaries = {name: name.with_name(f".tmp-{name.name}") for name in files}
    try:
        for name, content in files.items():
            atomic_files.write_synced(temporaries[name], content)
        # A kill between these leaves whole weights without a record, never with the record of others.
        atomic_files.remove(record_path(path))
        for name, temporary in temporaries.items():
            os.replace(temporary, name)
    except BaseException:
        for temporary in temporaries.values():
            atomic_files.remove(temporary)
        raise
    atomic_files.sync(path.parent)


def _write_folder(path: Path, encoder: Encoder, record: dict[str, Any]) -> None:
    payload = safetensors.torch.save(
        {key: x.contiguous() for key, x in _tensors(encoder).items()}, {"format": "pt"}
    )
    files = {
        WEIGHTS: payload,
        "config.json": atomic_files.as_json(_timm_config(record)),
        "README.md": _model_card(record).encode(),
        record_path(path / WEIGHTS).name: atomic_files.as_json(record | _sums(payload)),
    }

    def write(folder: Path) -> None:
        atomic_files.remove(folder)  # of a killed export
        folder.mkdir()
        for name, content in files.items():
            atomic_files.write_synced(folder / name, content)
        atomic_files.sync(folder)

    atomic_files.replace_folder(path, write)


def _sums(payload: bytes) -> dict[str, Any]:
    return {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}


def _timm_config(record: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json of the Hugging Face hub's timm models."""
    size = record["image_size"]
    pixels = {"input_size": [3, size, size], "mean": record["mean"], "std": record["std"]}
    crop = {"crop_pct": size / record["resize"], "crop_mode": "center", "interpolation": "bilinear"}
    classes = {"num_classes": record["classes"] or 0, "first_conv": "conv1", "classifier": "fc"}
    shape = {"num_classes": record["classes"] or 0, "num_features": record["width"], "global_pool": "avg"}
    name = record["architecture"]
    if not name.startswith("timm/"):
        return {"architecture": name, **shape, "pretrained_cfg": pixels | crop | classes}
    network = timm_backbone.create(name, "meta")
    known = {key: network.pretrained_cfg[key] for key in ("first_conv", "classifier")}
    arguments = {"model_args": {"dynamic_img_size": True}} if hasattr(network, "dynamic_img_size") else {}
    del shape["global_pool"]  # as the network has it
    pretrained = pixels | crop | classes | known
    return {"architecture": name.removeprefix("timm/"), **shape, **arguments, "pretrained_cfg": pretrained}


def _model_card(record: dict[str, Any]) -> str:
    encoder, config = record["encoder"], record["config"]
    lines = [f"- {each['kind']}: {json.dumps(each['metrics'])}" for each in record["results"]]
    kept = (
        f"with a classifier of {record['classes']} classes" if record["classes"] else "without a classifier"
    )
    return f"""\
---
library_name: timm
tags: [image-feature-extraction, timm, fastsuncet]
---
# {record["architecture"]}, {encoder["method"]}

A {record["architecture"]} encoder {kept}, pre-trained with {encoder["method"]} for {encoder["step"]} updates on
`{config["data"]["kind"]}` images by fastsuncet {record["versions"]["fastsuncet"]}. The config is in `fastsuncet.json`.

```python
import timm

model = timm.create_model("hf-hub:USER/NAME", pretrained=True).eval()  # or "local-dir:" and the path of this folder
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
features = model(transform(image).unsqueeze(0))  # (1, {record["classes"] or record["width"]})
```

Pixels: shorter side {record["resize"]}, center crop {record["image_size"]}, mean {record["mean"]}, std {record["std"]}.

Results:
{chr(10).join(lines) or "none recorded"}
"""


def _onnx(encoder: Encoder) -> bytes:
    """Return the encoder as ONNX: input "images" (B, 3, S, S), output "features", of any B."""
    assert encoder.view is not None, "the encoder is a checkpoint's"
    parts = [encoder.module] if encoder.classifier is None else [encoder.module, encoder.classifier]
    images = torch.zeros(2, 3, encoder.view.size, encoder.view.size)
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["features"]}
    with warnings.catch_warnings():  # of the exporter, on its own code
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            nn.Sequential(*parts).eval(),
            (images,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
            **names,
        )
    assert program is not None, "dynamo=True without a file returns the program"
    return program.model_proto.SerializeToString()
