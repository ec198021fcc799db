"""`fastsuncet demo`: the paper's claim in small, on real images, in minutes, without a GPU or a download.

Trains SimCLR and SimCLR + SuNCEt on scikit-learn's digits with 10 % of the labels, on the same compute to the last
view, probes checkpoints of both with a linear classifier on those labels, and draws accuracy against compute.
"""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from fastsuncet.checkpoint import atomic_files, manager
from fastsuncet.commands import train as run
from fastsuncet.commands.preview import preview
from fastsuncet.config import Config, load_config
from fastsuncet.console import say_line
from fastsuncet.data.dataset import Images, open_images
from fastsuncet.distributed.launch import Place, join
from fastsuncet.evaluation.features import embed
from fastsuncet.evaluation.probe import linear_probe
from fastsuncet.training.step import build

METHODS = {"SimCLR": "digits_simclr.yaml", "SimCLR + SuNCEt": "digits_demo.yaml"}
COLORS = {
    "SimCLR": "#0072b2",
    "SimCLR + SuNCEt": "#d55e00",
}  # told apart by the colour-blind, and in grey by marker
MARKERS = {"SimCLR": "o", "SimCLR + SuNCEt": "s"}


@dataclass(frozen=True)
class Curve:
    """Accuracy of one run's checkpoints against what each had cost."""

    updates: list[int]
    petaflops: list[float]
    accuracy: list[float]  # of the linear probe, 0 to 1

    @property
    def best(self) -> float:
        """The highest accuracy of any checkpoint."""
        return max(self.accuracy)

    def reaches(self, accuracy: float) -> int | None:
        """Updates at the first checkpoint that is at least this good, or None."""
        return next((u for u, a in zip(self.updates, self.accuracy) if a >= accuracy), None)


def demo(configs: Path, folder: Path, *, seed: int = 0, overrides: tuple[str, ...] = ()) -> dict[str, Curve]:
    """Runs both methods with `seed`, writes pictures and demo.md into `folder`, and says what was seen."""
    began = time.perf_counter()
    curves = {}
    for method, name in METHODS.items():
        config = load_config(
            configs / name,
            [
                f"logging.folder={folder}",
                f"logging.write_tag={Path(name).stem}_seed{seed}",
                f"meta.seed={seed}",
                "checkpoint.every=60",  # ten points a curve, all kept
                "checkpoint.keep=10",
                "logging.log_every=60",
                "evaluation.knn_every_epochs=null",
                *overrides,
            ],
        )
        say_line(f"\n=== {method}, seed {seed}")
        with join(config.meta.device) as place:
            run.train(config, place)
            curves[method] = probe_checkpoints(config, place)
    say_line("")
    for line in table(curves):
        say_line(line)
    say_line("\n" + verdict(curves))
    picture = draw(curves, folder / f"demo_seed{seed}.png")
    numbers = {name: asdict(curve) for name, curve in curves.items()}
    atomic_files.replace(picture.with_suffix(".json"), json.dumps(numbers, indent=1).encode() + b"\n")
    say_line(f"\ncurves   {picture}, numbers beside it in {picture.stem}.json")
    say_line(f"views    {preview(config, folder / 'views.png')}")
    say_line(f"took     {time.perf_counter() - began:.0f} s")
    return curves


def probe_checkpoints(config: Config, place: Place) -> Curve:
    """Fits a linear classifier to the labeled images on every checkpoint of a run; accuracy on the test images."""
    images = open_images(config, place, validation=True)
    model, _, _, _ = build(config, place, len(images.train.classes))
    updates, petaflops, accuracy = [], [], []
    for path in sorted((config.run_folder / "checkpoints").glob("step_*")):
        loaded = manager.load(path)
        model.load_state_dict(loaded.model)
        accuracy.append(probe(model, images, config, place))
        updates.append(loaded.step)
        petaflops.append(loaded.meta["ledger"]["petaflops"])
    return Curve(updates, petaflops, accuracy)


def probe(model: torch.nn.Module, images: Images, config: Config, place: Place) -> float:
    """Accuracy of a linear classifier, fitted to the labeled images of the split, on the validation images."""
    labeled, everything = images.split.indices, np.arange(len(images.validation))
    return linear_probe(
        embed(model, images.train, labeled, config, place).cpu().numpy(),
        images.train.labels[labeled],
        embed(model, images.validation, everything, config, place).cpu().numpy(),
        images.validation.labels,
    )


def table(curves: dict[str, Curve]) -> list[str]:
    """Accuracy of both methods at every checkpoint, beside what it had cost."""
    names = list(curves)
    lines = [f"{'updates':>8}{'gigaFLOPs':>12}" + "".join(f"{name:>18}" for name in names)]
    for row, updates in enumerate(curves[names[0]].updates):
        cells = "".join(f"{100 * curves[name].accuracy[row]:>17.1f}%" for name in names)
        lines.append(f"{updates:>8}{1e6 * curves[names[0]].petaflops[row]:>12.1f}{cells}")
    return lines


def verdict(curves: dict[str, Curve]) -> str:
    """What this run showed, in words that follow from its numbers; one seed is one seed, and it says so."""
    baseline, ours = curves["SimCLR"], curves["SimCLR + SuNCEt"]
    final = 100 * (ours.accuracy[-1] - baseline.accuracy[-1])
    more = "more" if final > 0 else "less"
    sentences = [
        f"After the same compute a linear classifier on 10 % of the labels is right on {100 * ours.accuracy[-1]:.1f} % "
        f"of the test digits with SuNCEt and on {100 * baseline.accuracy[-1]:.1f} % without: "
        + ("no difference." if abs(final) < 0.05 else f"{abs(final):.1f} points {more}.")
    ]
    reached = ours.reaches(baseline.best)
    if reached is None:
        sentences.append(f"SuNCEt never reached SimCLR's best ({100 * baseline.best:.1f} %) in this run.")
    else:
        share = reached / baseline.updates[-1]
        sentences.append(
            f"It had reached SimCLR's best ({100 * baseline.best:.1f} %) after {reached} of {baseline.updates[-1]} "
            f"updates, {share:.0%} of the compute."
        )
    sentences.append(
        "This is one seed on 355 test digits, where a point is 3 or 4 of them: see RESULTS.md for three seeds."
    )
    return "\n".join(sentences)


def draw(curves: dict[str, Curve], path: Path) -> Path:
    """The curves as a PNG: accuracy against gigaFLOPs, the baseline's best as a line."""
    import matplotlib

    matplotlib.use("Agg")  # no display is needed, and none is looked for
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, curve in curves.items():
        spent = [1e6 * p for p in curve.petaflops]
        axes.plot(
            spent, [100 * a for a in curve.accuracy], color=COLORS[name], marker=MARKERS[name], label=name
        )
    best = 100 * curves["SimCLR"].best
    axes.axhline(best, color="0.5", linewidth=0.9, linestyle="--", label=f"SimCLR's best, {best:.1f}")
    axes.set_xlabel("pre-training compute, gigaFLOPs (6 x MAC a view)")
    axes.set_ylabel("test accuracy of a linear classifier\non 10 % of the labels, %")
    axes.set_title("Digits: the same compute, with and without labels in pre-training", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.92")
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
