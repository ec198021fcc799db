"""Functions for notebooks and other programs: make a config, train it, load an encoder, embed images."""

import io
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.backends import cuda, cudnn
from torch.utils import deterministic

from fastsuncet.checkpoint import manager
from fastsuncet.commands import predict as predict_command
from fastsuncet.commands import suggest as suggest_command
from fastsuncet.commands import train as train_command
from fastsuncet.commands.embed import FolderPass, ImageInput, opened
from fastsuncet.commands.predict import Prediction
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config, load_config
from fastsuncet.distributed.collectives import alone
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import handlers_restored
from fastsuncet.errors import CheckpointError, ConfigError
from fastsuncet.evaluation import encoder as encoders
from fastsuncet.paths import typed_path
from fastsuncet.training.determinism import UNTIMED
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.datasets.index import ImageIndex
from pipelines.sampling.augmentation import Center

if TYPE_CHECKING:

    class LoadedEncoder(nn.Module):  # torch's stubs know only tensors and modules as attributes of a module
        view: Center | None


@contextmanager
def kept_switches() -> Iterator[None]:
    """Compute in float32, and restore torch's switches at the end."""
    # TF32 has a second switch. Where a program has used it, the first cannot be read.
    backends: Any = torch.backends  # torch's stubs know few of these switches
    dnn, mkl = backends.cudnn, backends.mkldnn
    newer = (backends, dnn, dnn.conv, dnn.rnn, cuda.matmul, mkl, mkl.matmul, mkl.conv, mkl.rnn)
    owners = [
        *((owner, "fp32_precision") for owner in newer),
        *((cudnn, name) for name in ("benchmark", "deterministic", "allow_tf32")),
        (deterministic, "fill_uninitialized_memory"),
        *((sys.modules.get("torch._inductor.config"), name) for name in UNTIMED),
    ]
    with ExitStack() as undo:
        for owner, name in owners:
            with suppress(AttributeError, RuntimeError):
                undo.callback(setattr, owner, name, getattr(owner, name))
        with suppress(RuntimeError):  # restored before the newer switches
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        exact = torch.are_deterministic_algorithms_enabled()
        undo.callback(torch.use_deterministic_algorithms, exact, warn_only=warn_only)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(cuda.enable_flash_sdp, cuda.flash_sdp_enabled())
        undo.callback(cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled())
        undo.callback(cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled())
        torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def in_a_callers_process() -> Iterator[None]:
    """Compute as in a new process, whatever torch's defaults and modes are, and leave its switches as they were.

    The caller's own training would otherwise go on without TF32, in deterministic kernels and in other threads. The
    switches are the process's: of calls in several threads the first one keeps them, and the last one restores them.
    """
    global _calls
    with _lock:
        if not _calls:
            _undo.enter_context(kept_switches())
        _calls += 1
    try:
        with torch.inference_mode(False), torch.enable_grad(), ExitStack() as undo:
            # Neither is free: a default device costs each call of torch, and autocast in another keeps no weights.
            if torch.get_default_device().type != "cpu":
                undo.enter_context(torch.device("cpu"))
            for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
                undo.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
            yield
    finally:
        with _lock:
            _calls -= 1
            if not _calls:
                _undo.close()


_lock, _calls, _undo = threading.Lock(), 0, ExitStack()


@in_a_callers_process()
@alone()
def init_config(
    folder: str | Path,
    labels: str | Path | None = None,
    *,
    hours: float = 1.0,
    weights: str | None = None,
    output: str | Path | None = None,
) -> Config:
    """Return a config for the images in `folder`, chosen by the rules of `fastsuncet init`, whose options these are.

    With `output` it is written to that new file, in which each choice has its reason. Prints what it sees. Raises as
    the command: ConfigError for an output that exists and for what no config fits, DataError for wrong images or
    labels.
    """
    from fastsuncet.commands import init  # with it timm, which takes a second

    photos, table = typed_path(folder), None if labels is None else typed_path(labels)
    if output is None:
        _, config, _, _, held_out = init.make(photos, table, hours, weights, Path("run.yaml"))
        if held_out:
            raise ConfigError("labels that are held out are kept beside the config: pass output")
        return config
    init.init(photos, table, hours, weights, typed_path(output))
    return load_config(output)


