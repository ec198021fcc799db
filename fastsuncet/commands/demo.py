"""`fastsuncet demo`: the paper's claim at small scale, on real images, in minutes, without a GPU or a download."""

import time
from pathlib import Path

from fastsuncet.checkpoint import manager
from fastsuncet.commands import train
from fastsuncet.commands.preview import preview
from fastsuncet.commands.ranks import as_rank
from fastsuncet.commands.report.compute_saved import target
from fastsuncet.commands.report.curves import Curve, Measurement, Point, arrange, labels_text
from fastsuncet.config import Config, load_config
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.shipped import shipped
from fastsuncet.data.dataset import open_images
from fastsuncet.distributed.place import Place
from fastsuncet.evaluation.protocols import linear
from fastsuncet.paths import steps_in
from fastsuncet.training import methods
from fastsuncet.training.step import build
from fastsuncet.versions import drawing_problem
from pipelines import atomic_files
from pipelines.output import say_line

CONFIGS = ("digits_alone", "digits_simclr", "digits_demo")  # labels alone, SimCLR, SimCLR + SuNCEt


def demo(folder: Path, *, seed: int = 0, overrides: tuple[str, ...] = ()) -> list[Curve]:
    """Run the three methods with `seed`, write the pictures and the numbers into `folder`, and print what was seen."""
    began = time.perf_counter()
    configs = [
        load_config(
            shipped()[name],
            [
                f"logging.folder={as_yaml(str(folder))}",
                f"logging.write_tag={name}_seed{seed}",
                f"meta.seed={seed}",
                "checkpoint.every=60",  # ten points on a curve
                "checkpoint.keep=10",
                "logging.log_every=60",
                "evaluation.knn_every_epochs=null",
                *overrides,
            ],
        )
        for name in CONFIGS
    ]
    # What is wrong with the last one is said before the first is trained.
    for config in configs:
        train.check_before_images(config)
        with as_rank(config) as place:
            config.resolve(place.world_size, *open_images(config, place, validation=True).counts())
    curves = []
    for config in configs:
        say_line(f"\n=== {methods.name(config)}, seed {seed}")
        with as_rank(config) as place:
            train.train(config, place)
            curves.append(evaluate_checkpoints(config, place))
    say_line("\n" + "\n".join(table(*curves)) + "\n\n" + verdict(*curves))
    numbers = {
        curve.method: {
            "updates": [p.step for p in curve.points],
            "petaflops": [p.costs["petaflops"] for p in curve.points],
            "accuracy": [p.metrics["top1"] for p in curve.points],
        }
        for curve in curves
    }
    path = folder / f"demo_seed{seed}.json"
    atomic_files.replace(path, atomic_files.as_json(numbers))
    say_line(f"\nnumbers  {path}")
    if problem := drawing_problem():
        say_line(problem)
    else:
        from fastsuncet.commands.report.figures import draw_panel

        picture, _ = draw_panel(arrange(curves)[0], "top1", folder, f"demo_seed{seed}")
        say_line(f"curves   {picture}")
        say_line(f"views    {preview(config, folder / 'views.png', force=True)}")
    say_line(f"took     {time.perf_counter() - began:.0f} s")
    return curves


def evaluate_checkpoints(config: Config, place: Place) -> Curve:
    """Fit a linear classifier to the labeled images on every checkpoint of a run; count on the test images."""
    images = open_images(config, place, validation=True)
    model = build(config, place, len(images.train.classes))[0]
    points = []
    for path in steps_in(config.run_folder).values():
        loaded = manager.load(path)
        model.load_state_dict(loaded.model)
        measured = linear(model.encoder, images, config, place)
        if "converged" in measured.setting:
            say_line(f"{path.name}: {measured.notes[-1]}")
        costs = {"petaflops": loaded.meta["ledger"]["petaflops"]}
        points.append(Point(loaded.step, costs, {"top1": measured.metrics["top1"]}))
    labels = labels_text({**dict(config.data.split), "count": len(images.split.indices)})
    what, name, seed = Measurement("linear", labels), methods.name(config), config.meta.seed
    return Curve(str(config.run_folder), name, seed, what, tuple(points), config.criterion.supervised)


def table(*curves: Curve) -> list[str]:
    """Return a line for each checkpoint: the accuracy of every method and what it cost."""
    lines = [f"{'updates':>8}" + "".join(f"  {curve.method:>28}" for curve in curves)]
    for points in zip(*(curve.points for curve in curves)):
        cells = (
            f"{100 * p.metrics['top1']:.1f}% {1e6 * p.costs['petaflops']:6.1f} gigaFLOPs" for p in points
        )
        lines.append(f"{points[0].step:>8}" + "".join(f"  {cell:>28}" for cell in cells))
    return lines


def verdict(alone: Curve, baseline: Curve, ours: Curve) -> str:
    """Return what this run showed, in sentences that follow from its numbers, and that it is only one seed."""
    labels, theirs, own = ([p.metrics["top1"] for p in curve.points] for curve in (alone, baseline, ours))
    difference = 100 * (own[-1] - theirs[-1])
    words = f"{abs(difference):.1f} points {'more' if difference > 0 else 'less'}"
    few, costs, spent = ([p.costs["petaflops"] for p in curve.points] for curve in (alone, baseline, ours))
    more = f"{spent[-1] / costs[-1]:.0%}"
    compute, whole = f"{more} of SimCLR's compute", "SuNCEt's compute"
    if more == "100%":
        compute, whole = "the same compute", "the compute"
    some = ours.measurement.labels.replace("% labels", "% of the labels")
    lines = [
        f"After {compute} a linear classifier on {some} is right on {100 * own[-1]:.1f} % of the test digits "
        f"with SuNCEt and on {100 * theirs[-1]:.1f} % without: "
        + ("no difference." if abs(difference) < 0.05 else f"{words}."),
        f"The labels alone have {100 * labels[-1]:.1f} % for {few[-1] / spent[-1]:.0%} of {whole}.",
    ]
    for rule in ("final", "best"):
        position, accuracy, cost = target(costs, theirs, rule)
        which = f"SimCLR's {rule} accuracy ({100 * accuracy:.1f} %, after {baseline.points[position].step} updates)"
        reached = next((p for p in ours.points if p.metrics["top1"] >= accuracy), None)
        lines.append(
            f"SuNCEt never reached {which} in this run."
            if reached is None
            else f"SuNCEt reached {which} after {reached.step} updates: "
            f"{reached.costs['petaflops'] / cost:.0%} of the compute."
        )
    lines.append(
        "This is one seed on 355 test digits, where a point is 3 or 4 of them: see RESULTS.md for three seeds."
    )
    return "\n".join(lines)
