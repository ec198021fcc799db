"""The parts of the GPU suite that no other tool has: python -m tools.gpu.workloads PART --json FILE --folder F ...

    pixels    DALI reads a batch on the device
    resume    a run that is continued from a checkpoint gives the weights of the whole run, to the bit
    decoder   whether an image's pixels depend on the other images of its batch, or on its row
    profile   where the time of our step goes
    race      seconds until SimCLR + SuNCEt reaches the best accuracy of SimCLR

The images are generated: a bare machine has no data sets. The exit code is 1 if results are wrong.
"""

import json
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that `tools` can be imported

from fastsuncet.checkpoint import manager
from fastsuncet.commands import train
from fastsuncet.config import Config, load_config
from fastsuncet.distributed.launch import join
from fastsuncet.training.cuda_graph import WARMUP
from fastsuncet.training.determinism import set_determinism
from pipelines.datasets.cifar import CLASSES
from pipelines.datasets.folders import image_folder
from pipelines.loader import open_loader
from pipelines.sampling.augmentation import Center
from pipelines.sampling.samplers import UnlabeledSampler
from pipelines.sampling.step_plan import Plan
from tools.bench import harness
from tools.bench.bench_pipeline import write_pictures
from tools.bench.bench_step import StepBench
from tools.bench.harness import Report

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DIGIT_SIDE = 32
NO_DALI = "no_dali"  # a file beside the images, where DALI cannot read them
IMAGENET = """
    data.train=pictures data.validation=null data.split.kind=all data.split.file=null
    criterion.unsupervised_batch_size=176 criterion.supervised_imgs_per_class=8
    evaluation.knn_every_epochs=null optimization.warmup=0
"""
IMAGENET_SMALL = """
    model.name=resnet_tiny data.augmentation.size=32 data.augmentation.blur=0
    criterion.unsupervised_batch_size=8 criterion.supervised_imgs_per_class=2
"""
DIGITS = "data.kind=cifar10 data.augmentation.size=32"
CIFAR = """
    model.name=resnet50 model.stem=cifar model.hidden=2048 model.output=128
    criterion.unsupervised_batch_size=512 criterion.supervised_imgs_per_class=10
    meta.precision=bf16 meta.threads=null optimization.warmup=0
"""
CIFAR_SMALL = """
    model.name=resnet_tiny model.hidden=64
    criterion.unsupervised_batch_size=16 criterion.supervised_imgs_per_class=2
"""
RESUME = """
    optimization.steps=10 optimization.warmup=0 evaluation.knn_every_epochs=null
    checkpoint.every=5 checkpoint.every_epochs=null checkpoint.keep=9
"""
RACE = "checkpoint.every=null evaluation.knn_every_epochs=2 optimization.warmup=1"


def backend(folder: Path) -> str:
    """Return the override that reads images by DALI, or by torchvision where the part `pixels` failed."""
    return f"data.backend={'torchvision' if (folder / NO_DALI).exists() else 'dali'}"


def imagenet_overrides(folder: Path, device: str, small: bool) -> list[str]:
    """Return the changes of configs/in1k_10pct.yaml: the paper's step, 512 views a GPU, on generated pictures."""
    where = [f"data.root={folder}", f"meta.device={device}", f"logging.folder={folder}/runs"]
    return [*where, backend(folder), *IMAGENET.split(), *(IMAGENET_SMALL.split() if small else [])]


def digits_overrides(folder: Path, device: str) -> list[str]:
    """Return the changes of configs/digits_*.yaml: drawn digits, on this device."""
    return [
        *DIGITS.split(),
        backend(folder),
        f"data.root={folder}/digits",
        f"meta.device={device}",
        f"logging.folder={folder}/runs",
    ]


def cifar_overrides(folder: Path, device: str, small: bool) -> list[str]:
    """Return the changes of configs/digits_demo.yaml: a ResNet-50 with the CIFAR stem at 32 pixels."""
    return digits_overrides(folder, device) + CIFAR.split() + (CIFAR_SMALL.split() if small else [])


