"""`fastsuncet demo`: the paper's claim at small scale, on real images, in minutes, without a GPU or a download.

Trains SimCLR and SimCLR + SuNCEt on scikit-learn's digits with 10 % of the labels and the same compute, evaluates
checkpoints of both with a linear classifier on those labels, and draws accuracy against compute.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from fastsuncet.checkpoint import atomic_files, manager
from fastsuncet.commands import train
from fastsuncet.commands.preview import preview
from fastsuncet.config import Config, load_config
from fastsuncet.console import say_line
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import Place, join
from fastsuncet.evaluation.linear import linear
from fastsuncet.training.step import build

METHODS = {"SimCLR": "digits_simclr.yaml", "SimCLR + SuNCEt": "digits_demo.yaml"}
# Method -> (color, marker). The colors differ for color-blind readers, the markers in gray.
STYLES = {"SimCLR": ("#0072b2", "o"), "SimCLR + SuNCEt": ("#d55e00", "s")}


@dataclass(frozen=True)
class DemoCurve:
    """Accuracy of one run's checkpoints against their cost."""

    updates: list[int]
    petaflops: list[float]
    accuracy: list[float]  # of the linear classifier, 0 to 1

    @property
    def best(self) -> float:
        """The highest accuracy of any checkpoint."""
        return max(self.accuracy)

    def reaches(self, accuracy: float) -> int | None:
        """Return the updates of the first checkpoint that is at least this good, or None."""
        return next((u for u, a in zip(self.updates, self.accuracy) if a >= accuracy), None)


def demo(
    configs: Path, folder: Path, *, seed: int = 0, overrides: tuple[str, ...] = ()
) -> dict[str, DemoCurve]:
    """Run both methods with `seed`, write the pictures and the numbers into `folder`, and print what was seen."""
    began = time.perf_counter()
    curves = {}
    for method, name in METHODS.items():
        config = load_config(
            configs / name,
            [
                f"logging.folder={folder}",
                f"logging.write_tag={Path(name).stem}_seed{seed}",
                f"meta.seed={seed}",
                "checkpoint.every=60",  # ten points on a curve
                "checkpoint.keep=10",
                "logging.log_every=60",
                "evaluation.knn_every_epochs=null",
                *overrides,
            ],
        )
        say_line(f"\n=== {method}, seed {seed}")
        with join(config.meta.device) as place:
            train.train(config, place)
            curves[method] = evaluate_checkpoints(config, place)
    say_line("")
    for line in table(curves):
        say_line(line)
    say_line("\n" + verdict(curves))
    picture = draw(curves, folder / f"demo_seed{seed}.png")
    numbers = {name: asdict(curve) for name, curve in curves.items()}
    atomic_files.replace(picture.with_suffix(".json"), json.dumps(numbers, indent=1).encode() + b"\n")
    say_line(f"\ncurves   {picture}, with its numbers in {picture.stem}.json")
    say_line(f"views    {preview(config, folder / 'views.png')}")
    say_line(f"took     {time.perf_counter() - began:.0f} s")
    return curves


def evaluate_checkpoints(config: Config, place: Place) -> DemoCurve:
    """Fit a linear classifier to the labeled images on every checkpoint of a run; count on the test images."""
    images = open_images(config, place, validation=True)
    model = build(config, place, len(images.train.classes))[0]
    updates, petaflops, accuracy = [], [], []
    for path in sorted((config.run_folder / "checkpoints").glob("step_*")):
        loaded = manager.load(path)
        model.load_state_dict(loaded.model)
        measured = linear(model.encoder, images, config, place)
        if "converged" in measured.setting:
            say_line(f"{path.name}: {measured.notes[0]}")
        updates.append(loaded.step)
        petaflops.append(loaded.meta["ledger"]["petaflops"])
        accuracy.append(measured.metrics["top1"])
    return DemoCurve(updates, petaflops, accuracy)


def table(curves: dict[str, DemoCurve]) -> list[str]:
    """Return a line for each checkpoint: its cost, and the accuracy of both methods."""
    names = list(curves)
    lines = [f"{'updates':>8}{'gigaFLOPs':>12}" + "".join(f"{name:>18}" for name in names)]
    for row, updates in enumerate(curves[names[0]].updates):
        cells = "".join(f"{100 * curves[name].accuracy[row]:>17.1f}%" for name in names)
        lines.append(f"{updates:>8}{1e6 * curves[names[0]].petaflops[row]:>12.1f}{cells}")
    return lines


def verdict(curves: dict[str, DemoCurve]) -> str:
    """Return what this run showed, in sentences that follow from its numbers, and that it is only one seed."""
    baseline, ours = curves["SimCLR"], curves["SimCLR + SuNCEt"]
    final = 100 * (ours.accuracy[-1] - baseline.accuracy[-1])
    difference = f"{abs(final):.1f} points {'more' if final > 0 else 'less'}."
    sentences = [
        f"After the same compute a linear classifier on 10 % of the labels is right on {100 * ours.accuracy[-1]:.1f} % "
        f"of the test digits with SuNCEt and on {100 * baseline.accuracy[-1]:.1f} % without: "
        + ("no difference." if abs(final) < 0.05 else difference)
    ]
    reached = ours.reaches(baseline.best)
    if reached is None:
        sentences.append(f"SuNCEt never reached SimCLR's best ({100 * baseline.best:.1f} %) in this run.")
    else:
        sentences.append(
            f"It had reached SimCLR's best ({100 * baseline.best:.1f} %) after {reached} of {baseline.updates[-1]} "
            f"updates, {reached / baseline.updates[-1]:.0%} of the compute."
        )
    sentences.append(
        "This is one seed on 355 test digits, where a point is 3 or 4 of them: see RESULTS.md for three seeds."
    )
    return "\n".join(sentences)


def draw(curves: dict[str, DemoCurve], path: Path) -> Path:
    """Draw accuracy against gigaFLOPs as a PNG, with the baseline's best as a line; return `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        color, marker = STYLES[name]
        gigaflops, percent = [1e6 * p for p in curve.petaflops], [100 * a for a in curve.accuracy]
        axes.plot(gigaflops, percent, color=color, marker=marker, label=name)
    best = 100 * curves["SimCLR"].best
    axes.axhline(best, color="0.5", linewidth=0.9, linestyle="--", label=f"SimCLR's best, {best:.1f}")
    axes.set_xlabel("pre-training compute, gigaFLOPs (6 x MAC a view)")
    axes.set_ylabel("test accuracy of a linear classifier\non 10 % of the labels, %")
    axes.set_title("Digits: the same compute, with and without labels in pre-training", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    return path
