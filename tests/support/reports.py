"""Runs with results, for reports."""

from pathlib import Path

from fastsuncet.metrics.results import write_result
from tests.support.runs import small_config

LABELS = {"kind": "bernoulli", "fraction": 0.1, "count": 160}


def result(
    run: Path,
    step: int,
    top1: float,
    *,
    kind="finetune",
    labels=LABELS,
    home=None,
    source=None,
    tag=None,
    **setting,
) -> None:
    """Write one evaluation of `source`, or the checkpoint of `step` of `home` (this run); an epoch has 10 updates."""
    ledger = {"images": 100 * step, "updates": step, "petaflops": 0.5 * step, "seconds": 36.0 * step}
    checkpoint = f"{home or run}/checkpoints/step_{step:08d}"
    encoder = {"source": str(source or checkpoint), "step": step, "epoch": step / 10}
    encoder |= {"method": "SimCLR + SuNCEt", "ledger": ledger}
    metrics = {"top1": top1, "top5": 1 - (1 - top1) / 2}
    record = {"kind": kind, "metrics": metrics, "images": 355, "labels": labels, "encoder": encoder}
    record |= {"finetuned": {"folder": f"{run}/finetune/{tag}"}} if tag else {}
    write_result(run, {**record, "setting": setting, "run": run.name, "versions": {}})


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