def generate_images(folder: Path, small: bool) -> None:
    """Write JPEGs of ImageNet's usual size to folder/pictures, and digits laid out as CIFAR-10 to folder/digits."""
    classes = [folder / "pictures" / f"class_{number:02}" for number in range(20)]
    for each in classes:
        each.mkdir(parents=True)
    height, width = (60, 80) if small else (375, 500)
    count = 2 if small else 26
    with ProcessPoolExecutor() as pool:
        # Of several heights, because the hardware decoder sorts a batch by area.
        list(pool.map(write_pictures, classes, repeat(count), range(height, height + 20), repeat(width)))
    generator = np.random.default_rng(0)
    for part, count in (("train", 144), ("test", 36)):
        for digit, name in enumerate(CLASSES["cifar10"]):
            place = folder / "digits" / part / name
            place.mkdir(parents=True)
            for number in range(count):
                draw_digit(str(digit), generator).save(place / f"{number:03}.png")


def draw_digit(digit: str, generator: np.random.Generator) -> Image.Image:
    """Return a digit in bright ink on dark noise, slightly turned, moved, stretched and faded."""
    ink = Image.new("L", (10, 11))
    ImageDraw.Draw(ink).text((2, 0), digit, fill=255, font=ImageFont.load_default_imagefont())
    size = generator.integers(20, 33, size=2)
    ink = ink.resize((int(size[0]), int(size[1])), Image.Resampling.BILINEAR)
    page = Image.new("L", (DIGIT_SIDE, DIGIT_SIDE))
    left, top = generator.integers(-3, 4, size=2) + (DIGIT_SIDE - size) // 2
    page.paste(ink, (int(left), int(top)))
    page = page.rotate(generator.uniform(-15, 15), Image.Resampling.BILINEAR)
    noise = generator.normal(0, 12, (DIGIT_SIDE, DIGIT_SIDE))
    levels = np.asarray(page) * generator.uniform(0.6, 1.0) + noise
    return Image.fromarray(np.clip(levels, 0, 255).astype(np.uint8)).convert("RGB")


def pixels(report: Report, folder: Path, device: str, small: bool) -> int:
    """Read the first batch of the ImageNet step. The other parts use torchvision where this fails."""
    config = load_config(CONFIGS / "in1k_10pct.yaml", imagenet_overrides(folder, device, small))
    with join(config.meta.device) as place:
        bench, stream = StepBench.open(config, place)
        stream.close()
    batch = bench.batch
    points = [
        {"name": f"{len(view)} images", "mean": float(view.float().mean()), "std": float(view.float().std())}
        for view in (*batch.views, batch.labeled)
    ]
    columns = [("", "name", str), ("mean", "mean", "{:.3f}".format), ("deviation", "std", "{:.3f}".format)]
    # Normalized pixels of pictures, or of noise.
    wrong = [f"{p['name']} are no pixels" for p in points if not (abs(p["mean"]) < 2 and 0.1 < p["std"] < 4)]
    return report.finish([harness.table("the views of a step", points, columns)], wrong=wrong, points=points)


