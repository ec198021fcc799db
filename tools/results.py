"""Recompute the tables and figures of README.md and RESULTS.md from committed numbers.

    python tools/results.py collect RUN_FOLDER ... --output docs/results/NAME/points.csv   # from runs to points
    python tools/results.py show docs/results/NAME/points.csv [--figure FILE.png]          # from points to the tables
    python tools/results.py runs docs/results/NAME/accuracies.csv   # from single runs to their table
    python tools/results.py arms docs/results/suggestions/accuracies.csv   # from paired arms to theirs
    python tools/results.py strengths docs/results/linear-strength/accuracies.csv
    python tools/results.py demo docs/demo                      # from the files of `fastsuncet demo` to the tables

A run folder is named EXPERIMENT-METHOD-seedN. `collect` keeps the other points of its file, so that each run can be
collected when it ends. `make results` runs `show` for each experiment, and the rest; a test compares the output with
the pages.
"""

import argparse
import csv
import json
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tools` can be imported

from matplotlib import rc_context
from matplotlib.figure import Figure

from fastsuncet.commands.report import markdown
from fastsuncet.commands.report.compute_saved import cell, percent
from fastsuncet.commands.report.curves import Curve, Measurement, Point, Seeds
from fastsuncet.commands.report.figures import DPI, STYLE, draw_groups, write
from pipelines.output import counted
from tools import points
from tools.points import ALONE, BASELINE, CROSS_ENTROPY, HELD_OUT_SEED, METHOD, NAMES, Studies, Study

EVALUATIONS = {
    "finetune": f"fine-tuned at lr {points.PAPERS_LR}",
    "linear": "linear classifier, frozen encoder",
    "linear_auto": "linear classifier, strength chosen",
    "finetune_lr0.005": "fine-tuned at lr 0.005",
    "finetune_linear": "fine-tuned from the linear classifier",
    "own": "its own classifier",
}
WITH_LABELS = [points.METHODS[key] for key in ("suncet", "cross_entropy", "switched_off", "paws")]
PAIRS = (
    *((name, BASELINE) for name in WITH_LABELS),
    *((name, METHOD) for name in WITH_LABELS[1:]),
    (BASELINE, points.UNTRAINED),
    *((name, control) for name in WITH_LABELS for control in ALONE.values()),
)


class Experiment(NamedTuple):
    """What its rules.md says."""

    title: str
    labels: str  # how many
    decided: dict[str, range]  # evaluation -> the seeds that decide


FEW_LABELS, PHOTOS = "cifar10-few-labels", "clothing-photos"
EXPERIMENTS = {
    "cifar10-16px": Experiment("CIFAR-10 at 16 pixels", "10 % of the labels", {"linear": range(5)}),
    "cifar10-plateau": Experiment("CIFAR-10 at 16 pixels", "10 % of the labels", {}),
    "cifar10-32px": Experiment(
        "CIFAR-10 at 32 pixels",
        "2 % of the labels",
        {"finetune": range(3), "linear": range(3), "finetune_lr0.005": range(1, 4)},
    ),
    FEW_LABELS: Experiment("CIFAR-10 at 16 pixels", "100 and 500 labels", {}),
}
SEEDS = 5
NOT_REACHED = 1.5  # counts for r where a seed never has SimCLR's best accuracy
RULES = {
    "final": "SimCLR's final accuracy, in % of its whole cost",
    "best": "SimCLR's best accuracy, in % of its own cost of that",
}
UNTIL = [f"FLOPs until {words}" for words in RULES.values()]
DIFFERENCE = "paired difference, points (95 %)"


# ------------------------------------------------------------------------------------------------------------ cells
def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(markdown(head, rows))


def accuracy(shares: Mapping[Any, float]) -> str:
    """Return the mean of some seeds' accuracies in %, with their range; "" of none."""
    return percent([*shares.values()], 2, unit="") if shares else ""


def with_seeds(shares: Mapping[Any, float]) -> str:
    """Return the accuracies of some seeds in words, with their number; "" of none."""
    return f"{accuracy(shares)}, {counted(len(shares), 'seed')}" if shares else ""


def plus_minus(differences: Sequence[float]) -> str:
    """Return the mean of differences in points and the half width of its 95 % interval."""
    return "{:+.2f} ± {:.2f}".format(*points.interval(differences))


def gain(base: Mapping[Any, float], ours: Mapping[Any, float]) -> str:
    """Return a paired difference in points in words; "" without a seed that both have."""
    found = points.paired(base, ours)
    return plus_minus(found) if len(found) > 1 else "".join(f"{each:+.2f}, one seed" for each in found)


def saved_cells(study: Study, name: str) -> list[str]:
    """Return the FLOPs until the baseline's accuracy by each rule of RULES, in words."""
    return [cell(study.saved(name, rule), 0, first_checkpoint=False) for rule in RULES]


# ----------------------------------------------------------------------------------------------- SimCLR and labels
def show(path: Path) -> list[str]:
    """Return the tables of a points.csv beside rules.md as Markdown."""
    if path.parent.name == FEW_LABELS:
        return show_few_labels(path)
    if path.parent.name == PHOTOS:
        return show_photos(path)
    linear = points.read(path)[""]["linear"]
    return show_plateau(linear) if points.PLATEAU in linear.groups else show_paired(path)


def show_paired(path: Path) -> list[str]:
    """Return the tables of SimCLR against methods with labels: by updates, the last checkpoint, compute saved.

    Compute saved is shown for an evaluation that tells SimCLR from an untrained encoder: elsewhere that one reaches
    SimCLR's accuracy.
    """
    decided = EXPERIMENTS[path.parent.name].decided
    held_out, measured = (points.read(path, seeds)[""] for seeds in ([HELD_OUT_SEED], range(HELD_OUT_SEED)))
    order = dict.fromkeys((*decided, *EVALUATIONS))
    found = Studies({kind: measured[kind] for kind in order if kind in measured})
    tables, costs = [], []
    for kind, study in found.items():
        if BASELINE not in study.groups:
            continue
        title, checkpoints = EVALUATIONS[kind], study.groups[BASELINE].common("top1")
        methods = [name for name in (METHOD, CROSS_ENTROPY) if name in study.groups]
        if len(checkpoints) > 1:
            trained = [BASELINE, *methods]
            wide = [DIFFERENCE if len(methods) == 1 else f"{name}: {DIFFERENCE}" for name in methods]
            rows = []
            for c in checkpoints:
                base, *ours = (study.shares(name, c.step) for name in trained)
                means = [accuracy(each) for each in (base, *ours)]
                gains = [gain(base, each) for each in ours]
                rows.append([str(c.step), f"{c.costs['petaflops']:.5f}", *means, *gains])
            tables.append(table(["updates", "petaFLOPs", *(f"{name}, %" for name in trained), *wide], rows))
            control = points.paired(study.shares(points.UNTRAINED), study.shares(BASELINE))
            if not control or points.interval(control)[0] > points.interval(control)[1]:
                costs += [[f"{name}, {title}", *saved_cells(study, name)] for name in methods]
        if kind in decided:
            seeds, step = decided[kind], checkpoints[-1].step
            less = points.paired(*(study.shares(name, step, seeds) for name in (BASELINE, METHOD)))
            word = f"Decision by the rule: **{points.decision(*points.interval(less))}**"
            shown = f"{plus_minus(less)} points, seeds {seeds[0]} to {seeds[-1]}"
            tables.append(f"{title[0].upper()}{title[1:]}. {word}, {shown}.")
    return [
        *tables,
        absolute(found),
        differences(found),
        table(["FLOPs until a method has", *RULES.values()], costs),
        *(show_unlabeled(held_out, measured) if held_out else []),
    ]


def absolute(found: Studies, names: Sequence[str] = tuple(NAMES.values())) -> str:
    """Return the table of the accuracy of each method's last checkpoint, and of all of the labels alone."""
    whole = next(iter(next(iter(found.values())).whole(BASELINE).values()))
    rows = []
    for name in names:
        curves = [curve for study in found.values() for curve in study.curves(name)]
        steps: dict[int | None, float] = {None: 0.0} if curves else {}  # of the labels alone, and their FLOPs
        if name in ALONE.values():
            steps = {p.step: p.costs["petaflops"] for curve in curves for p in curve.points}
        for step, cost in sorted(steps.items(), key=lambda item: item[1]):
            said = f", {step:,} updates: {100 * cost / whole:.0f} % of SimCLR's FLOPs" if step else ""
            rows.append([name + said, *(with_seeds(study.shares(name, step)) for study in found.values())])
    return table(["last checkpoint: top-1, %", *(EVALUATIONS[kind] for kind in found)], rows)


def differences(found: Studies, names: Collection[str] = NAMES.values()) -> str:
    """Return the table of the paired differences of PAIRS among `names`, of all seeds that both have."""
    rows = []
    for ours, base in PAIRS:
        row = [gain(study.shares(base), study.shares(ours)) for study in found.values()]
        if any(row) and {ours, base} <= {*names}:
            rows.append([f"{ours}, less {base}", *row])
    return table([DIFFERENCE, *(EVALUATIONS[kind] for kind in found)], rows)


# ------------------------------------------------------------------------------- choices on held-out training images
def choices(held_out: Studies, kinds: Sequence[str]) -> dict[str, dict[str, points.Shares]]:
    """Return the accuracy of each method that has a run on held-out images, by those of `kinds` that it has."""
    found = {
        name: {kind: shares for kind in kinds if (shares := held_out[kind].shares(name))}
        for name in NAMES.values()
    }
    return {name: each for name, each in found.items() if each}


def top(each: Mapping[str, points.Shares]) -> str:
    """Return the evaluation with the highest accuracy on held-out images, of several the first."""
    return max(each, key=lambda kind: each[kind][HELD_OUT_SEED])


def show_unlabeled(held_out: Studies, found: Studies) -> list[str]:
    """Return what the unlabeled images add, each method fine-tuned at its best learning rate on held-out images.

    The rule is amendment 2 of docs/results/cifar10-32px/rules.md.
    """
    order = sorted(filter(points.rate_of, held_out), key=lambda kind: float(points.rate_of(kind)))
    rows, ends, lines = [], {}, []
    for name, each in choices(held_out, order).items():
        if len(each) == len(order):
            chosen = top(each)
            ends[name] = found[chosen].shares(name, seeds=range(3))
            rows.append([name, *map(accuracy, each.values()), points.rate_of(chosen), with_seeds(ends[name])])
    for ours in (METHOD, CROSS_ENTROPY):
        base = max(ALONE.values(), key=lambda name: mean(ends[name].values()))
        less = points.paired(ends[base], ends[ours])
        word = points.decision(*points.interval(less))
        said = {"refuted": "do not help", "undecided": "undecided"}.get(word, "help")
        lines.append(f"{ours}, less {base}: {plus_minus(less)} points. Unlabeled images: **{said}**.")
    head = ["fine-tuned, top-1, %, held-out images, at lr", *map(points.rate_of, order)]
    return [table([*head, "chosen", "test images, at the chosen lr"], rows), *lines]


# Evaluations of the photos; the others are fine-tunings from zero.
BY_FEATURES = ("linear_auto", "finetune_linear")
FROM_ZERO = ("finetune_lr0.005", "finetune_lr0.015", "finetune")
HELPS = {
    "supported": "helps",
    "supported, and smaller than one point": "helps, by less than one point",
    "refuted": "does not help",
    "undecided": "undecided",
}


def show_photos(path: Path) -> list[str]:
    """Return the choices on held-out photos, the accuracies, and each method less the labels alone: with decisions."""
    held_out, measured = points.read(path, [HELD_OUT_SEED])["300"], points.read(path, range(HELD_OUT_SEED))
    tried = choices(held_out, (*BY_FEATURES, *FROM_ZERO))
    best = {name: top(each) for name, each in tried.items()}
    base = max(ALONE.values(), key=lambda name: tried[name][best[name]][HELD_OUT_SEED])
    titles = [EVALUATIONS[kind] for kind in BY_FEATURES]

    said = {
        kind: EVALUATIONS.get(kind) or f"fine-tuned at lr {points.rate_of(kind)}" for kind in best.values()
    }
    rows = [[name, *map(accuracy, each.values()), said[best[name]]] for name, each in tried.items()]
    heads = [*titles, *(f"from zero at lr {points.rate_of(kind)}" for kind in FROM_ZERO), "best"]
    tables = [table(["top-1, %, 341 held-out photos, 300 labels", *heads], rows)]
    gains, decided = [], {}
    for labels in ("300", "100"):
        found, ends = measured[labels], []
        for name, each in tried.items():
            kinds = (*BY_FEATURES, top({kind: each[kind] for kind in FROM_ZERO}))
            ends.append([name, *(with_seeds(found[kind].shares(name)) for kind in kinds)])
            if name not in ALONE.values():
                kinds = [(best[base], best[name]), *zip(BY_FEATURES, BY_FEATURES)]
                pairs = [(found[less].shares(base), found[more].shares(name)) for less, more in kinds]
                gains.append([f"{labels} labels: {name}", *(gain(*pair) for pair in pairs)])
                if name in (BASELINE, METHOD):
                    decided[gains[-1][0]] = points.paired(*pairs[0])
        heads = [*titles, "fine-tuned from zero, at the chosen lr"]
        tables.append(table([f"{labels} labels: top-1, %, 713 photos", *heads], ends))
    heads = ["each by its best on the held-out photos", *titles]
    tables.append(table([f"less {base}, points (95 %)", *heads], gains))
    tables += photo_variants(measured, base, best[base])

    rows = []
    for what, each, p in points.by_holm(decided):
        word = points.decision(*points.interval(each))
        word = "undecided" if word.startswith("supported") and p >= 0.05 else word
        rows.append([what, f"{p:.3f}", f"**{HELPS[word]}**"])
    return [*tables, table(["pre-training on one's own photos", "p, Holm", "decision by the rule"], rows)]


def photo_variants(measured: Mapping[str, Studies], base: str, best: str) -> list[str]:
    """Return the tables of peers and variants of the methods, each with what it is compared with.

    `best`: the best evaluation of the labels alone, which are `base`.
    """
    kinds, tables = (*BY_FEATURES, "own"), []
    start, head, settings, output, longer = points.VARIANTS.values()
    theirs, alike = points.PEERS["lightly"], [f"{BASELINE}, {words}" for words in (settings, output)]
    twins, labeled = (base, BASELINE, METHOD, CROSS_ENTROPY), f"{METHOD}, {output}"
    controls = [f"{base}, {words}" for words in (longer, settings)]  # amendment 5 chose the first
    for group in (
        dict.fromkeys(points.PEERS.values(), (BASELINE, base)),
        {f"{name}, {start}": (name, base, f"{base}, {start}") for name in twins},
        {f"{name}, {head}": (name, base) for name in twins},
        {name: (before, theirs, base) for before, name in zip((BASELINE, *alike), alike)}
        | {labeled: (alike[-1], METHOD, base, *controls)},
        dict.fromkeys(controls, (base,)),
    ):
        rows = []
        for (name, others), labels in product(group.items(), ("300", "100")):
            found = measured[labels]
            if any(ends := [found[kind].shares(name) for kind in kinds]):
                rows.append([f"{labels} labels: {name}", *map(with_seeds, ends)])
                for other in dict.fromkeys(each for each in others if each != name):
                    # Each measure is compared with the same one, or with the best one of the labels alone.
                    less = [found[best if other == base else kind].shares(other) for kind in kinds]
                    cells = [*map(gain, less, ends)]
                    rows += [[f"less {other}, points (95 %)", *cells]] if any(cells) else []
        heads = ["top-1, %, 713 photos", *(EVALUATIONS[kind] for kind in kinds)]
        tables += [table(heads, rows)] if rows else []
    # What the rules decide on: one number of a draw.
    pairs = [(f"{name}, {head}", name) for name in (BASELINE, METHOD, CROSS_ENTROPY)]
    if larger := by_draw(measured, pairs, ["300"]):
        said = plus_minus(larger)
        tables.append(f"The larger head, 300 labels, mean of three methods and two measures: {said} points.")
    for name in alike:
        if behind := by_draw(measured, [(theirs, name)], ["300", "100"]):
            center, half = points.interval(behind)
            word = "the settings explain it" if center + half < 1.5 else "undecided"
            word = "the trainer is behind" if center > half else word
            tables.append(f"{theirs}, less {name}: {plus_minus(behind)} points. By the rule: **{word}**.")
    for name, other in (*((name, base) for name in controls), (labeled, controls[1])):
        if more := by_draw(measured, [(name, other)], ["300", "100"]):
            tables.append(f"{name}, less {other}: {plus_minus(more)} points.")
    for other in (base, controls[0]):
        if less := by_draw(measured, [(labeled, other)], ["300", "100"]):
            word = HELPS[points.decision(*points.interval(less))]
            tables.append(f"{labeled}, less {other}: {plus_minus(less)} points. By the rule: **{word}**.")
    return tables


def by_draw(
    measured: Mapping[str, Studies], pairs: Sequence[tuple[str, str]], labels: Sequence[str]
) -> list[float]:
    """Return the first method less the second in each draw, the mean by the linear classifier and fine-tuned from it.

    [] until all draws have ended.
    """
    found = [
        points.paired(measured[count][kind].shares(less), measured[count][kind].shares(name))
        for (name, less), count, kind in product(pairs, labels, BY_FEATURES)
    ]
    return [mean(draw) for draw in zip(*found)] if min(map(len, found)) == SEEDS else []


# --------------------------------------------------------------------------------------------------------- a plateau
def costs_until(study: Study, name: str) -> dict[int | None, tuple[float, bool]]:
    """Return, for each seed, the FLOPs until SimCLR's final accuracy as a share of SimCLR's, and whether it got there.

    A seed that did not counts with all its FLOPs (docs/results/cifar10-plateau/rules.md).
    """
    whole, base = study.whole(name), study.whole(BASELINE)
    return {
        s.seed: (s.shares[0] if s.shares else whole[s.seed] / base[s.seed], s.shares is not None)
        for s in study.saved(name, "final")
    }


def show_plateau(study: Study) -> list[str]:
    """Return the table of a plateau's experiment as Markdown, and the decision."""
    rows, costs = [], {name: costs_until(study, name) for name in study.groups if name != BASELINE}
    for name in (*ALONE.values(), BASELINE, points.FIXED, points.PLATEAU):
        if name not in study.groups:
            continue
        spent = study.whole(name).values()
        flops = f"{mean(spent):.5f} ({min(spent):.5f} to {max(spent):.5f})"
        rows.append([name, str(study.end(name)), flops, accuracy(study.shares(name)), ""])
        if name != BASELINE:
            shares, there = zip(*costs[name].values())
            rows[-1][-1] = f"{percent(shares, 0)}; {sum(there)} of {len(there)} seeds reached it"
    ended = [costs[name] for name in (points.FIXED, points.PLATEAU)]
    fixed, plateau = ({seed: share for seed, (share, _) in found.items()} for found in ended)
    center, half = points.interval(points.paired(fixed, plateau))
    most = all(2 * sum(there for _, there in found.values()) > len(found) for found in ended)
    base, ends, later = (study.shares(name) for name in (BASELINE, points.FIXED, points.PLATEAU))
    alone = study.shares(ALONE["alone_cross_entropy"])
    whole, part = (mean(study.whole(name).values()) for name in (BASELINE, points.FIXED))
    return [
        table(["method", "updates", "petaFLOPs", "top-1, %, last checkpoint", UNTIL[0]], rows),
        f"Fixed end against SimCLR, paired (95 %): accuracy {gain(base, ends)} points, "
        f"with {100 * part / whole:.0f} % of its FLOPs.",
        f"Plateau against fixed end, paired (95 %): FLOPs {center:+.1f} ± {half:.1f} points of SimCLR's, "
        f"accuracy {gain(ends, later)} points.",
        f"Less labels alone, cross-entropy, paired (95 %): fixed end {gain(alone, ends)} points, "
        f"plateau {gain(alone, later)} points.",
        f"Decision by the rule: **{points.decision_on_cost(center, half, most)}**.",
    ]


# ------------------------------------------------------------------------------------------------------ few labels
def show_few_labels(path: Path) -> list[str]:
    """Return the tables from few labels to many: the gate, accuracies, and the four decisions corrected by Holm."""
    gate, measured = show_gate(points.read(path, [HELD_OUT_SEED])), points.read(path, range(SEEDS))
    runs = {labels: measured[labels] for labels in ("100", "500")}
    trained, kinds = (BASELINE, METHOD, CROSS_ENTROPY), ("finetune", "linear_auto")
    heads = [f"{EVALUATIONS[kind]}, %" for kind in kinds]
    measures = (points.ALL_KINDS, *([kind] for kind in kinds))
    tables, controls, added, costs = [], [], [], []
    for labels, found in runs.items():
        names = (points.UNTRAINED, *trained)
        tables += [f"{labels} labels:\n\n{absolute(found, names)}", differences(found, names)]
        for name in ALONE.values():
            tops = [points.best(found, name, each) for each in measures]
            controls.append([f"{labels} labels", name, *map(with_seeds, tops)])
        either, other = (points.best(found, name) for name in ALONE.values())
        alone = {seed: max(share, other[seed]) for seed, share in either.items() if seed in other}
        gains = [gain(alone, points.best(found, name, kinds)) for name in trained]
        added += [[f"{labels} labels", *gains]] if any(gains) else []
        costs += [
            [f"{labels} labels: {name}, {EVALUATIONS[kind]}", *saved_cells(found[kind], name)]
            for kind, name in product(kinds, trained[1:])
            if found[kind].saved(name, "best")
        ]
    tables.append(table(["", "best checkpoint and evaluation", "top-1, %", *heads], controls))
    if added:
        tables.append(table(["less the better of the labels alone, points", *trained], added))
    tables.append(table(["FLOPs until a method has", *RULES.values()], costs))
    return [*gate, *tables, *(few_labels_decisions(runs, kind) for kind in kinds)]


def show_gate(every: Mapping[str, Studies]) -> list[str]:
    """Return the table of what the unlabeled images add at each number of labels, with the gate's one seed."""
    rows = []
    for labels, found in sorted(every.items(), key=lambda item: int(item[0])):
        for name in (BASELINE, *ALONE.values()):
            cells = [accuracy(points.best(found, name, [kind])) for kind in points.ALL_KINDS]
            rows += [[labels, name, *cells, ""]] if any(cells) else []
        top, *alone = (points.best(found, name) for name in (BASELINE, *ALONE.values()))
        if top and all(alone):
            rows[-1][-1] = f"{min(points.paired(each, top)[0] for each in alone):+.2f}"
    head = ["labels", "best checkpoint", *(f"{EVALUATIONS[kind]}, %" for kind in points.ALL_KINDS)]
    return [table([*head, "the unlabeled images add, points"], rows)] if rows else []


def few_labels_decisions(runs: Mapping[str, Studies], kind: str) -> str:
    """Return the table of compute saved and of SuNCEt less cross-entropy by one evaluation; the fine-tuned decide."""
    values, rows = {}, []
    for labels, found in runs.items():
        # FLOPs until SimCLR's best accuracy over SimCLR's own FLOPs for it
        ratios = [s.shares[0] if s.shares else NOT_REACHED for s in found[kind].saved(METHOD, "best")]
        values[f"{labels} labels: compute needed, r"] = [log(ratio) for ratio in ratios]
        ends = (found[kind].shares(name) for name in (CROSS_ENTROPY, METHOD))
        values[f"{labels} labels: SuNCEt less cross-entropy"] = points.paired(*ends)
    for what, each, p in points.by_holm(values):
        center, half = points.interval(each)
        low, high = center - half, center + half
        if what.endswith(", r"):
            low, high = exp(low), exp(high)
            shown, said = f"{exp(center):.2f} ({low:.2f} to {high:.2f})", points.decision_on_ratio(low, high)
        else:
            shown, said = f"{plus_minus(each)} points", points.decision_on_losses(low, high)
        if said.startswith(("confirmed", "better")) and p >= 0.05:
            said = "undecided"
        rows.append([what, shown, *([f"{p:.3f}", f"**{said}**"] if kind == "finetune" else [])])
    heads = ["p, Holm", "decision by the rule"] if kind == "finetune" else []
    return table([EVALUATIONS[kind], "mean (95 %)", *heads], rows)


# ---------------------------------------------------------------------------------------------------- other tables
def show_demo(folder: Path) -> list[str]:
    """Return the tables of what `fastsuncet demo` wrote: README's, of all checkpoints, of each seed."""
    curves = []
    for path in sorted(folder.glob("demo_seed*.json")):
        seed = int(path.stem.removeprefix("demo_seed"))
        for method, run in json.loads(path.read_text(encoding="utf-8")).items():
            rows = zip(run["updates"], run["petaflops"], run["accuracy"])
            found = tuple(Point(step, {"petaflops": cost}, {"top1": top1}) for step, cost, top1 in rows)
            curves.append(Curve("", method, seed, Measurement("linear", ""), found, method != BASELINE))
    study = points.studies(curves)[""]["linear"]
    names, rows, seeds = (ALONE["alone_cross_entropy"], BASELINE, METHOD), [], []
    ends: tuple[Seeds, ...] = ()
    for ends in zip(*(study.groups[name].common("top1") for name in names)):
        means = (percent(p.metrics["top1"], unit="") for p in ends)
        rows.append([f"{ends[-1].step}", f"{1e6 * ends[-1].costs['petaflops']:.1f}", *means])
    readme = [
        [name, f"{1e6 * p.costs['petaflops']:.0f}", percent(p.metrics["top1"])]
        for name, p in zip(names, ends)
    ]
    for seed in study.shares(BASELINE):
        last = [f"{100 * study.shares(name)[seed]:.1f}" for name in names]
        own = [s for rule in RULES for s in study.saved(METHOD, rule) if s.seed == seed]
        seeds.append([str(seed), *last, *(percent([s.shares[1]], 0) if s.shares else "never" for s in own)])
    head = [f"after {ends[-1].step} updates", "gigaFLOPs"]
    return [
        table([*head, "accuracy of a linear classifier on the labeled 10 %"], readme),
        table(["updates", "gigaFLOPs of the last two", *(f"{name}, %" for name in names)], rows),
        table(["seed", *(f"{name}, last" for name in names), *UNTIL], seeds),
    ]


def show_runs(path: Path) -> list[str]:
    """Return the table of a file of single runs as Markdown: its columns, as they are."""
    with path.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return [table([name.replace("_", " ") for name in head], rows)]


def show_arms(path: Path) -> list[str]:
    """Return the table of a file of paired arms: the first one's mean, what the others add, and the word for it."""
    tops: dict[tuple, dict[str, float]] = defaultdict(dict)
    for *key, draw, top1 in points.rows_of(path, ("images", "labels", "arm", "draw", "top1")):
        tops[tuple(key)][draw] = float(top1)
    first, *others = dict.fromkeys(arm for *_, arm in tops)
    rows = []
    for images, labels in dict.fromkeys(key[:2] for key in tops):
        base, cells = tops[images, labels, first], []
        for arm in others:
            less = [top1 - base[draw] for draw, top1 in tops[images, labels, arm].items()]
            center, half = points.interval(less)
            word = "better" if center - half > 0 else "worse" if center + half < 0 else "undecided"
            cells.append(f"{plus_minus(less)}, {word}")
        rows.append([images, labels, f"{mean(base.values()):.2f}", *cells])
    return [table(("images", "labels", f"{first}, %", *(f"{arm}, less {first}" for arm in others)), rows)]


def show_strengths(path: Path) -> list[str]:
    """Return the table of two choices of the linear classifier's strength, and the decision of its rules."""
    columns = ("features", "labels", "most_right_top1", "new_top1")
    rows: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    encoders: dict[str, list[float]] = defaultdict(list)
    for features, labels, old, new in points.rows_of(path, columns):
        images = "CIFAR-10" if features.startswith("cifar10") else "photos"
        rows[images, labels].append((float(old), float(new)))
        encoders[features].append(float(new) - float(old))
    shown = [
        [*key, *(f"{mean(each):.2f}" for each in zip(*found)), f"{len(found)}"] for key, found in rows.items()
    ]
    less = [mean(each) for each in encoders.values()]
    center, half = points.interval(less)
    return [
        table(["images", "labels", "most often right, top-1, %", "best probabilities", "choices"], shown),
        f"{len(less)} encoders: {plus_minus(less)} points. By the rule: **{'new' if center > half else 'old'}**.",
    ]


def draw(path: Path, picture: Path) -> None:
    """Draw accuracy against FLOPs as `fastsuncet report` does, and the labels alone at their best checkpoints.

    An evaluation of several checkpoints has a plot of its own, each number of labels a row of them; none, no figure.
    """
    every = points.read(path, range(HELD_OUT_SEED))
    shown = {
        f"{count} labels, {EVALUATIONS[kind]}" if count else EVALUATIONS[kind]: found[kind]
        for count, found in every.items()
        for kind in EVALUATIONS
        if BASELINE in found[kind].groups and len(found[kind].groups[BASELINE].common("top1")) > 1
    }
    if not shown:
        return
    rows, columns = len(every), len(shown) // len(every)
    with rc_context(STYLE):
        figure = Figure(figsize=(max(6, 4.5 * columns), 3.6 * rows + 0.9), dpi=DPI)
        figure.suptitle(", ".join(EXPERIMENTS[path.parent.name][:2]))
        for axes, (heading, study) in zip(figure.subplots(rows, columns, squeeze=False).flat, shown.items()):
            apart = (points.UNTRAINED, *ALONE.values())
            groups = [group for name, group in study.groups.items() if name not in apart]
            draw_groups(axes, study.groups[BASELINE], groups, "top1", "petaflops")
            for name, dashes in zip(ALONE.values(), ("--", ":")):
                if name in study.groups:
                    top = 100 * mean(points.best(Studies(here=study), name, ["here"]).values())
                    axes.axhline(top, color="0.4", linestyle=dashes, label=f"{name}, best checkpoint")
            axes.set(title=heading, ylabel="test accuracy, %")
            axes.set_xlabel(f"pre-training {axes.get_xlabel()} (6 x MAC a view)")
        write(figure, picture.with_suffix(""), [picture.suffix.removeprefix(".")])


PARTS = (show, show_runs, show_arms, show_strengths, show_demo)
SHOWN = {part.__name__.removeprefix("show_"): part for part in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("collect", help="write the points of run folders")
    one.add_argument("runs", type=Path, nargs="+")
    one.add_argument("--output", type=Path, required=True)
    for command, function in SHOWN.items():
        added = commands.add_parser(command, help=(function.__doc__ or "").splitlines()[0])
        added.add_argument("points", type=Path)
        if command == "show":
            added.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        points.collect(arguments.runs, arguments.output)
        return
    print("\n\n".join(SHOWN[arguments.command](arguments.points)))
    if arguments.command == "show" and arguments.figure:
        draw(arguments.points, arguments.figure)


if __name__ == "__main__":
    main()
