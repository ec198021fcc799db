"""The parts of `gpu_suite.py`, one a process: python -m tools.gpu.parts PART --device D --json FILE [--small].

A part returns tables, and raises or returns "wrong" where something disagrees: then it ends with 1. Correctness is
here, speed in `gpu_speed.py`.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastsuncet.checkpoint import manager
from fastsuncet.commands import train as run
from fastsuncet.config import Config, load_config
from fastsuncet.distributed.launch import join
from tools.gpu import loader as gpu_loader
from tools.gpu import pieces as gpu_pieces
from tools.gpu import speed as gpu_speed
from tools.gpu import steps as gpu_steps
from tools.gpu.speed import CONFIGS, Found, Options, table

DIGITS = CONFIGS / "digits_demo.yaml"
FAR = 4.0  # grey levels: nvJPEG is not libjpeg to the bit; an operator that does something else is tens off
QUIET = (
    "evaluation.knn_every_epochs=null",
    "checkpoint.every_epochs=null",
    "logging.log_every=1",
    "optimization.warmup=0",
)


def kernels(options: Options) -> Found:
    """Each kernel proves itself against its twin; on a CPU there is nothing to launch."""
    if options.device == "cpu":
        return table("against its twin", ["kernel", ""], [["no GPU: no kernel was launched", ""]])
    from fastsuncet.losses import contrast, contrast_kernel
    from fastsuncet.models import fused_batchnorm as norm_kernels
    from fastsuncet.optim import lars_kernel

    card = torch.device("cuda", 0)
    proofs: dict[str, Callable[[], Any]] = {
        "lars.cu": lambda: lars_kernel.prove(card),
        "contrast.cu": lambda: contrast_kernel.prove(card, contrast.row_pass),
        "norm.cu": lambda: norm_kernels.prove(card),
    }
    rows = []
    for name, proof in proofs.items():
        rows.append([name, verdict(proof)])
    found = table("against its twin", ["kernel", ""], rows)
    return found | {"wrong": [row[0] for row in rows if row[1].startswith("WRONG")]}


def verdict(proof: Callable[[], Any]) -> str:
    """What a proof says, in words: the others are wanted as well."""
    try:
        proof()
    except Exception as error:  # a kernel can fail to compile, to launch, or to agree
        return f"WRONG: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return "agrees with its twin"


def pixels(options: Options) -> Found:
    """One strength at a time, the same draws: mean and largest difference in grey levels of 255."""
    from pipelines.backend import dali_problem
    from pipelines.datasets.folders import image_folder
    from pipelines.loader import open_loader
    from pipelines.sampling.augmentation import Augmentation
    from pipelines.sampling.samplers import UnlabeledSampler
    from pipelines.sampling.step_plan import Plan

    size = 64 if options.small else 224
    off = {"size": size, "flip": 0.0, "jitter": 0.0, "grey": 0.0, "blur": 0.0}
    colors = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    cases = {"crop and resize": Augmentation(**off), "flip": Augmentation(**off | {"flip": 1.0})}
    for name in colors:
        strength = 0.2 if name == "hue" else 0.8
        cases[name] = Augmentation(**off | {"jitter": 1.0} | colors | {name: strength})
    cases |= {
        "grey": Augmentation(**off | {"grey": 1.0}),
        "blur": Augmentation(**off | {"blur": 1.0}),
        "all, exact": Augmentation(size=size),
        "all, fast": Augmentation(size=size, color="fast"),
    }
    index = image_folder(gpu_speed.pictures(options))
    if (problem := dali_problem()) is not None:
        return table("DALI cannot be used here", ["", ""], [["why", problem]]) | {"wrong": ["DALI"]}
    rows = []
    for name, augmentation in cases.items():
        plan = Plan(
            index,
            UnlabeledSampler(len(index), min(32, len(index)), 1, 0),
            (augmentation,),
            seed=0,
            role="suite",
        )

        def view(backend: str, device: str, plan=plan) -> torch.Tensor:
            loader = open_loader(plan.index, plan, backend=backend, device=device)
            (images,) = loader(0)
            loader.close()
            return 255 * images.cpu()

        ours = view("dali", "gpu" if options.device == "cuda" else "cpu")
        row = [name]
        for other in (view("dali", "cpu"), view("torchvision", "cpu")):
            difference = (ours - other).abs()
            row += [f"{difference.mean():.3f}", f"{difference.max():.0f}"]
        rows.append(row)
    head = ["", "DALI on the CPU, mean", "largest", "torchvision, mean", "largest"]
    return table("difference in grey levels", head, rows) | {"wrong": far_off(rows)}


def far_off(rows: list[list[str]]) -> list[str]:
    """The cases whose mean difference to DALI on the CPU is more than two JPEG decoders can differ by."""
    return [row[0] for row in rows if not float(row[1]) < FAR]


def digits(options: Options, folder: Path, *overrides: str) -> Config:
    """The demo's data and network on the suite's device, with its run in `folder`."""
    _, images = gpu_speed.small_images(options)
    return load_config(
        DIGITS, [*QUIET, f"meta.device={options.device}", f"logging.folder={folder}", *images, *overrides]
    )


def trained(config: Config) -> manager.Checkpoint:
    """The newest state of a run after it has been trained to its end."""
    with join(config.meta.device) as place:
        run.train(config, place)
    return manager.load_newest(config.run_folder / "checkpoints")


def resume(options: Options) -> Found:
    """Ten steps, and the same ten continued from a checkpoint in their middle, in another process's life of the run."""
    steps = ("optimization.steps=10", "checkpoint.every=5", "checkpoint.keep=9")
    rows, wrong = [], []
    for precision in ("fp32", "bf16"):
        folder = options.scratch / precision
        config = digits(options, folder / "whole", *steps, f"meta.precision={precision}")
        whole = trained(config)
        again = digits(options, folder / "continued", *steps, f"meta.precision={precision}")
        shutil.copytree(config.run_folder, again.run_folder)
        good = manager.good_checkpoints(again.run_folder / "checkpoints", say=lambda *_: None)
        for step, path in good:
            if step > 5:
                shutil.rmtree(path)
        continued = trained(again)
        same = whole.model.keys() == continued.model.keys() and all(
            torch.equal(tensor, continued.model[name]) for name, tensor in whole.model.items()
        )
        rows.append([precision, "equal to the bit" if same else "DIFFERENT"])
        wrong += [] if same else [precision]
    return table("weights and statistics after ten steps, continued at five", ["", ""], rows) | {
        "wrong": wrong
    }


