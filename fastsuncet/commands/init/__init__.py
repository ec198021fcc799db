"""`fastsuncet init`: look at a folder of images and at the machine, and write a config."""

import contextlib
import os
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np

from fastsuncet.checkpoint.run_folder import disk_errors, refuse_existing
from fastsuncet.commands.embed import check_output
from fastsuncet.commands.init import survey
from fastsuncet.commands.init.rules import Choice, Proposal, Survey, choose, labels_left
from fastsuncet.config import Config
from fastsuncet.config.reader import as_yaml, parse
from fastsuncet.data.image_files import kept_index
from fastsuncet.data.learned_labels import held_out_of
from fastsuncet.distributed.place import expected_ranks
from fastsuncet.errors import ConfigError
from fastsuncet.paths import typed_path
from pipelines import atomic_files
from pipelines.data_errors import DataError
from pipelines.datasets.index import load_index, save_index
from pipelines.output import counted, csv_table, duration, first_five, say_line


def init(folder: Path, labels: Path | None, hours: float, weights: str | None, output: Path) -> None:
    """Write a config for the images in `folder` to the new file `output`; print the plan and the next command.

    Nothing is written unless all of it is sound. The index of the images is kept for the runs. Raises ConfigError for
    an output that exists and for hours, weights or images that no config fits, DataError for images and labels that
    cannot be read.
    """
    check_output(output, (".yaml", ".yml"), None)
    text, config, plan, found, held_out = make(folder, labels, hours, weights, output)
    if held_out:
        refuse_existing(held_out_file(output), None)
    other = 0
    if found.index is not None:
        kept, known = kept_index(config), None
        with contextlib.suppress(DataError):  # damaged, or of shards that have changed: made anew
            known = load_index(kept)
        # An older index can know more: `fastsuncet data check` decodes the images.
        if known is not None:
            other = len(set(found.index.files).symmetric_difference(known.files))
        else:
            save_index(found.index, kept)
    with disk_errors(output, "--output"):
        atomic_files.make_folder(output.parent)
        if held_out:
            atomic_files.replace(held_out_file(output), csv_table([("file", "label"), *held_out.items()]))
        atomic_files.replace(output, text.encode())
    model, size = config.model, config.data.augmentation.size
    start = {"timm": "published weights", None: "from scratch"}.get(model.init, f"from {weights}")
    say_line(f"{'method':<9}{plan.method}, {model.name}, {start}, {size} pixels")
    say_line(f"{'length':<9}{plan.updates:,} updates, about {duration(3600 * plan.hours)} here")
    for note in plan.notes:
        say_line(f"{'note':<9}{note}")
    say_line(f"{'wrote':<9}{output}, {text.count(chr(10))} lines, with reasons")
    file = shlex.quote(str(output))
    if other:
        reason = f"{counted(other, 'image')} came or went since the kept index was made"
        say_line(f"{'next':<9}fastsuncet data check {file}  # {reason}")
    say_line(f"{'then' if other else 'next':<9}fastsuncet train {file}")
    if found.labels:
        skip = " --skip-bad" if found.bad else ""
        images = "FOLDER" if "pack" in found.data else shlex.quote(str(folder))  # predict reads no shards
        say_line(f"{'then':<9}fastsuncet predict {file} {images} --output predictions.csv --page{skip}")
    else:
        say_line(f"{'then':<9}fastsuncet suggest {file} --output next.csv --page  # which images to label")


