"""`fastsuncet transfer`: a pre-trained encoder on other data sets (paper, appendix C; SimCLR, appendix B.8).

RUN/transfer/ENCODER/DATASET-DIGEST/     lr0.1-wd0/cell.json ...    selected-lr.../selected.json
RUN/results/transfer-....json            the metrics
"""

from pathlib import Path

from fastsuncet.checkpoint.run_folder import RunStatus
from fastsuncet.commands.ranks import as_rank
from fastsuncet.config import Config
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.evaluation.finetuning.transfer import open_grids, run_grids
from fastsuncet.metrics.trackers import require_packages
from fastsuncet.training.determinism import resolve_precision
from pipelines import atomic_files


def transfer(
    config: Config,
    arguments: list[str],
    *,
    encoder: Path | None = None,
    step: int | None = None,
    cell: tuple[int, int] = (1, 1),
) -> None:
    """Run share `cell` (I, N) of the grid's cells, and choose where all are finished.

    `encoder` is what `load_encoder` takes, None for the config's own run. `arguments` start the same command on
    further ranks. Raises ConfigErrors, DataError, CheckpointError, Preempted, and NumericalError where no cell of a
    data set, or not the chosen one, could be trained.
    """
    t = config.transfer
    if t.root is None:
        raise config.error(
            "transfer.root",
            "must name the folder that holds the data sets to transfer to (cifar-10-batches-py, cifar-100-python, "
            "VOCdevkit)",
        )
    if t.resize < t.size:
        raise config.error(
            "transfer.resize", f"must not be below transfer.size, the {t.size} pixels of a crop"
        )
    require_packages(config)
    status = config.run_folder / "transfer" / f"status-{cell[0]}-of-{cell[1]}.json"
    with as_rank(config, arguments, status) as place, SignalFlag() as signals:
        config, _ = resolve_precision(config, place.device)
        run_status = RunStatus(status, place)
        with run_status.recording():
            grids = open_grids(config, place, encoder, step, signals)
            # Only now: a refused command leaves nothing behind.
            if place.first:
                atomic_files.make_folder(status.parent)
            run_status.write("running", None)
            run_grids(grids, cell)
