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
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `tools` can be imported

from matplotlib import rc_context
from matplotlib.figure import Figure

from fastsuncet.commands.report import markdown
from fastsuncet.commands.report.compute_saved import bound, cell, percent
from fastsuncet.commands.report.figures import DPI, STYLE, draw_groups, write
from pipelines.output import counted
from tools import points
from tools.points import ALONE, BASELINE, CROSS_ENTROPY, HELD_OUT_SEED, METHOD, NAMES, UNTRAINED, Studies

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
    (BASELINE, UNTRAINED),
    *((name, control) for name in WITH_LABELS for control in ALONE.values()),
)
FEW_LABELS, PHOTOS = "cifar10-few-labels", "clothing-photos"
TITLES = {  # of the figures
    "cifar10-16px": "CIFAR-10 at 16 pixels, 10 % of the labels",
    "cifar10-plateau": "CIFAR-10 at 16 pixels, 10 % of the labels",
    "cifar10-32px": "CIFAR-10 at 32 pixels, 2 % of the labels",
    FEW_LABELS: "CIFAR-10 at 16 pixels, 100 and 500 labels",
}
# Experiment -> the evaluations and seeds that decide, as its rules.md says.
DECIDED = {
    "cifar10-16px": {"linear": range(5)},
    "cifar10-32px": {"finetune": range(3), "linear": range(3), "finetune_lr0.005": range(1, 4)},
}
NOT_REACHED = 1.5  # counts for r where a seed never has SimCLR's best accuracy
RULES = {
    "final": "SimCLR's final accuracy, in % of its whole cost",
    "best": "SimCLR's best accuracy, in % of its own cost of that",
}
UNTIL = [f"FLOPs until {words}" for words in RULES.values()]
DIFFERENCE = "paired difference, points (95 %)"


