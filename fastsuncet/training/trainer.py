"""The training loop of pre-training, fine-tuning and transfer. It can be stopped and continued at any step.

A run that was stopped ends with the bits of one that was not. A step is a pure function of (seed, step, rank) and of
the weights: so are its images (pipelines/loader.py) and its rate (optim/lr_schedule.py), and the network draws no
random number. Everything else `Trainer.save` writes and `Trainer.restore` reads: weights, momentum, the scaler, the
sums of the metrics interval, the ledger, and what the task adds (`Pretraining.state`). Another experiment is refused
(`check_resume_compatible`), and kernels are those that the checkpoint names (tuning/fast_paths.py). The loop reads from
the device at a metrics line, a save and an evaluation alone, and with `plateau` once an epoch. Metrics lines of steps
after the checkpoint are set aside (metrics/writer.py). distributed/signals.py has the road of a stop signal.
"""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fastsuncet.checkpoint import format, manager
from fastsuncet.checkpoint.run_folder import (
    RunStatus,
    on_every_rank,
    on_rank_0,
    require_run_folder,
    require_same,
)
from fastsuncet.distributed.collectives import StopConsensus, gather_json
from fastsuncet.distributed.heartbeat import Heartbeat, end_hung
from fastsuncet.distributed.place import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.errors import CheckpointError, FastSuncetError, NumericalError, Preempted
from fastsuncet.metrics.cost import EnergyMeter, Ledger
from fastsuncet.metrics.interval import MetricsInterval
from fastsuncet.metrics.progress_bar import ProgressBar
from fastsuncet.metrics.writer import MetricsWriter
from fastsuncet.training.task import TrainingTask, within_memory
from fastsuncet.versions import versions
from pipelines.output import counted, say_line

FILES_SHOWN = 20  # in a message, at most


class RunLogger(ExitStack):
    """Metrics files and a progress bar with the same numbers, on rank 0 only. Leaving the context closes them."""

    def __init__(self, task: TrainingTask, folder: Path, place: Place, step: int = 0, evaluated: bool = True):
        super().__init__()
        self.writer = self.progress = None
        if place.first:
            self.progress = ProgressBar(task.steps, step, task.terms)
            more = {"resume_step": step or None, "evaluated": evaluated, "say": self.progress.say}
            self.writer = MetricsWriter(folder, task.columns, task.config, **more)
            self.enter_context(self.writer)
            self.callback(self.progress.close)  # before the writer, whose trackers can print when they close

    def write(self, kind: str, record: Mapping[str, Any]) -> None:
        """Write a metrics line of that kind. A "train" line moves the bar, any other with numbers is printed too."""
        if self.writer is None or self.progress is None:
            return
        record = self.writer.write(dict(record), kind)
        if kind == "train":
            self.progress.update(record)
        elif values := "  ".join(
            f"{key} {value:.4g}" for key, value in record.items() if isinstance(value, float)
        ):
            self.progress.say(f"{kind}: step {record['step']:,}  {values}")

    def at(self, step: int) -> None:
        """Move the bar to the updates done."""
        if self.progress is not None:
            self.progress.at(step)

    def say(self, line: str) -> None:
        """Print `line` on rank 0, without breaking the bar."""
        if self.progress is not None:
            self.progress.say(line)

    def sync(self) -> None:
        """Wait until every line is on the disk: a checkpoint must not claim a step whose line could still be lost."""
        if self.writer is not None:
            self.writer.sync()


Task = TypeVar("Task", bound=TrainingTask)