def make(
    folder: Path, labels: Path | None, hours: float, weights: str | None, output: Path
) -> tuple[str, Config, Proposal, Survey, dict[str, str]]:
    """Return the config for the images in `folder`, as YAML with paths relative to `output` and as it is read.

    And what it is made of; last, file -> label of `held_out_file`, or {} where there is none.
    """
    if not 0 < hours < 100_000:
        raise ConfigError(f"--hours must be a number above 0 and below 100,000, not {hours:g}")
    found, index = survey.look(folder, labels)
    if (usable := found.images - found.bad) < 4:
        raise ConfigError(f"{usable} usable images are too few to learn from: at least 4 are needed")

    def relative(path: str | Path) -> str:
        return os.path.relpath(os.path.expanduser(path), output.parent or ".")

    start, why = survey.weights(weights)
    kept, held_out, not_judged = None, dict[str, str](), []
    if start is not None and start.init != "timm":
        if not found.validation:
            kept, held_out = held_out_of(typed_path(start.init), index, found.labels - labels_left(found))
        start = replace(start, init=relative(start.init))
    if held_out:
        counts = survey.label_counts(index, np.setdiff1d(index.good(), index.find([*held_out])))
        left = {"images": found.images - len(held_out), "labels": int(counts.sum())}
        left |= {"classes": int((counts > 0).sum()), "validation": relative(kept or held_out_file(output))}
        found = replace(found, **left)
        judged = {*held_out.values()}
        not_judged = [index.classes[i] for i in np.flatnonzero(counts) if index.classes[i] not in judged]
    if found.labels and found.classes < 2:
        which = "all labels that are not held out" if held_out else "all labels"
        raise ConfigError(
            f"{which} are of one class, so there is nothing to tell apart: label a second class, or use no labels"
        )
    machine = survey.machine()  # last: it takes seconds
    rate = machine.macs_per_second / 1e9
    speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"  # a busy machine has less than 1
    machine_line = f"{machine.count} x {machine.name}, {machine.memory / 1e9:.0f} GB"
    say_line(f"{'machine':<9}{machine_line}; {speed} GMAC a second in a timed step")

    data = {key: value if key in ("kind", "train") else relative(value) for key, value in found.data.items()}
    found = replace(found, data=data)
    plan = choose(found, machine, hours, start, why)
    if not_judged:
        note = f"no label of these classes is held out, so accuracies say nothing of them: {first_five(not_judged)}"
        plan = replace(plan, notes=(*plan.notes, note))
    text = written(plan, found, hours)
    return text, check(text, output, found, expected_ranks("auto")), plan, found, {} if kept else held_out


def held_out_file(output: Path) -> Path:
    """Return where labels stay that no held_out.csv of a run has as they are: beside the config."""
    return output.with_name(f"{output.stem}-held_out.csv")


def written(plan: Proposal, s: Survey, hours: float) -> str:
    """Return the config as YAML: sections in the order of their first key, every choice with its reason."""
    kind = {"csv": "labels in a file", "images": "no labels", "image_folder": "folders are classes"}
    first = [Choice(f"data.{k}", value, kind[value] if k == "kind" else "") for k, value in s.data.items()]
    lines = [
        f"# {plan.method}: {s.images:,} images, {s.labels:,} labels, --hours {hours:g}.",
        "# Written by `fastsuncet init`. Change what you like; `fastsuncet config KEY` explains a key.",
    ]
    above: list[str] = []
    for choice in (*first, *plan.choices):
        *sections, name = choice.key.split(".")
        for depth, section in enumerate(sections):
            if sections[: depth + 1] != above[: depth + 1]:
                lines.append(f"{'  ' * depth}{section}:")
        above = sections
        line = f"{'  ' * len(sections)}{name}: {as_yaml(choice.value)}"
        lines.append(f"{line} # {choice.reason}" if choice.reason else line)
    return "\n".join(lines) + "\n"


def check(text: str, output: Path, s: Survey, world_size: int) -> Config:
    """Return the config that `text` is, after the checks of `fastsuncet train --dry-run`. Raises ConfigErrors."""
    document = parse(text, str(output)).with_whole_paths(os.path.dirname(output))
    document.values["logging"] = {"write_tag": output.stem}
    config = Config.from_document(document)
    held_out = config.data.validation
    labels = s.labels - round(held_out * s.labels) if isinstance(held_out, float) else s.labels
    images = s.images - (s.labels - labels)
    config.resolve(1 if config.meta.device == "cpu" else world_size, images, s.classes, labels)
    return config