# ------------------------------------------------------------------------------------------------------------ cells
def table(head: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Return a Markdown table without the rows that have nothing behind their first `names` cells."""
    return "\n".join(markdown(head, [row for row in rows if any(row[names:])]))


def accuracy(shares: Mapping[Any, float]) -> str:
    """Return the mean of some seeds' accuracies in %, with their range; "" of none."""
    return percent([*shares.values()], 2, unit="") if shares else ""


def with_seeds(shares: Mapping[Any, float]) -> str:
    """Return the accuracies of some seeds in words, with their number; "" of none."""
    return f"{accuracy(shares)}, {counted(len(shares), 'seed')}" if shares else ""


def plus_minus(differences: Sequence[float], digits: int = 2) -> str:
    """Return the mean of differences in points and the half width of its 95 % interval."""
    low, high = points.interval(differences)
    return f"{mean(differences):+.{digits}f} ± {(high - low) / 2:.{digits}f}"


def gain(base: Mapping[Any, float], ours: Mapping[Any, float]) -> str:
    """Return a paired difference in points in words; "" without two seeds that both have."""
    found = points.paired(base, ours)
    return plus_minus(found) if len(found) > 1 else ""


def costs_table(costs: Mapping[str, tuple[points.Study, str]]) -> str:
    """Return the table of the FLOPs until the baseline's accuracy by each rule of RULES: row -> study and method."""
    rows = []
    for what, (study, name) in costs.items():
        rows.append([what, *(cell(study.saved(name, rule), 0, first_checkpoint=False) for rule in RULES)])
    return table(["FLOPs until a method has", *RULES.values()], rows)


# ----------------------------------------------------------------------------------------------- SimCLR and labels
def show(path: Path) -> list[str]:
    """Return the tables of a points.csv beside rules.md as Markdown."""
    held_out, measured = (points.read(path, seeds) for seeds in ([HELD_OUT_SEED], range(HELD_OUT_SEED)))
    if path.parent.name == FEW_LABELS:
        return show_few_labels(held_out, measured)
    if path.parent.name == PHOTOS:
        return show_photos(held_out["300"], measured)
    if points.PLATEAU in measured[""]["linear"].groups:
        return show_plateau(measured[""]["linear"])
    tables = show_paired(measured[""], DECIDED[path.parent.name])
    return tables + (show_unlabeled(held_out[""], measured[""]) if held_out else [])


def show_paired(measured: Studies, decided: Mapping[str, range]) -> list[str]:
    """Return the tables of SimCLR against methods with labels: by updates, the last checkpoint, compute saved.

    Compute saved is shown for an evaluation that tells SimCLR from an untrained encoder: elsewhere that one reaches
    SimCLR's accuracy.
    """
    order = dict.fromkeys((*decided, *EVALUATIONS))
    found = Studies({kind: measured[kind] for kind in order if kind in measured})
    tables, costs = [], {}
    for kind, study in found.items():
        title, checkpoints = EVALUATIONS[kind], study.groups[BASELINE].common("top1")
        methods = [name for name in (METHOD, CROSS_ENTROPY) if name in study.groups]
        if len(checkpoints) > 1:
            trained = [BASELINE, *methods]
            wide = [DIFFERENCE if len(methods) == 1 else f"{name}: {DIFFERENCE}" for name in methods]
            rows = []
            for c in checkpoints:
                base, *ours = (study.shares(name, c.step) for name in trained)
                gains = [gain(base, each) for each in ours]
                rows.append(
                    [str(c.step), f"{c.costs['petaflops']:.5f}", *map(accuracy, (base, *ours)), *gains]
                )
            tables.append(table(["updates", "petaFLOPs", *(f"{name}, %" for name in trained), *wide], rows))
            control = points.paired(study.shares(UNTRAINED), study.shares(BASELINE))
            if not control or points.interval(control)[0] > 0:
                costs |= {f"{name}, {title}": (study, name) for name in methods}
        if kind in decided:
            seeds, step = decided[kind], checkpoints[-1].step
            less = points.paired(*(study.shares(name, step, seeds) for name in (BASELINE, METHOD)))
            word = f"Decision by the rule: **{points.decision(*points.interval(less))}**"
            shown = f"{plus_minus(less)} points, seeds {seeds[0]} to {seeds[-1]}"
            tables.append(f"{title[0].upper()}{title[1:]}. {word}, {shown}.")
    return [*tables, absolute(found), differences(found), costs_table(costs)]


def absolute(found: Studies, names: Collection[str] = NAMES.values()) -> str:
    """Return the table of the accuracy of each method's last checkpoint, and of all of the labels alone."""
    whole = next(iter(next(iter(found.values())).whole(BASELINE).values()))
    rows = []
    for name in names:
        steps: dict[int | None, float] = {None: 0.0}  # of the labels alone all, and their FLOPs
        if name in ALONE.values():
            curves = [curve for study in found.values() for curve in study.curves(name)]
            steps = {p.step: p.costs["petaflops"] for curve in curves for p in curve.points}
        for step in sorted(steps):
            said = f", {step:,} updates: {100 * steps[step] / whole:.0f} % of SimCLR's FLOPs" if step else ""
            rows.append([name + said, *(with_seeds(study.shares(name, step)) for study in found.values())])
    return table(["last checkpoint: top-1, %", *(EVALUATIONS[kind] for kind in found)], rows)


def differences(found: Studies, names: Collection[str] = NAMES.values()) -> str:
    """Return the table of the paired differences of PAIRS among `names`, of all seeds that both have."""
    rows = [
        [f"{ours}, less {base}", *(gain(study.shares(base), study.shares(ours)) for study in found.values())]
        for ours, base in PAIRS
        if {ours, base} <= {*names}
    ]
    return table([DIFFERENCE, *(EVALUATIONS[kind] for kind in found)], rows)


# ------------------------------------------------------------------------------- choices on held-out training images
def choices(held_out: Studies, kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return the accuracy on held-out images by each of `kinds`, in their order, of each method that has them all."""
    found = {
        name: {kind: held_out[kind].shares(name).get(HELD_OUT_SEED, 0.0) for kind in kinds}
        for name in NAMES.values()
    }
    return {name: each for name, each in found.items() if all(each.values())}


def top(each: Mapping[str, float]) -> str:
    """Return the evaluation with the highest accuracy, of several the first."""
    return max(each, key=each.__getitem__)


def show_unlabeled(held_out: Studies, found: Studies) -> list[str]:
    """Return what the unlabeled images add, each method fine-tuned at its best learning rate on held-out images.

    The rule is amendment 2 of docs/results/cifar10-32px/rules.md.
    """
    order = sorted(filter(points.rate_of, held_out), key=lambda kind: float(points.rate_of(kind)))
    rows, ends, lines = [], {}, []
    for name, each in choices(held_out, order).items():
        ends[name] = found[top(each)].shares(name, seeds=range(3))
        tried = (f"{100 * share:.2f}" for share in each.values())
        rows.append([name, *tried, points.rate_of(top(each)), with_seeds(ends[name])])
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


def helps(low: float, high: float, p: float = 0.0) -> str:
    """Apply the rule of the photos: that of the other experiments in other words, corrected by Holm's p."""
    word = points.decision(low, high)
    words = {"supported": "helps", "refuted": "does not help", "undecided": "undecided"}
    word = words.get(word, "helps, by less than one point")
    return "undecided" if word.startswith("helps") and p >= 0.05 else word


def show_photos(held_out: Studies, measured: Mapping[str, Studies]) -> list[str]:
    """Return the choices on held-out photos, the accuracies, and each method less the labels alone: with decisions."""
    tried = choices(held_out, (*BY_FEATURES, *FROM_ZERO))
    best = {name: top(each) for name, each in tried.items()}
    base = max(ALONE.values(), key=lambda name: tried[name][best[name]])
    titles = [EVALUATIONS[kind] for kind in BY_FEATURES]
    rows = []
    for name, each in tried.items():
        chosen = EVALUATIONS.get(best[name]) or f"fine-tuned at lr {points.rate_of(best[name])}"
        rows.append([name, *(f"{100 * share:.2f}" for share in each.values()), chosen])
    heads = [*titles, *(f"from zero at lr {points.rate_of(kind)}" for kind in FROM_ZERO), "best"]
    tables = [table(["top-1, %, 341 held-out photos, 300 labels", *heads], rows)]
    gains, decided = [], {}
    for labels, found in ((labels, measured[labels]) for labels in ("300", "100")):
        rows = []
        for name, each in tried.items():
            kinds = (*BY_FEATURES, top({kind: each[kind] for kind in FROM_ZERO}))
            rows.append([name, *(with_seeds(found[kind].shares(name)) for kind in kinds)])
            if name not in ALONE.values():
                kinds = [(best[base], best[name]), *zip(BY_FEATURES, BY_FEATURES)]
                pairs = [(found[less].shares(base), found[more].shares(name)) for less, more in kinds]
                gains.append([f"{labels} labels: {name}", *(gain(*pair) for pair in pairs)])
                if name in (BASELINE, METHOD):
                    decided[gains[-1][0]] = points.paired(*pairs[0])
        heads = [*titles, "fine-tuned from zero, at the chosen lr"]
        tables.append(table([f"{labels} labels: top-1, %, 713 photos", *heads], rows))
    heads = ["each by its best on the held-out photos", *titles]
    tables.append(table([f"less {base}, points (95 %)", *heads], gains))
    rows = [
        [what, f"{p:.3f}", f"**{helps(*points.interval(decided[what]), p)}**"]
        for what, p in points.holm(decided).items()
    ]
    end = table(["pre-training on one's own photos", "p, Holm", "decision by the rule"], rows)
    return [*tables, *photo_variants(measured, base, best[base]), end]


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
            ends = [found[kind].shares(name) for kind in kinds]
            rows.append([f"{labels} labels: {name}", *map(with_seeds, ends)])
            for other in dict.fromkeys(each for each in others if each != name):
                # Each measure is compared with the same one, or with the best one of the labels alone.
                less = [found[best if other == base else kind].shares(other) for kind in kinds]
                rows.append([f"less {other}, points (95 %)", *map(gain, less, ends)])
        tables.append(table(["top-1, %, 713 photos", *(EVALUATIONS[kind] for kind in kinds)], rows))

    def by_draw(pairs: Sequence[tuple[str, str]], *labels: str) -> list[float]:
        """Return what the rules decide on: the first of each pair less the second, one mean of all for each draw."""
        found = [
            points.paired(measured[count][kind].shares(less), measured[count][kind].shares(name))
            for (name, less), count, kind in product(pairs, labels, BY_FEATURES)
        ]
        return [mean(draw) for draw in zip(*found)]

    larger = plus_minus(by_draw([(f"{name}, {head}", name) for name in twins[1:]], "300"))
    tables.append(f"The larger head, 300 labels, mean of three methods and two measures: {larger} points.")
    for name, other, rule in (
        *((theirs, name, points.decision_on_settings) for name in alike),
        *((name, base, None) for name in controls),
        (labeled, controls[1], None),
        *((labeled, other, helps) for other in (base, controls[0])),
    ):
        less = by_draw([(name, other)], "300", "100")
        word = f" By the rule: **{rule(*points.interval(less))}**." if rule else ""
        tables.append(f"{name}, less {other}: {plus_minus(less)} points.{word}")
    return tables


# --------------------------------------------------------------------------------------------------------- a plateau
def costs_until(study: points.Study, name: str) -> dict[int | None, tuple[float, bool]]:
    """Return, for each seed, the FLOPs until SimCLR's final accuracy as a share of SimCLR's, and whether it got there.

    A seed that did not counts with all its FLOPs (docs/results/cifar10-plateau/rules.md).
    """
    whole, base = study.whole(name), study.whole(BASELINE)
    return {
        s.seed: (s.shares[0] if s.shares else whole[s.seed] / base[s.seed], s.shares is not None)
        for s in study.saved(name, "final")
    }


def show_plateau(study: points.Study) -> list[str]:
    """Return the table of a plateau's experiment as Markdown, and the decision."""
    rows, costs = [], {name: costs_until(study, name) for name in study.groups if name != BASELINE}
    for name in (*ALONE.values(), BASELINE, points.FIXED, points.PLATEAU):
        spent = study.whole(name).values()
        flops = f"{mean(spent):.5f} ({min(spent):.5f} to {max(spent):.5f})"
        rows.append([name, str(study.end(name)), flops, accuracy(study.shares(name)), ""])
        if name != BASELINE:
            shares, there = zip(*costs[name].values())
            rows[-1][-1] = f"{percent(shares, 0)}; {sum(there)} of {len(there)} seeds reached it"
    ended = [costs[name] for name in (points.FIXED, points.PLATEAU)]
    less = points.paired(*({seed: share for seed, (share, _) in found.items()} for found in ended))
    most = all(2 * sum(there for _, there in found.values()) > len(found) for found in ended)
    base, ends, later = (study.shares(name) for name in (BASELINE, points.FIXED, points.PLATEAU))
    alone = study.shares(ALONE["alone_cross_entropy"])
    whole, part = (mean(study.whole(name).values()) for name in (BASELINE, points.FIXED))
    return [
        table(["method", "updates", "petaFLOPs", "top-1, %, last checkpoint", UNTIL[0]], rows),
        f"Fixed end against SimCLR, paired (95 %): accuracy {gain(base, ends)} points, "
        f"with {100 * part / whole:.0f} % of its FLOPs.",
        f"Plateau against fixed end, paired (95 %): FLOPs {plus_minus(less, 1)} points of SimCLR's, "
        f"accuracy {gain(ends, later)} points.",
        f"Less labels alone, cross-entropy, paired (95 %): fixed end {gain(alone, ends)} points, "
        f"plateau {gain(alone, later)} points.",
        f"Decision by the rule: **{points.decision_on_cost(*points.interval(less), most)}**.",
    ]


# ------------------------------------------------------------------------------------------------------ few labels
def show_few_labels(held_out: Mapping[str, Studies], measured: Mapping[str, Studies]) -> list[str]:
    """Return the tables from few labels to many: the gate, accuracies, and the four decisions corrected by Holm."""
    runs = {f"{labels} labels": measured[labels] for labels in ("100", "500")}
    trained, kinds = (BASELINE, METHOD, CROSS_ENTROPY), ("finetune", "linear_auto")
    tables, controls, added, costs = [gate(held_out)], [], [], {}
    for labels, found in runs.items():
        names = (UNTRAINED, *trained)
        tables += [f"{labels}:\n\n{absolute(found, names)}", differences(found, names)]
        for name in ALONE.values():
            tops = (
                points.best(found, name, each) for each in (points.ALL_KINDS, *([kind] for kind in kinds))
            )
            controls.append([labels, name, *map(with_seeds, tops)])
        either, other = (points.best(found, name) for name in ALONE.values())
        alone = {seed: max(share, other[seed]) for seed, share in either.items()}
        added.append([labels, *(gain(alone, points.best(found, name, kinds)) for name in trained)])
        for kind, name in product(kinds, trained[1:]):
            costs[f"{labels}: {name}, {EVALUATIONS[kind]}"] = found[kind], name
    heads = (f"{EVALUATIONS[kind]}, %" for kind in kinds)
    tables.append(table(["", "best checkpoint and evaluation", "top-1, %", *heads], controls))
    tables.append(table(["less the better of the labels alone, points", *trained], added))
    return [*tables, costs_table(costs), *(few_labels_decisions(runs, kind) for kind in kinds)]


def gate(held_out: Mapping[str, Studies]) -> str:
    """Return the table of what the unlabeled images add at each number of labels, with the gate's one seed."""
    rows, names = [], (BASELINE, *ALONE.values())
    for labels, found in sorted(held_out.items(), key=lambda item: int(item[0])):
        for name in names:
            cells = (accuracy(points.best(found, name, [kind])) for kind in points.ALL_KINDS)
            rows.append([labels, name, *cells, ""])
        ours, *alone = (points.best(found, name) for name in names)
        rows[-1][-1] = f"{min(points.paired(each, ours)[0] for each in alone):+.2f}"
    head = ["labels", "best checkpoint", *(f"{EVALUATIONS[kind]}, %" for kind in points.ALL_KINDS)]
    return table([*head, "the unlabeled images add, points"], rows, names=2)


def few_labels_decisions(runs: Mapping[str, Studies], kind: str) -> str:
    """Return the table of compute saved and of SuNCEt less cross-entropy by one evaluation; the fine-tuned decide."""
    values, bounds, rows = {}, {}, []
    for labels, found in runs.items():
        # FLOPs until SimCLR's best accuracy over SimCLR's own FLOPs for it
        saved, what = found[kind].saved(METHOD, "best"), f"{labels}: compute needed, r"
        values[what] = [log(s.shares[0] if s.shares else NOT_REACHED) for s in saved]
        bounds[what] = bound(saved)
        ends = (found[kind].shares(name) for name in (CROSS_ENTROPY, METHOD))
        values[f"{labels}: SuNCEt less cross-entropy"] = points.paired(*ends)
    for what, p in points.holm(values).items():
        low, high = points.interval(values[what])
        shown, said = f"{plus_minus(values[what])} points", points.decision_on_losses(low, high)
        if what.endswith(", r"):
            center, low, high = map(exp, (mean(values[what]), low, high))
            shown = f"{bounds[what]}{center:.2f} ({low:.2f} to {high:.2f})"
            said = points.decision_on_ratio(low, high)
        said = "undecided" if said.startswith(("confirmed", "better")) and p >= 0.05 else said
        rows.append([what, shown, *([f"{p:.3f}", f"**{said}**"] if kind == "finetune" else [])])
    heads = ["p, Holm", "decision by the rule"] if kind == "finetune" else []
    return table([EVALUATIONS[kind], "mean (95 %)", *heads], rows)


# ---------------------------------------------------------------------------------------------------- other tables
def show_demo(folder: Path) -> list[str]:
    """Return the tables of what `fastsuncet demo` wrote: README's, of all checkpoints, of each seed."""
    found = []
    for path in sorted(folder.glob("demo_seed*.json")):
        for method, run in json.loads(path.read_text(encoding="utf-8")).items():
            start = ("", method, path.stem.removeprefix("demo_seed"), "linear")
            rows = zip(run["updates"], run["petaflops"], run["accuracy"])
            found += [(*start, step, cost, 100 * top1) for step, cost, top1 in rows]
    study = points.studies(found)[""]["linear"]
    names = (ALONE["alone_cross_entropy"], BASELINE, METHOD)
    checkpoints = [*zip(*(study.groups[name].common("top1") for name in names))]
    readme = [
        [name, f"{1e6 * p.costs['petaflops']:.0f}", percent(p.metrics["top1"])]
        for name, p in zip(names, checkpoints[-1])
    ]
    rows, seeds = [], []
    for ends in checkpoints:
        means = (percent(p.metrics["top1"], unit="") for p in ends)
        rows.append([f"{ends[-1].step}", f"{1e6 * ends[-1].costs['petaflops']:.1f}", *means])
    for seed in study.shares(BASELINE):
        last = [f"{100 * study.shares(name)[seed]:.1f}" for name in names]
        own = [s for rule in RULES for s in study.saved(METHOD, rule) if s.seed == seed]
        seeds.append([str(seed), *last, *(percent([s.shares[1]], 0) if s.shares else "never" for s in own)])
    head = [f"after {rows[-1][0]} updates", "gigaFLOPs"]
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
        tops[tuple(key)][draw] = float(top1) / 100
    first, *others = dict.fromkeys(arm for *_, arm in tops)
    rows = []
    for images, labels in dict.fromkeys(key[:2] for key in tops):
        base = tops[images, labels, first]
        rows.append([images, labels, f"{100 * mean(base.values()):.2f}"])
        for arm in others:
            less = points.paired(base, tops[images, labels, arm])
            low, high = points.interval(less)
            word = "better" if low > 0 else "worse" if high < 0 else "undecided"
            rows[-1].append(f"{plus_minus(less)}, {word}")
    return [table(("images", "labels", f"{first}, %", *(f"{arm}, less {first}" for arm in others)), rows)]


def show_strengths(path: Path) -> list[str]:
    """Return the table of two choices of the linear classifier's strength, and the decision of its rules."""
    columns = ("features", "labels", "most_right_top1", "new_top1")
    rows: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    gains: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for features, labels, old, new in points.rows_of(path, columns):
        images = "CIFAR-10" if features.startswith("cifar10") else "photos"
        rows[images, labels].append((float(old), float(new)))
        about = "30 or 32" if labels in ("30", "32") else labels
        for part in ("all", images, f"{about} labels"):
            gains[part][features].append(float(new) - float(old))
    shown = [
        [*key, *(f"{mean(each):.2f}" for each in zip(*found)), f"{len(found)}"] for key, found in rows.items()
    ]
    means = {part: [mean(each) for each in found.values()] for part, found in gains.items()}
    less = means.pop("all")
    chosen = "new" if points.interval(less)[0] > 0 else "old"
    parts = (f"{part} {plus_minus(each)} ({len(each)} encoders)" for part, each in means.items())
    return [
        table(["images", "labels", "most often right, top-1, %", "best probabilities", "choices"], shown),
        f"{len(less)} encoders: {plus_minus(less)} points. By the rule: **{chosen}**.",
        f"Of these, without a rule: {', '.join(parts)}.",
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
        figure.suptitle(TITLES[path.parent.name])
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, (heading, study) in zip(grid.flat, shown.items(), strict=True):
            apart = (UNTRAINED, *ALONE.values())
            groups = [group for name, group in study.groups.items() if name not in apart]
            draw_groups(axes, study.groups[BASELINE], groups, "top1", "petaflops")
            for name, dashes in zip(ALONE.values(), ("--", ":")):
                if name in study.groups:
                    top = 100 * mean(points.best(Studies(here=study), name, ["here"]).values())
                    axes.axhline(top, color="0.4", linestyle=dashes, label=f"{name}, best checkpoint")
            axes.set(title=heading, ylabel="test accuracy, %")
            axes.set_xlabel(f"pre-training {axes.get_xlabel()} (6 x MAC a view)")
        write(figure, picture.with_suffix(""), [picture.suffix.removeprefix(".")])


SHOWN = {"show": show, "runs": show_runs, "arms": show_arms, "strengths": show_strengths, "demo": show_demo}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("collect", *SHOWN))
    parser.add_argument(
        "paths", type=Path, nargs="+", help="a file, or what `fastsuncet demo` wrote; run folders"
    )
    parser.add_argument("--output", type=Path, help="of collect")
    parser.add_argument("--figure", type=Path, help="of show")
    options = parser.parse_args()
    if options.command == "collect":
        points.collect(options.paths, options.output or parser.error("collect needs --output"))
        return
    print("\n\n".join(text for path in options.paths for text in SHOWN[options.command](path)))
    if options.figure:
        draw(options.paths[0], options.figure)


if __name__ == "__main__":
    main()