class Trainer(Generic[Task]):
    """One rank's run of a task, from its newest checkpoint to its last step. `run` is the loop."""

    def __init__(self, task: Task, place: Place, folder: Path, meter: EnergyMeter | None = None):
        self.task, self.place, self.folder = task, place, folder
        self.ledger = Ledger(meter=meter)
        self.interval = MetricsInterval(place.device, task.value_count)
        self.step = 0  # updates done
        self.evaluated = True  # False: an evaluation is due at this very step
        self.means = [float("nan")] * 2  # of the task's terms over the last metrics interval
        self.replaced: set[int] = set()  # bad images that any rank has met since the run was started
        self.consensus = StopConsensus()
        self.signals = SignalFlag()  # of `run`
        self.heart: Heartbeat | None = None  # while `run` runs
        self.restore()

    def run(self, signals: SignalFlag) -> None:
        """Train to the last step.

        Raises Preempted, once all is saved, after a signal to any rank, NumericalError, before anything is saved, for a
        loss or a weight that is not finite, and ConfigError for a batch that a GPU cannot hold.
        """
        task, self.signals = self.task, signals
        if self.step == task.steps and self.evaluated:
            if self.place.first:
                say_line(f"complete {self.folder} has had all its {self.step:,} updates: nothing was trained")
            return
        # Before the first step: a disk that is full at the first save would cost the hours until then.
        weights = sum(x.nbytes for x in task.model.state_dict().values())
        moments = 2 if "betas" in task.optimizer.defaults else 1
        momentum = moments * sum(x.nbytes for x in task.model.parameters())
        on_rank_0(self.place, lambda: manager.require_room(self.folder / manager.FOLDER, weights + momentum))
        logger = partial(RunLogger, task, self.folder, self.place, self.step, self.evaluated)
        with (
            within_memory(task),
            closing(task),
            on_every_rank(logger) as self.logger,
            self.watched() as self.heart,
        ):
            if self.step == 0 and task.chosen:
                self.logger.write("chosen", {"step": 0, **task.chosen})
            self.ledger.start_clock()
            self.interval.start_clock()
            if not self.evaluated:  # the run ended between the end of a step and the end of its evaluation
                self.evaluate()
                self.save()
            while self.step < task.steps:
                # ------------------------------------------------------------------------------------------ hot region
                self.at("reads images")
                batch = task.batch(self.step, self.interval.data_timer)
                self.at("trains")
                values = task.train_step(batch, task.lr(self.step))
                images, macs = task.cost(self.step)
                self.interval.add(values, self.step, images)
                # ----------------------------------------------------------------- nothing above waits for the device
                if message := task.after_step(self.step, values):
                    self.logger.say(message)
                self.step += 1  # from here on, the updates done
                self.logger.at(self.step)
                self.ledger.add(images, macs)
                last = self.step == task.steps
                self.at("ends its step")
                stop = self.stop_agreed() and not last
                if last or self.step % task.log_every == 0:
                    self.log()
                due = task.evaluate_every and (last or self.step % task.evaluate_every == 0)
                self.evaluated = not due
                # Before the evaluation, which can take longer than the time that a stopped run is given.
                save = stop or self.scheduled
                if save:
                    self.save()
                # Skip the evaluation when a stop was requested: the run does it first when it continues.
                if not self.evaluated and not stop:
                    try:
                        self.evaluate()
                        again = save  # what was saved above is not evaluated
                    except Preempted:
                        stop, again = True, not save
                    if again:
                        self.save()
                if stop:
                    raise self.preempted()
            self.consensus.close()

    def watched(self) -> Heartbeat:
        """Return a context in which a thread names the rank that the others wait for, and ends ranks that hang."""

        def end(error: FastSuncetError) -> None:
            status = RunStatus(self.folder / "status.json", self.place)
            how = ("failed", self.step, str(error) or "a rank hung", error.exit_code)
            end_hung(error, lambda: status.path.exists() and status.write(*how))

        say = self.logger.say if self.place.first else say_line
        return Heartbeat(self.task.config.meta.timeout, say, end)

    def stop_if_requested(self) -> None:
        """Raise Preempted once any rank got a signal. Called equally often on all ranks; waits for no device."""
        self.at("evaluates")
        if self.stop_agreed():
            raise self.preempted()

    def stop_agreed(self) -> bool:
        """Return whether any rank has a stop signal; of several ranks, as of the call before this one."""
        return self.consensus.agree(self.signals.requested is not None)

    def preempted(self) -> Preempted:
        """Return the error that ends a run on a signal, once all is saved."""
        asked = self.signals.requested or "another rank"
        return Preempted(f"{asked}: saved after step {self.step:,}; the same command continues")

    def at(self, point: str) -> None:
        """Tell the other ranks where this one is."""
        if self.heart is not None:
            self.heart.at(self.step, point)

    @property
    def epoch(self) -> float:
        """Epochs done, to four decimals."""
        return round(self.step / self.task.steps_per_epoch, 4)

    @property
    def scheduled(self) -> bool:
        """Whether a run that nobody stops has a checkpoint after this step."""
        return self.step == self.task.steps or any(self.step % every == 0 for every in self.task.save_every)

    def progress(self) -> dict[str, int | float]:
        """Return how far the run is and what it has cost: the first columns of every metrics line."""
        self.ledger.tick()
        return {"step": self.step, "epoch": self.epoch, **self.ledger.record()}

    def log(self) -> None:
        """Write a metrics line: means over the steps and ranks of the interval."""
        self.at("writes metrics")
        sums, first_bad, wait, memory = self.interval.read()
        self.require_finite(first_bad)
        means = sums.mean(0) / self.interval.steps
        self.means = means[:2].tolist()
        record: dict[str, Any] = self.progress()
        terms = {name: mean for name, mean in zip(self.task.terms, self.means) if name != "none"}
        if "loss" in self.task.columns:
            record["loss"] = sum(terms.values())
        # The root of the mean square over the steps: the same number on any number of ranks.
        norms = zip(self.task.terms, means[2:].sqrt().tolist())
        record |= terms | {f"{name}_gradient": norm for name, norm in norms if name != "none"}
        seconds = self.interval.seconds()
        record |= {
            "lr": self.task.lr(self.step - 1),
            "views_per_second": round(self.interval.views / seconds, 1),
            "data_wait": round(min(1.0, wait / seconds), 4),
            "peak_memory_gb": round(memory / 1e9, 3),
            "replaced_images": self.count_replaced(),
        }
        self.logger.write("train", record)
        self.interval.restart()

    def count_replaced(self) -> int:
        """Return how many distinct images could not be decoded so far, on any rank. Collective."""
        if self.task.config.data.bad_images:
            self.replaced.update(i for rank in gather_json(sorted(self.task.stream.replaced)) for i in rank)
        return len(self.replaced)

    def evaluate(self) -> None:
        """Write a metrics line with the task's evaluation. A signal ends it by Preempted, and it is still due.

        Its time and energy are not in the ledger: they depend on how many labels a method has and are not its cost.
        """
        self.interval.read()  # waits for the steps under way, which are in the ledger
        progress = self.progress()
        self.count_replaced()
        try:
            found = self.task.evaluate(self.replaced, self.stop_if_requested)
            self.logger.write("knn", {**progress, **found})
            from fastsuncet.metrics.rankme import collapse_warning  # read by the evaluation, and not before

            if warning := collapse_warning(found):
                self.logger.say(warning)
            self.evaluated = True
        finally:
            self.ledger.start_clock()
            self.interval.start_clock()

    def save(self) -> None:
        """Write a checkpoint, unless a loss or a weight is not finite. Rank 0 writes; its errors are raised on all."""
        self.at("saves")
        sums, first_bad, *_ = self.interval.read()
        self.require_finite(first_bad)
        require_finite_weights(self.task.model, self.step)
        self.count_replaced()
        self.ledger.tick()
        self.logger.sync()
        values = {
            "optimizer": self.task.optimizer.state_dict(),
            "scaler": self.task.scaler.state_dict(),
            "interval": {"sums": sums, "steps": self.interval.steps},
            "extra": {
                "replaced": sorted(self.replaced),
                "evaluated": self.evaluated,
                "means": self.means,
                **self.task.state(),
            },
        }
        meta = {
            **self.task.meta(self.epoch),
            "scheduled": self.scheduled,
            "world_size": self.place.world_size,
            self.task.ledger_key: self.ledger.state(),
        }
        keep = self.task.keep_at_end if self.step == self.task.steps else self.task.keep

        def write() -> None:
            require_run_folder()
            content = {"model": self.task.model.state_dict(), "state": values, "meta": meta}
            folder = self.folder / manager.FOLDER
            manager.save(folder, self.step, **content, keep=keep, say=self.logger.say)

        on_rank_0(self.place, write)

    def restore(self) -> None:
        """Continue from the newest good checkpoint, if there is one. Raises CheckpointError on every rank.

        Rank 0 chooses and checks it; the others read what it chose.
        """
        loaded = None

        def newest() -> str | None:
            nonlocal loaded
            loaded = manager.load_newest(self.folder / manager.FOLDER)
            if loaded is None:
                return None
            self.task.check_resume_compatible(loaded.meta)
            return str(loaded.path)

        try:
            path = on_rank_0(self.place, newest)
            if path is None:
                self.task.begin()
            else:
                # Where each machine has a logging.folder of its own, ranks would go on with different weights.
                loaded = on_every_rank(lambda: loaded or manager.load(path))
                files = loaded.meta["files"].items()
                require_same({f"{path}/{name}": file["sha256"] for name, file in files}, CheckpointError)
                self._continue_from(loaded)
        # ValueError: the optimizer's, whose parameters another version grouped otherwise.
        except (KeyError, ValueError) as error:
            why = f"has no {error}" if isinstance(error, KeyError) else f"does not fit ({error})"
            raise CheckpointError(
                f"a checkpoint in {self.folder / manager.FOLDER} {why}: it is not one of such a run. Give the new run "
                "another folder"
            ) from error

    def _continue_from(self, loaded: format.LoadedCheckpoint) -> None:
        before, now = loaded.meta["world_size"], self.place.world_size
        if self.place.first:
            say_line(f"continuing from {loaded.path.name}: {loaded.step:,} updates done")
            if before != now:
                say_line(f"on {counted(now, 'process')} instead of {before}: {self.task.world_size_note}")
            old = loaded.meta["versions"]
            changed = [
                f"{name} {new} instead of {old.get(name)}"
                for name, new in versions().items()
                if new != old.get(name)
            ]
            if changed:
                say_line(f"with {', '.join(changed)}: results are equal up to rounding only")
        self.task.model.load_state_dict(loaded.model)
        self.task.optimizer.load_state_dict(loaded.state["optimizer"])
        self.task.scaler.load_state_dict(loaded.state["scaler"])
        self.ledger.restore(loaded.meta[self.task.ledger_key])
        interval, extra = loaded.state["interval"], loaded.state["extra"]
        self.interval.restore(interval["sums"], interval["steps"], self.place.rank, now)
        self.step = loaded.step
        self.replaced.update(extra["replaced"])
        # A run can be continued without evaluations, and then none is due.
        self.evaluated = extra["evaluated"] or not self.task.evaluate_every
        self.means = extra["means"]
        self.task.restore(extra)

    def require_finite(self, first_bad: Tensor) -> None:
        """Raise NumericalError on every rank if any rank saw a loss that is not finite.

        `first_bad` (W, T) holds the first such step of each rank and term, -1 where there is none.
        """
        if (first_bad < 0).all():
            return
        step = int(first_bad[first_bad >= 0].min())
        term = int((first_bad == step).any(dim=0).nonzero()[0])
        ranks = (first_bad[:, term] == step).nonzero().flatten().tolist()
        # Ranks contrast their rows with those of all ranks, so one bad row spoils every rank's loss.
        on = f"rank {ranks[0]}"
        if len(ranks) > 1:
            on = f"ranks {', '.join(map(str, ranks))}, any of which can be its origin"
        files = [self.task.stream.files(step, rank, self.task.roles[term]) for rank in ranks]
        names = [name for of_ranks in zip(*files) for name in of_ranks]
        more = len(names) - FILES_SHOWN
        shown = "\n  ".join(names[:FILES_SHOWN]) + (f"\n  and {more} more" if more > 0 else "")
        raise NumericalError(
            f"{self.task.terms[term]} is not a finite number at step {step:,} on {on}. Nothing has been saved since; "
            f"earlier checkpoints are good. Try a lower learning rate, a longer warmup or meta.precision=fp32. "
            f"The {len(names)} images of that loss:\n  {shown}"
        )


def require_finite_weights(model: nn.Module, step: int) -> None:
    """Raise NumericalError where a gradient has overflowed under a finite loss. Waits for the device once."""
    norms = nn.utils.get_total_norm([p.detach() for p in model.parameters()])
    if not torch.isfinite(norms):
        raise NumericalError(
            f"a weight is not a finite number after step {step:,}, though the losses are: a gradient overflowed. "
            "Nothing has been saved since; earlier checkpoints are good. Try a lower lr or meta.precision=fp32."
        )