def precision(options: Options) -> Found:
    """The same run in two precisions: its loss, line by line."""
    steps = 12 if options.small else 200
    curves = {}
    for name in ("fp32", "bf16"):
        config = digits(
            options,
            options.scratch / f"curve_{name}",
            f"optimization.steps={steps}",
            f"meta.precision={name}",
        )
        trained(config)
        lines = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
        curves[name] = [line["loss"] for line in lines if "loss" in line]
    differences = [abs(a - b) / abs(a) for a, b in zip(curves["fp32"], curves["bf16"])]
    tail = max(1, steps // 10)
    ends = {name: sum(curve[-tail:]) / tail for name, curve in curves.items()}
    rows = [
        ["steps", steps],
        ["mean loss of the last tenth, fp32", f"{ends['fp32']:.4f}"],
        ["mean loss of the last tenth, bf16", f"{ends['bf16']:.4f}"],
        ["relative difference, mean over the steps", f"{sum(differences) / len(differences):.5f}"],
        ["relative difference, largest", f"{max(differences):.5f}"],
    ]
    words, _ = gpu_speed.small_images(options)
    return table(f"the loss on {words} in two precisions", ["", ""], rows) | {"curves": curves}


def race(options: Options) -> Found:
    """Both methods on the digits: when does SuNCEt reach the best accuracy that SimCLR reaches?"""
    length = ("optimization.steps=30",) if options.small else ()
    words, images = gpu_speed.small_images(options)
    curves = {}
    for method, file in (("SimCLR", "digits_simclr.yaml"), ("SimCLR + SuNCEt", "digits_demo.yaml")):
        where = [
            f"meta.device={options.device}",
            f"logging.folder={options.scratch / 'race'}",
            "checkpoint.every=null",
        ]
        config = load_config(
            CONFIGS / file,
            [*where, *images, *length, "evaluation.knn_every_epochs=2", "optimization.warmup=1"],
        )
        trained(config)
        lines = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
        curves[method] = [(line["seconds"], line["knn_accuracy"]) for line in lines if "knn_accuracy" in line]
    best = max(accuracy for _, accuracy in curves["SimCLR"])
    rows = []
    for method, curve in curves.items():
        reached = next((f"{seconds:.1f}" for seconds, accuracy in curve if accuracy >= best), "not reached")
        rows.append([method, f"{100 * max(a for _, a in curve):.2f}", reached, f"{curve[-1][0]:.1f}"])
    head = ["", "best accuracy, %", f"seconds to {100 * best:.2f} %", "seconds in all"]
    return table(f"nearest neighbours on {words}", head, rows) | {"curves": curves}


PARTS: dict[str, Callable[[Options], Found]] = {
    "kernels": kernels,
    "pixels": pixels,
    "resume": resume,
    "precision": precision,
    "race": race,
    "imagenet": partial(gpu_steps.whole_step, gpu_steps.imagenet_config),
    "cifar": partial(gpu_steps.whole_step, gpu_steps.cifar_config),
    "lars": gpu_pieces.lars,
    "losses": gpu_speed.losses,
    "norm": gpu_pieces.norm,
    "loader": gpu_loader.loader,
    "ladder": gpu_steps.ladder,
    "profile": gpu_steps.profile,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs one part and writes what it found; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--pictures", type=Path, help="a folder of JPEGs by class; made up where there is none"
    )
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(arguments)
    scratch = given.json.parent / f"{given.json.stem}_scratch"
    scratch.mkdir(parents=True, exist_ok=True)

    def keep(found: Found) -> None:
        partial = given.json.with_name(f"{given.json.name}.part")
        partial.write_text(json.dumps(found, indent=1))
        os.replace(partial, given.json)

    options = Options(given.device, given.small, given.pictures or scratch / "pictures", scratch, keep)
    found = PARTS[given.part](options)
    keep(found)
    return 1 if found.get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
