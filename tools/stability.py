"""Print which learning rates fine-tuning's new classifier is stable at, and the losses of the first updates.

    python tools/stability.py RUN/config.yaml [--encoder PATH] [--step N] [--rates 0.05 0.005] [section.key=value ...]

The classifier begins at zero. There the Hessian of the mean cross-entropy is (I/C - 1/C^2) x E[h h^T], so its largest
curvature is the largest eigenvalue of the features' second moment over C. A quadratic of curvature k is stable under
SGD with Nesterov momentum m at learning rates below 2 (1 + m) / ((1 + 2 m) k).
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fastsuncet.config import load_config
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.launch import Place
from fastsuncet.evaluation.encoder import choose, load_encoder
from fastsuncet.evaluation.finetuning import fit_settings
from fastsuncet.evaluation.scoring import labeled
from fastsuncet.evaluation.supervised.fine_tuning import FineTuning
from fastsuncet.metrics.interval import DataTimer
from fastsuncet.training.determinism import resolve_precision


def largest_eigenvalue(features: Tensor) -> float:
    """Return that of the second moment of features (N, E)."""
    h = features.double()
    return torch.linalg.eigvalsh(h.T @ h / len(h))[-1].item()


def stable_rate(eigenvalue: float, classes: int, momentum: float) -> float:
    """Return the learning rate above which a zero classifier's loss grows at first, under Nesterov momentum."""
    return 2 * (1 + momentum) / (1 + 2 * momentum) * classes / eigenvalue


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--encoder", type=Path)
    parser.add_argument("--step", type=int)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.005])
    parser.add_argument("--updates", type=int, default=6)
    arguments, overrides = parser.parse_known_args()
    place = Place(0, 1, 0, torch.device("cpu"))
    config, _ = resolve_precision(load_config(arguments.config, overrides), place.device)
    (path,) = choose(arguments.encoder or config.run_folder, step=arguments.step)
    images = open_images(config, place, validation=True)
    settings, timer = fit_settings(config, images, place), DataTimer(place.device)
    for rate in arguments.rates:
        train = (images.train, labeled(images), replace(settings, lr=rate))
        encoder = load_encoder(path, config)
        task = FineTuning(encoder, *train, place, config.run_folder, config, {})
        try:
            if rate == arguments.rates[0]:
                batches = [images for step in range(4) for images, _ in task.batch(step, timer)]
                with torch.no_grad():
                    top = largest_eigenvalue(torch.cat([encoder.module(batch) for batch in batches]))
                limit = stable_rate(top, settings.num_classes, settings.momentum)
                print(f"encoder  {path}\nlargest eigenvalue of the features' second moment  {top:.1f}")
                print(f"stable learning rates of a zero classifier  below {limit:.4f}")
            losses = [
                task.train_step(task.batch(step, timer), task.lr(step))[0].item()
                for step in range(arguments.updates)
            ]
        finally:
            task.stream.close()
        print(f"losses at {rate:g}  {' '.join(f'{loss:.2f}' for loss in losses)}", flush=True)


if __name__ == "__main__":
    main()
