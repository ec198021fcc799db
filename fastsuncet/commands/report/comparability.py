"""The ways in which results were made: what makes two of them one evaluation, two, or one with a word of warning."""

import re
from collections.abc import Iterable
from typing import Any

from fastsuncet.commands.report.curves import Evaluation, labels_text
from fastsuncet.training.state import FOLDER as CHECKPOINTS

FINETUNED = "finetune"  # the folder of a run's fine-tuned encoders
OUTCOMES = ("seed", "converged", "finetuned")  # in a result's "setting", but not chosen by whoever evaluated
# What may differ from run to run in one evaluation, because it is the encoder's own or the machine's. It is told.
OWN = ("mean", "std", "temperature", "precision", "accumulate", "batchnorm_images", "processes")


def several_ways(records: Iterable[dict[str, Any]]) -> dict[Evaluation, set[str]]:
    """The keys of "setting" that make evaluations of their own, because they differ between two results of one kind and
    share of labels: all of them for one encoder; for two, whose numbers would else be compared, all but OWN."""
    records = list(records)
    one, two = unlike(records, encoder=True), unlike(records)
    return {alike: (one[alike] | two[alike].difference(OWN)).difference(OUTCOMES) for alike in one}


def unlike(records: Iterable[dict[str, Any]], *, encoder: bool = False) -> dict[Evaluation, set[str]]:
    """The keys of "setting" in which results of one kind and share of labels differ; `encoder`: and of one encoder."""
    first: dict[tuple, dict[str, Any]] = {}
    keys: dict[Evaluation, set[str]] = {}
    for record in records:
        evaluation = Evaluation(record["kind"], labels_text(record["labels"]))
        source = str(record["encoder"].get("source")) if encoder else ""
        before = first.setdefault((evaluation, source), dict(record["setting"]))
        if not encoder:  # an older result may lack what newer ones say
            before.update({key: value for key, value in record["setting"].items() if key not in before})
        there = before.keys() | record["setting"].keys() if encoder else record["setting"].keys()
        differ = {key for key in there if before.get(key) != record["setting"].get(key)}
        keys.setdefault(evaluation, set()).update(differ)
    return keys


def differences(records: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence for each evaluation whose numbers stand side by side though they were not made quite alike."""
    told = []
    for evaluation, keys in unlike(records).items():
        if own := sorted(keys.intersection(OWN)):
            told.append(f"{evaluation}: not all runs were evaluated with the same {', '.join(own)}")
    return told


def variant(record: dict[str, Any], ways: set[str]) -> str:
    """The settings among `ways` that `record` was made with: "k=20"."""
    shown = {key: record["setting"][key] for key in sorted(ways) if key in record["setting"]}
    return ", ".join(
        f"{key}={value:g}" if type(value) is float else f"{key}={value}" for key, value in shown.items()
    )


def tuned(record: dict[str, Any]) -> str:
    """How an encoder was fine-tuned before a measurement that can do without, or "": these are two evaluations."""
    if record["kind"] == "accuracy" or "finetuned" not in record["setting"]:
        return ""
    found = re.search(rf"/{FINETUNED}/([^/]+)/{CHECKPOINTS}/", f"/{record['encoder'].get('source')}")
    tag = re.sub(r"-?step_\d{8}.*", "", found[1]) if found else ""
    return f"fine-tuned first ({tag})" if tag else "fine-tuned first"