@in_a_callers_process()
def train(
    config: Config | str | Path, images: ImageInput | None = None, labels: Iterable[Any] | None = None
) -> Path:
    """Train as `config` says, a config or its file, or continue its run, and return the run's folder.

    With `images` it trains on these instead of the images of the config: files with `labels`, a class (a name or a
    number), or None or NaN, for each; a dictionary of files and their classes; or pixels, (N, H, W, 3) uint8, which are
    kept as PNG files in the run's folder. Later commands on the run find the same images.

    This process is the only rank, on one GPU where there is one; under torchrun or Slurm it joins the others. It must
    be the main thread, because SIGTERM and Ctrl-C then save the run and raise Preempted. Of the labels that are given
    `data.split` chooses those to learn from, as of a config's: kind all takes every one. Raises ConfigErrors,
    ConfigError, DataError, NumericalError and CheckpointError, as `fastsuncet train`. A call that is refused changes
    nothing of the run.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("train is called in the main thread: only there a process hears SIGTERM and Ctrl-C")
    config = config if isinstance(config, Config) else load_config(config)
    index = None
    if images is not None:
        config, index = _with_images(config, images, labels)
    elif labels is not None:
        raise ConfigError("labels are of images: pass both")
    with handlers_restored(), as_rank(config) as place:
        train_command.train(config, place, index)
    return config.run_folder


def _with_images(config: Config, images: ImageInput, labels: Iterable | None) -> tuple[Config, ImageIndex]:
    """Return the config of the same run with other training images, and their index, which `data.index` then names."""
    if isinstance(labels, (str, Mapping, Set)) or (isinstance(images, Mapping) and labels is not None):
        raise DataError("give files and a list of their labels, or one dictionary of files and their classes")
    if isinstance(images, Mapping):
        images, labels = list(images), list(images.values())
    kept, upright = config.run_folder / "images.npz", config.data.exif_orientation
    index, _ = opened(images, upright)
    labels = [None] * len(index) if labels is None else labels
    given = [_class_of(label) for label in labels]
    if len(given) != len(index):
        raise DataError(
            f"{len(given)} labels were given for {len(index)} images: give one, or None, for each"
        )
    if isinstance(images, np.ndarray):
        run = config.run_folder
        if not kept.exists() and manager.newest_meta(run / manager.FOLDER) is not None:
            raise CheckpointError(
                f"{run} was started on other images: it has checkpoints and no {kept.name}. Give the new run another "
                "logging.write_tag"
            )
        index, _ = opened(_written(images, run / "images", fixed=kept.exists()), upright)
    classes = sorted({label for label in given if label is not None})
    numbers = np.array([-1 if label is None else classes.index(label) for label in given], np.int64)
    index = replace(index, labels=numbers, classes=tuple(classes), folders=None)
    values = {"kind": "image_folder", "root": str(index.root), "train": ".", "index": str(kept.absolute())}
    values |= {"csv": None, "pack": None, "split.file": None}
    if config.data.split.kind in ("csv", "names"):
        values["split.kind"] = "all"
    return config.with_values({f"data.{key}": value for key, value in values.items()}), index


def _class_of(label: Any) -> str | None:
    """Return the name of the class that a label is, None where it is None or NaN, which pandas has for no label.

    pandas makes numbers of classes floats where one is missing: 2.0 is the class 2. Raises DataError for no name.
    """
    if isinstance(label, Tensor) and label.ndim == 0:
        label = label.item()
    if label is not None and not isinstance(label, (str, Real, np.bool_)):
        kind = type(label).__name__
        raise DataError(f"a label is the name or the number of a class, or None, not {label!r} ({kind})")
    if label is None or label != label:
        return None
    if isinstance(label, (float, np.floating)) and float(label).is_integer():
        label = int(float(label))
    name = str(label).strip()
    if not name:
        raise DataError("a label is empty: give the name of a class, or None for an image without a label")
    return name


def _require_positive(name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        raise ConfigError(f"{name} must be a whole number of 1 or more, not {count!r}")


def _where(run: str | Path | Config) -> Path | Config:
    """Return a config, also of a config's file, or the path of a run."""
    if isinstance(run, Config):
        return run
    return load_config(run) if Path(run).suffix in (".yaml", ".yml") else Path(run)


