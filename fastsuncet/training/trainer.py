"""The loop: runs steps to a count, and can be stopped and continued anywhere without changing a bit of the result.

A step is a pure function of (seed, step, rank) and of the weights. The loop never asks an iterator whether there is
more, never derives a schedule from a loader's length, and reads from the device once a metrics interval.
"""

from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import torch

from fastsuncet.config import Arithmetic, Config
from fastsuncet.console import say_line
from fastsuncet.data.dataset import Images
from fastsuncet.data.paired_stream import LABELED, UNLABELED, PairedStream, update_macs
from fastsuncet.distributed.collectives import broadcast, gather_json
from fastsuncet.distributed.launch import Place
from fastsuncet.distributed.signals import SignalFlag
from fastsuncet.distributed.stop_consensus import StopConsensus
from fastsuncet.errors import NumericalError, Preempted
from fastsuncet.metrics.cost import RunCost
from fastsuncet.metrics.energy import open_energy_meter
from fastsuncet.metrics.interval import MetricsInterval
from fastsuncet.optim import warmup_cosine
from fastsuncet.training import methods, state
from fastsuncet.training.cuda_graph import Step
from fastsuncet.training.logger import Reporter
from fastsuncet.training.step import build
from fastsuncet.training.supervision import Supervision


class Trainer:
    """One rank's run, from its newest checkpoint to its last step. `run()` is the loop; the rest is what it calls."""

    def __init__(
        self,
        config: Config,
        place: Place,
        arithmetic: Arithmetic,
        stream: PairedStream,
        images: Images,
        folder: Path,
        evaluate_online: Callable[..., float],
    ):
        self.config, self.place, self.arithmetic = config, place, arithmetic
        self.stream, self.images, self.folder = stream, images, folder
        self.evaluate_online = evaluate_online  # `online_knn`: this folder imports nothing of evaluation
        built = build(config, place, len(images.train.classes))
        self.model, self.network, self.optimizer, self.setting = built
        self.update = Step(self.network, self.optimizer, self.setting, graphs=config.meta.cuda_graph)
        self.terms = methods.terms(config)
        self.cost = {on: update_macs(config, arithmetic, on) for on in (True, False)}
        self.ledger = RunCost(meter=open_energy_meter(place.device))
        self.interval = MetricsInterval(place.device)
        self.supervision = Supervision(config, arithmetic, place.rank, place.device)
        self.fingerprint = images.fingerprint()
        self.replaced: set[int] = set()  # bad images met by any rank, in any life of the run
        self.evaluated = True  # False: an evaluation is due at this very step
        self.step, extra = state.restore(folder, **self.parts(), say=say_line)  # updates done
        self.replaced.update(extra.get("replaced", []))
        self.evaluated = extra.get("evaluated", True)
        self.supervision.restore(extra.get("supervision", {}))

    def run(self, signals: SignalFlag) -> None:
        """Trains to the last step. Raises Preempted once saved on a signal, NumericalError before anything is saved."""
        with Reporter(self.config, self.folder, self.arithmetic.steps, self.step, self.place) as self.out:
            consensus = StopConsensus()
            self.ledger.start_clock()
            self.interval.start_clock()
            if not self.evaluated:  # the run was stopped between the last step's end and its evaluation
                self.evaluate()
                self.save()
            while self.step < self.arithmetic.steps:
                # ------------------------------------------------------------------------------------------ hot region
                supervised = self.supervision.on(self.step)
                self.interval.data_timer.begin()
                batch = self.stream(self.step, supervised)
                self.interval.data_timer.end()
                losses = self.update(batch, self.lr(self.step))  # step.train_step
                views = self.arithmetic.update_samples(supervised)
                self.interval.add(losses, self.step, views)
                # ----------------------------------------------------------------- nothing above waits for the device
                if self.supervision.add(losses[1], self.step):
                    self.out.say(f"{self.terms[1]} has plateaued: off from step {self.step + 1:,} on")
                self.step += 1  # from here on, the updates done
                self.ledger.add(views, self.cost[supervised])
                last = self.step == self.arithmetic.steps
                stop = consensus.agree(signals.requested is not None) and not last
                if last or self.step % self.config.logging.log_every == 0:
                    self.log()
                self.evaluated = not self.due(self.config.evaluation.knn_every_epochs)
                if not self.evaluated and not stop:  # whoever asked to stop may not wait for an evaluation
                    self.evaluate()
                if last or stop or self.save_due():
                    self.save()
                if stop:
                    asked = signals.requested or "another rank"
                    raise Preempted(f"{asked}: saved after step {self.step:,}; the same command continues")
            consensus.close()

    def lr(self, step: int) -> float:
        """The learning rate of `step`: a function of the step alone, so there is no scheduler to save."""
        o, a = self.config.optimization, self.arithmetic
        return warmup_cosine(
            step,
            steps=a.steps,
            warmup_steps=a.warmup_steps,
            start_lr=o.start_lr,
            lr=o.lr,
            final_lr=o.final_lr,
            legacy=o.legacy_schedule,
        )

    def due(self, every_epochs: int | None) -> bool:
        """True after every `every_epochs` epochs and after the last step."""
        if not every_epochs:
            return False
        return (
            self.step % (every_epochs * self.arithmetic.steps_per_epoch) == 0
            or self.step == self.arithmetic.steps
        )

    def save_due(self) -> bool:
        """True where the config asks for a checkpoint, by steps or by epochs."""
        every = self.config.checkpoint.every
        return bool(every and self.step % every == 0) or self.due(self.config.checkpoint.every_epochs)

    def where(self) -> dict[str, int | float]:
        """How far the run is, and what it has cost: in every metrics line."""
        self.ledger.tick()
        return {"step": self.step, "epoch": self.epoch(), **self.ledger.record()}

    def epoch(self) -> float:
        """Passes over the unlabeled images so far, or over the labeled ones where those are all."""
        return round(self.step / self.arithmetic.steps_per_epoch, 4)

    def log(self) -> None:
        """A metrics line: means over the steps and ranks of the interval. Its one sync with the device."""
        sums, first_bad, wait = self.interval.read()
        self.refuse_nonfinite(first_bad)
        steps, seconds = self.interval.steps, self.interval.seconds()
        means = zip(self.terms, (sums.mean(0) / steps).tolist())
        terms = {name: mean for name, mean in means if name != "none"}
        record = {
            **self.where(),
            "loss": sum(terms.values()),
            **terms,
            "lr": self.lr(self.step - 1),
            "views_per_second": round(self.interval.views / seconds, 1),
            "data_wait": round(min(1.0, wait / seconds), 4),
            "replaced_images": self.count_replaced(),
        }
        self.out.write("train", record)
        self.interval.restart()

    def count_replaced(self) -> int:
        """How many distinct images could not be decoded so far, on any rank."""
        if self.config.data.bad_images:
            self.replaced.update(i for rank in gather_json(sorted(self.stream.replaced)) for i in rank)
        return len(self.replaced)

    def evaluate(self) -> None:
        """A metrics line with the accuracy of nearest neighbours. Takes nothing from the run's own randomness.

        Its time and energy are left out of the ledger: they hang on how many labels a method has, and are not its cost.
        """
        self.interval.read()  # waits for the steps still under way, which are
        where = self.where()
        self.count_replaced()
        if not self.config.model.sync_batchnorm:
            for (
                buffer
            ) in self.model.buffers():  # each rank's own so far; rank 0's are the ones that are saved
                broadcast(buffer)
        accuracy = self.evaluate_online(self.model, self.images, self.config, self.place, bad=self.replaced)
        self.out.write("knn", {**where, "knn_accuracy": accuracy})
        self.evaluated = True
        self.ledger.start_clock()
        self.interval.start_clock()  # views/s is of training

    def save(self) -> None:
        """A checkpoint, unless the weights it would hold came from a loss that was not a number."""
        sums, first_bad, _ = self.interval.read()
        self.refuse_nonfinite(first_bad)
        state.require_finite_weights(self.model, self.step)
        self.count_replaced()
        self.ledger.tick()
        self.out.sync()
        extra = {
            "replaced": sorted(self.replaced),
            "evaluated": self.evaluated,
            "supervision": self.supervision.state(),
        }
        parts, epoch = self.parts(), self.epoch()
        state.save(self.folder, self.step, **parts, epoch=epoch, sums=sums, extra=extra, say=self.out.say)

    def parts(self) -> dict:
        """What is saved and restored."""
        return {
            "config": self.config,
            "place": self.place,
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.setting.scaler,
            "interval": self.interval,
            "ledger": self.ledger,
            "images": self.fingerprint,
        }

    def refuse_nonfinite(self, first_bad: torch.Tensor) -> None:
        """Raises NumericalError on every rank if any rank saw a loss that is no number; (W, T) first bad steps."""
        if (first_bad < 0).all():
            return
        step = int(first_bad[first_bad >= 0].min())
        term = int((first_bad == step).any(dim=0).nonzero()[0])
        ranks = (first_bad[:, term] == step).nonzero().flatten().tolist()
        # Ranks contrast their rows with everybody's, so that one bad row spoils them all: it may be anyone's.
        on = f"rank {ranks[0]}"
        if len(ranks) > 1:
            on = f"ranks {', '.join(map(str, ranks))}, any of which may have begun it"
        files = [self.stream.files(step, rank, (UNLABELED, LABELED)[term]) for rank in ranks]
        names = [name for of_ranks in zip_longest(*files) for name in of_ranks if name is not None]
        shown = "\n  ".join(names[:20]) + (f"\n  and {len(names) - 20} more" if len(names) > 20 else "")
        raise NumericalError(
            f"{self.terms[term]} is not a finite number at step {step:,} on {on}. Nothing has been saved since; "
            f"what was saved before is sound. A lower lr, a longer warmup or precision fp32 are the usual cures. "
            f"The {len(names)} images of that loss:\n  {shown}"
        )
