"""Runs with results, for reports."""

import json
from pathlib import Path

from fastsuncet.metrics.results import write_result
from tests.support.runs import small_config

LABELS = {"kind": "bernoulli", "fraction": 0.1, "count": 160}


def result(run: Path, step, top1: float, *, home=None, source=None, tag=None, **changes) -> Path:
    """Write one evaluation of `source`, or the checkpoint of `step` of `home` (this run); an epoch has 10 updates.

    `changes` are other values of the record's keys; what is none of them is in the setting. Returns the file.
    """
    done = step or 0
    ledger = {"views": 100 * done, "updates": done, "petaflops": 0.5 * done, "seconds": 36.0 * done}
    checkpoint = f"{home or run}/checkpoints/step_{done:08d}"
    encoder = {"source": str(source or checkpoint), "step": step, "epoch": done / 10}
    encoder |= {"method": "SimCLR + SuNCEt", "ledger": ledger}
    if step is None:  # a file of another program
        encoder |= dict.fromkeys(("epoch", "method", "ledger"))
    metrics = {"top1": top1, "top5": 1 - (1 - top1) / 2}
    record = {"kind": "finetune", "metrics": metrics, "images": 355, "labels": LABELS, "encoder": encoder}
    record |= {"setting": {}, "asked": {}, "run": run.name, "versions": {}}
    record |= {"finetuned": {"folder": f"{run}/finetune/{tag}"}} if tag else {}
    record |= {key: value for key, value in changes.items() if key in record}
    record["setting"] |= {key: value for key, value in changes.items() if key not in record}
    return write_result(run, record)


def write_lines(run: Path, *lines: dict) -> None:
    """Write the metrics lines of a run."""
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def make_run(folder: Path, name: str, *accuracies: float, seed=0, suncet=True, overrides=()) -> Path:
    """Write a run's folder with a config and a fine-tuning result every 10 updates."""
    off = () if suncet else ("criterion.supervised_epochs=0",)
    config = small_config(folder, f"meta.seed={seed}", f"logging.write_tag={name}", *off, *overrides)
    run = config.run_folder
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config.to_yaml())
    for i, accuracy in enumerate(accuracies):
        result(run, 10 * (i + 1), accuracy)
    return run