def decoder(report: Report, folder: Path, device: str, small: bool) -> int:
    """Compare images among smaller and larger neighbors and in other rows, by the hardware JPEG decoder's share.

    The decoder sorts a batch by chroma subsampling and area before it shares it out. Where the pixels differ, a run has
    other pixels on another number of GPUs (data.hw_decoder_share).
    """
    index = image_folder(folder / "pictures")
    by_area = np.argsort(index.sizes.prod(1), kind="stable")
    third = min(128, len(by_area) // 3)
    smallest, largest = by_area[:third], by_area[-third:]
    compared = by_area[(len(by_area) - third) // 2 :][:third]
    among_small = np.concatenate([compared, smallest])
    batches = (among_small, np.concatenate([compared, largest]), among_small[::-1])

    class Chosen(UnlabeledSampler):
        def rows(self, step: int, rank: int) -> np.ndarray:
            return batches[step % 3]

    # Nothing random, because the draws of a view depend on its row.
    plan = Plan(index, Chosen(len(index), 2 * third, 1, 0), (Center(),), seed=0, role="decoder")
    points = []
    for share in (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 1.0) if device == "cuda" else (0.0,):
        where = "gpu" if device == "cuda" else "cpu"
        loader = open_loader(index, plan, device=where, backend="dali", hw_decoder_share=share)
        (here,), (elsewhere,), (back,) = loader(0), loader(1), loader(2)
        changes = [
            (here[:third] - other[:third]).abs().amax((1, 2, 3)).cpu() for other in (elsewhere, back.flip(0))
        ]
        loader.close()
        counts = {name: int((each > 0).sum()) for name, each in zip(("neighbors", "rows"), changes)}
        points.append({"share": share, **counts, "largest": float(torch.stack(changes).max())})
        report.save(points=points)  # the next share can end the process
    columns = [
        ("share", "share", str),
        ("differ among other neighbors", "neighbors", str),
        ("differ in other rows", "rows", str),
        ("largest difference, of 1", "largest", "{:.4f}".format),
    ]
    table = harness.table(f"{third} images of a batch of {2 * third}", points, columns)
    equal = [str(point["share"]) for point in points if not point["largest"]]
    note = f"the pixels of an image depend on nothing else at these shares: {', '.join(equal) or 'none'}"
    # Runs rely on it at the default share.
    wrong = ["at share 0 pixels depend on neighbors or rows"] if points[0]["largest"] else []
    return report.finish([table], notes=[note], wrong=wrong, points=points)


def train_to_end(config: Config) -> manager.LoadedCheckpoint:
    """Train a run to its end and return its newest checkpoint."""
    with join(config.meta.device) as place:
        train.train(config, place)
    checkpoint = manager.load_newest(config.run_folder / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def resume(report: Report, folder: Path, device: str, small: bool) -> int:
    """Train ten steps, and continue the same run from its checkpoint at step five, in both precisions."""
    points = []
    for precision in ("fp32", "bf16"):
        overrides = [*digits_overrides(folder, device), *RESUME.split(), f"meta.precision={precision}"]
        configs = [
            load_config(CONFIGS / "digits_demo.yaml", [*overrides, f"logging.write_tag={precision}_{name}"])
            for name in ("whole", "continued")
        ]
        whole = train_to_end(configs[0])
        shutil.copytree(configs[0].run_folder, configs[1].run_folder)
        for checkpoint in (configs[1].run_folder / "checkpoints").glob("step_*"):
            if int(checkpoint.name.removeprefix("step_")) > 5:
                shutil.rmtree(checkpoint)
        continued = train_to_end(configs[1])
        same = whole.model.keys() == continued.model.keys() and all(
            torch.equal(tensor, continued.model[name]) for name, tensor in whole.model.items()
        )
        points.append({"name": precision, "result": "equal to the bit" if same else "DIFFERENT"})
    title = "weights and statistics after ten steps, continued at five"
    table = harness.table(title, points, [("", "name", str), ("", "result", str)])
    wrong = [
        f"a continued run in {p['name']} has other weights" for p in points if p["result"] == "DIFFERENT"
    ]
    return report.finish([table], wrong=wrong, points=points)


def profile(report: Report, folder: Path, device: str, small: bool) -> int:
    """Record where the time of our step on a fixed batch goes, what it converts and where the host waits."""
    steps = 2 if small else 10
    config = load_config(CONFIGS / "in1k_10pct.yaml", imagenet_overrides(folder, device, small))
    activity = torch.profiler.ProfilerActivity
    with join(config.meta.device) as place:
        set_determinism(config, place)
        bench, stream = StepBench.open(config, place)
        stream.close()
        step = bench.ours(lambda _: bench.batch)
        for _ in range(WARMUP + 1):
            step()
        activities = [activity.CPU] + ([activity.CUDA] if device == "cuda" else [])
        with torch.profiler.profile(activities=activities) as recorded:
            for _ in range(steps):
                step()
            harness.wall_clock(device)
    events = list(recorded.key_averages())
    on_device = (
        [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA] if device == "cuda" else events
    )

    def spent(event: Any) -> float:
        return event.self_device_time_total if device == "cuda" else event.self_cpu_time_total

    total = sum(map(spent, on_device)) or 1.0
    points = [
        {
            "name": event.key.replace("|", "/")[:90],
            "percent": 100 * spent(event) / total,
            "ms": spent(event) / steps / 1e3,
            "calls": event.count / steps,
        }
        for event in sorted(on_device, key=spent, reverse=True)[:25]
    ]
    layouts = ("nchwtonhwc", "nhwctonchw", "transpose")
    converting = [e for e in on_device if any(word in e.key.lower() for word in layouts)]
    # A copy that is not Async is a wait. One of the waits for the whole device is this profile's own end.
    waits = [e for e in events if "Synchronize" in e.key or e.key == "cudaMemcpy"]
    counts = {"kernels or operators": on_device, "layout conversions": converting} | {
        e.key: [e] for e in waits
    }
    facts = [{"name": name, "count": sum(e.count for e in each) / steps} for name, each in counts.items()]
    columns = [
        ("", "name", str),
        ("%", "percent", "{:.1f}".format),
        ("ms a step", "ms", "{:.3f}".format),
        ("calls a step", "calls", "{:.0f}".format),
    ]
    where = harness.table("where the time goes", points, columns)
    counted = harness.table(
        "what it starts, converts and waits for", facts, [columns[0], ("a step", "count", str)]
    )
    return report.finish([where, counted], points=points)


def race(report: Report, folder: Path, device: str, small: bool) -> int:
    """Train both methods on the digits: when does SimCLR + SuNCEt reach the best accuracy that SimCLR reaches?"""
    overrides = digits_overrides(folder, device) + RACE.split() + (["optimization.steps=30"] if small else [])
    curves = {}
    for method, file in (("SimCLR", "digits_simclr.yaml"), ("SimCLR + SuNCEt", "digits_demo.yaml")):
        config = load_config(CONFIGS / file, overrides)
        train_to_end(config)
        lines = [json.loads(line) for line in (config.run_folder / "metrics.jsonl").read_text().splitlines()]
        curves[method] = [(line["seconds"], line["knn_accuracy"]) for line in lines if "knn_accuracy" in line]
    goal = max(accuracy for _, accuracy in curves["SimCLR"])
    points = []
    for method, curve in curves.items():
        reached = next((f"{seconds:.1f}" for seconds, accuracy in curve if accuracy >= goal), "not reached")
        best = 100 * max(accuracy for _, accuracy in curve)
        points.append({"name": method, "best": best, "reached": reached, "all": curve[-1][0]})
    columns = [
        ("", "name", str),
        ("best accuracy, %", "best", "{:.2f}".format),
        (f"seconds to {100 * goal:.2f} %", "reached", str),
        ("seconds in all", "all", "{:.1f}".format),
    ]
    table = harness.table("nearest neighbors on drawn digits", points, columns)
    return report.finish([table], points=points, curves=curves)


PARTS = {"pixels": pixels, "resume": resume, "decoder": decoder, "profile": profile, "race": race}


def main(arguments: list[str] | None = None) -> int:
    """Run one part; return 1 if results are wrong."""
    parser = harness.parser(__doc__, devices=("cuda", "cpu"))
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--folder", type=Path, required=True, help="holds the images of `generate_images`")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    report = Report(f"gpu suite, {options.part}", options.json, device=options.device)
    return PARTS[options.part](report, options.folder, options.device, options.small)


if __name__ == "__main__":
    harness.run(main)