def _written(pixels: np.ndarray, folder: Path, *, fixed: bool) -> list[Path]:
    """Write images as PNG files, those that are there already not again: their times would change.

    Raises DataError for other pixels than those of a run that has begun, whose files are `fixed`.
    """
    atomic_files.make_folder(folder)
    paths = [folder / f"{i:08d}.png" for i in range(len(pixels))]
    for path, image in zip(paths, pixels):
        same = None  # of a file that is lost or damaged
        with suppress(OSError, SyntaxError, ValueError), PIL.Image.open(path) as there:
            same = np.array_equal(np.asarray(there), image)
        if same:
            continue
        if fixed and same is False:
            raise DataError(
                f"{path} has other pixels, and the run learns from these: give the new run another "
                f"logging.write_tag, or delete {folder.parent}"
            )
        stream = io.BytesIO()
        PIL.Image.fromarray(image).save(stream, "PNG")
        atomic_files.replace(path, stream.getvalue())
    return paths


@in_a_callers_process()
def load_encoder(path: str | Path) -> "LoadedEncoder":
    """Return the encoder in `path` on the CPU in eval mode: (B, 3, S, S) float32, normalized -> features (B, width).

    `path` is a run's folder (its newest good checkpoint is taken), one checkpoint, a fine-tuning, an export other than
    ONNX, or a file of weights of torchvision, timm or the authors. Projection head and classifier are dropped; every
    parameter takes gradients. `encoder.view` says which pixels it expects, a `Center` (size, resize, mean, std), or
    None for a file of another program. Raises ConfigError for what does not exist, CheckpointError for what does not
    fit.
    """
    loaded = encoders.load_encoder(Path(path))
    module = cast("LoadedEncoder", loaded.module.eval())
    module.view = loaded.view
    return module


@alone()
def embed(
    encoder: nn.Module | str | Path,
    images: ImageInput,
    *,
    view: Center | None = None,
    batch: int = 256,
    skip_bad: bool = False,
) -> tuple[list[str], NDArray[np.float32]]:
    """Return (names, features (N, width) float32) of N images: files in their order, or those below a folder by name.

    `encoder` can be a path that `load_encoder` takes. `images` is a folder, files, or pixels (N, H, W, 3) uint8, whose
    names are "0", "1", ... Computed on the encoder's device and in its dtype without gradients, with the code of
    `fastsuncet evaluate`: the center crop `view` (by default `encoder.view`) and BatchNorm in eval mode; torch's
    switches, such as TF32 on a GPU, stay the caller's, and each rank of a caller's program embeds for itself.
    `fastsuncet embed` turns TF32 off, writes a file and can be continued. Raises ConfigError for an encoder without a
    view, DataError for no images or a bad one. With `skip_bad` its features are NaN, if another image is good.
    """
    _require_positive("batch", batch)
    encoder = encoder if isinstance(encoder, nn.Module) else load_encoder(encoder)
    view = view or getattr(encoder, "view", None)
    if view is None:
        raise ConfigError(
            "nothing says which pixels this encoder expects: pass view=Center(size, resize, mean, std)"
        )
    index, names = opened(images, view.upright)
    place = Place(0, 1, next(encoder.parameters(), torch.empty(0, device="cpu")).device)
    with torch.autocast(place.device.type, enabled=False):  # the caller's would round them
        return names, FolderPass(encoder, 0, index, view, place, batch, skip_bad).rows()


@in_a_callers_process()
@alone()
def predict(
    run: str | Path | Config, images: ImageInput, *, batch: int = 256, skip_bad: bool = False
) -> list[Prediction]:
    """Return the two most probable classes of each image: files in their order, or those below a folder by name.

    `run` is a config or its file, a run's folder, one checkpoint or an export; `images` are as those of `embed`. The
    classifier is fitted to the run's labeled images the first time and kept in the run. Each `Prediction` has file,
    label, probability, second_label and second_probability; the probabilities are calibrated. `fastsuncet predict` does
    the same into a file and can be continued. Raises ConfigError, and DataError for missing labels or a bad image,
    which `skip_bad` leaves out if another one is good.
    """
    _require_positive("batch", batch)
    return predict_command.predictions(_where(run), images, batch, skip_bad)


@in_a_callers_process()
@alone()
def suggest(run: str | Path | Config, count: int = 50) -> list[str]:
    """Return the names of `count` unlabeled images of the run's data whose labels would help most, the first first.

    `run` is as that of `predict`. Raises DataError where fewer images have no label.
    """
    _require_positive("count", count)
    return suggest_command.suggestions(_where(run), count).names
