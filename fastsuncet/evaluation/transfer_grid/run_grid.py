"""The walk through the grid: each cell of a share, then the choice where nothing is missing, told as it goes."""

from collections.abc import Sequence
from pathlib import Path

from fastsuncet.config import Config
from fastsuncet.console import Say, say_line
from fastsuncet.distributed.collectives import any_rank
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import NumericalError, Preempted
from fastsuncet.evaluation.encoder import Encoder, choose_on_one_rank, load_encoder
from fastsuncet.evaluation.supervised.state import digest_of
from fastsuncet.evaluation.transfer_grid.cell import Bench, bench
from fastsuncet.evaluation.transfer_grid.cell_records import Record
from fastsuncet.evaluation.transfer_grid.grid import Cell, grid, share_of
from fastsuncet.evaluation.transfer_grid.grid_table import as_csv, best, table
from fastsuncet.evaluation.transfer_grid.outcome import keep
from fastsuncet.evaluation.transfer_grid.tasks import open_task


def open_benches(
    config: Config, place: Place, where: Path | None, step: int | None, signals: SignalFlag
) -> list[Bench]:
    """A bench for each data set, all of them before the first cell: a missing one is then told at once."""
    (chosen,) = choose_on_one_rank(place, where or config.run_folder, step, False)
    encoder = load_encoder(chosen, config)
    folder = config.run_folder / "transfer" / tag_of(encoder)
    benches = [
        bench(config, place, encoder, open_task(name, config, place), folder, signals)
        for name in config.transfer.datasets
    ]
    if place.first:
        steps, batch = config.transfer.steps, benches[0].setting.batch
        say_line(f"encoder    {encoder.name}, {encoder.method or 'method unknown'}, {encoder.source}")
        say_line(f"cells      {len(grid(config))} a data set, {steps:,} steps of {batch:,} images each")
        for one in benches:
            t = one.task
            say_line(
                f"{t.name:<10} {len(t.train):,} images to train on, {len(t.validation):,} to choose on, "
                f"{len(t.test):,} to count on; {one.folder}"
            )
    return benches


def tag_of(encoder: Encoder) -> str:
    """A folder's name for these weights: where they stand, and a digest of what they are."""
    stands = Path(encoder.source).stem if encoder.step is None else f"step_{encoder.step:08d}"
    return f"{stands}-{digest_of(encoder.module)[:8]}"


def walk_grid(
    benches: Sequence[Bench], cells: Sequence[Cell], share: tuple[int, int], signals: SignalFlag
) -> None:
    """The share's cells one after the other, and the choice for every data set whose cells are all there.

    Raises Preempted where a signal came, between cells as within one.
    """
    say = say_line if benches[0].place.first else (lambda line: None)
    every = [(one, cell) for one in benches for cell in cells]
    mine = share_of(every, *share)
    known = {(one, cell) for one in benches for cell in one.finished(cells)}
    before = f", {len(known.intersection(mine))} of them done before" if known.intersection(mine) else ""
    say(f"share      {share[0]}/{share[1]}: {len(mine)} of {len(every)} cells{before}")
    taken = []  # seconds of the cells trained now
    for number, (one, cell) in enumerate(mine, 1):
        leave_if_asked(signals)
        say(f"cell {number}/{len(mine)}  {one.task.name}, lr {cell.lr:.3g}, weight decay {cell.decay:.3g}/lr")
        record, fresh = one.run(cell)
        taken += [record["seconds"]] * fresh if record else []
        left = sum(item not in known for item in mine[number:])
        say(f"    {outcome_of(one, record, fresh)}{time_left(taken, left) if fresh and left else ''}")
    for one in benches:
        leave_if_asked(signals)
        conclude(one, cells, say)


def leave_if_asked(signals: SignalFlag) -> None:
    """Raises Preempted on every rank once a signal came to any of them."""
    if any_rank(signals.requested is not None):
        raise Preempted(
            f"{signals.requested or 'another rank'}: between two cells; the same command continues the grid"
        )


def outcome_of(one: Bench, record: Record | None, fresh: bool) -> str:
    """How a cell ended, in words."""
    if record is None:
        return "another process is at it: left to that one"
    said = "" if fresh else "done before: "
    if record["validation"] is None:
        return f"{said}diverged: {record['diverged']}"
    return f"{said}{one.task.title} {100 * record['validation']:.2f} % in {record['seconds']:,.0f} s"


def time_left(taken: Sequence[float], left: int) -> str:
    """A guess from the cells so far."""
    seconds = sum(taken) / len(taken) * left
    hours, minutes = divmod(round(seconds / 60), 60)
    about = f"{hours} h {minutes} min" if hours else f"{minutes} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"; {left} left, about {about}"


def conclude(one: Bench, cells: Sequence[Cell], say: Say) -> None:
    """The grid of one data set written and told, and, where it is whole, its best cell retrained and counted.

    Collective. Raises NumericalError where every cell diverged, or the retraining did.
    """
    task, place = one.task, one.place
    records = one.finished(cells)
    missing = len(cells) - len(records)
    chosen = None if missing else best(cells, records)
    say(f"\n{task.name}: {task.title} on {len(task.validation):,} validation images, in %")
    for line in table(cells, records, chosen):
        say(line)
    if place.first:
        one.write("grid.csv", as_csv(cells, records))
    if missing:
        say(
            f"{missing} of {len(cells)} cells are not finished; when the last one is, its process chooses. The same "
            "command without --cell runs all that are left"
        )
        return
    if chosen is None:
        raise NumericalError(
            f"{task.name}: every cell of the grid diverged; try lower transfer.learning_rates"
        )
    number = len(task.both)
    say(
        f"chosen: lr {chosen.lr:.3g}, weight decay {chosen.decay:.3g}/lr; trained once more, on all {number:,} images"
    )
    record, _ = one.retrain(chosen)
    if record is None:
        say("    another process is at it: left to that one")
        return
    say(f"    {task.title} {100 * record['test']:.2f} % of {record['images']:,} test images")
    if place.first:
        say(f"    written to {keep(one, cells, records[chosen], record)}")
