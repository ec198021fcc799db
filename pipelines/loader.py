"""Batches of views by step number, even when files are bad. This is the only way pixels leave `pipelines`.

`loader(step)` is a pure function of (plan, step) and the files. Consecutive steps are prepared ahead; asking for any
other step starts there, and that is all that resuming a run needs.

A file that cannot be decoded makes the engine fail. `Loader.__call__` then finds the file, chooses another image to
show in its place (`Plan.stand_in`), and prepares the step again.
"""

import re
from collections.abc import Generator, Mapping
from dataclasses import replace

import torch

from pipelines.backend import NO_MEMORY, LoaderOptions, choose_backend, require_gpu
from pipelines.data_errors import BadImage, DataError
from pipelines.engines import Engine, engine_of
from pipelines.output import say_line
from pipelines.sampling.step_plan import BatchDraws, EvaluationPlan, Plan

DEVICE_FAILURE = re.compile(r"CUDA (\w+ API )?error|CUDA_ERROR")  # DALI's, torch's and the view operator's
STAND_IN_ATTEMPTS = 1000  # a data set in which so many draws in a row are bad has other problems


class Loader:
    """`loader(step)` is the step's views: one (B, 3, S, S) float32 tensor for each augmentation of the plan.

    Values are in [0, 1], then normalized by each augmentation's mean and std; strides are channels-last; no gradient.
    Up to `bad_images` distinct undecodable files are replaced by others and counted (by this loader: each rank, stream
    and start of a run counts its own); one more raises BadImage. With None none can be replaced.

    `options` are those asked for, without "auto". `bad` maps the path of each undecodable file met so far to the
    reason, and `replaced` its index to that of the image shown in its place.

    Raises DataError when DALI, a GPU or the view operator is asked for and absent.
    """

    def __init__(self, plan: Plan | EvaluationPlan, options: LoaderOptions, *, bad_images: int | None = 0):
        self.options = _resolved(plan, options)
        self.bad: dict[str, str] = {}
        self.replaced: dict[int, int] = {}
        self._index, self._plan, self._allowed = plan.index, plan, bad_images
        self._start = engine_of(self.options)
        self._engine: Engine | None = None
        self._next_step = 0
        self._draws: dict[int, BatchDraws] = {}
        self._again: int | None = None  # the step that failed last though its images are good
        if bad_images is not None:
            plan.index.require_good(bad_images)
            self._replace(plan.index.bad)

    def __call__(self, step: int) -> list[torch.Tensor]:
        """Return the views of `step`. Raises BadImage when more files are bad than are allowed.

        Raises torch.OutOfMemoryError where the GPU has too little memory for them.
        """
        # Each repetition but one has replaced another bad file, and only `bad_images` are allowed.
        while True:
            if self._engine is None or step != self._next_step:
                self.close()
                self._engine = self._start(self._plan, self.options, draws=self.draws, first_step=step)
            try:
                views = self._engine.run()
            except RuntimeError as error:
                failed = self.draws(step)
                self.close()  # a DALI pipeline that failed once always fails
                # Decoding alone would find the files of the step good, or all of them bad where memory is still short.
                if short := NO_MEMORY.search(str(error)):
                    kind = torch.OutOfMemoryError if self.options.device == "gpu" else RuntimeError
                    raise kind(short[0]) from error
                if DEVICE_FAILURE.search(str(error)):
                    raise
                self._replace_bad_images(failed, error)
                continue
            self._next_step = step + 1
            self._draws = {s: kept for s, kept in self._draws.items() if s >= step}
            return views

    def draws(self, step: int) -> BatchDraws:
        """Return images, labels and parameters of `step`, stand-ins included. Call it after `loader(step)`.

        Before, a bad image of that step has not been met yet, and its label would be the wrong one.
        """
        if step not in self._draws:
            self._draws[step] = self._plan(step, self.replaced)
        return self._draws[step]

    def use_threads(self, threads: int) -> None:
        """Decode on `threads` threads from the next step on: no bit changes. An engine that has others starts anew."""
        if threads != self.options.threads:
            self.close()
            self.options = replace(self.options, threads=threads)

    def close(self) -> None:
        """Free the engine and what it has read ahead. The loader can be used again: it starts anew."""
        self._engine = None
        self._draws.clear()

    def _replace_bad_images(self, draws: BatchDraws, error: RuntimeError) -> None:
        """Find stand-ins for the undecodable files of a failed step.

        A step of good files is tried once more: a file server can fail for a moment. Raises BadImage for more bad files
        than are allowed, `error` if good files fail again, and OSError where the disk fails.
        """
        found = {}
        if self._index.pixels is None:
            from pipelines.verify import find_bad_images

            found = find_bad_images(self._index, draws.indices, self.options)
        if not found:
            if self._again == draws.step:
                raise error
            self._again = draws.step
            say_line("note: a batch could not be decoded, but each of its images can: they are read again")
            return
        if self._allowed is None:  # an evaluation's step would read as a training step
            raise BadImage(list(self._by_path(found).items()), allowed=None) from error
        if len(self.replaced) + len(found) > self._allowed:
            self.bad.update(self._by_path(found))
            raise BadImage(list(self.bad.items()), draws.step, allowed=self._allowed) from error
        self._replace(found)
        for i, reason in found.items():
            name, stand_in = self._index.name(i), self._index.name(self.replaced[i])
            say_line(
                f"step {draws.step}: {name} cannot be decoded ({reason}); {stand_in} is shown instead "
                f"({len(self.replaced)} of {self._allowed} bad images allowed)"
            )

    def _replace(self, found: Mapping[int, str]) -> None:
        """Choose a stand-in for each bad image in `found` (index -> reason), and for each that had one of these."""
        plan = self._plan
        assert not isinstance(plan, EvaluationPlan), "an evaluation shows every image that it names"
        self.bad.update(self._by_path(found))
        known = {**self.replaced, **found}
        # An earlier stand-in can be among the bad ones now. One that is not is still the first good candidate.
        for bad in [bad for bad in known if self.replaced.get(bad, bad) in known]:
            candidates = (plan.stand_in(bad, attempt) for attempt in range(STAND_IN_ATTEMPTS))
            stand_in = next((each for each in candidates if each not in known), None)
            if stand_in is None:
                name = self._index.name(bad)
                raise DataError(f"no image can stand in for {name}: too many others are bad as well")
            self.replaced[bad] = stand_in

    def _by_path(self, found: Mapping[int, str]) -> dict[str, str]:
        return {str(self._index.path(i)): reason for i, reason in found.items()}


def open_evaluation_loader(
    plan: EvaluationPlan, options: LoaderOptions
) -> Generator[list[torch.Tensor], None, None]:
    """Yield the views of one pass over images; closing the generator frees the engine.

    Each step gives what `Loader` gives. Every image is shown once, in the order of the plan, and the last batch is
    ragged. An image of the size that `Center` asks for passes unchanged. One decoder serves all rows, because a result
    must not depend on an image's place in a batch. A bad image raises BadImage: an accuracy over other images than
    those named would be another accuracy.
    """
    index = plan.index
    loader = Loader(plan, replace(options, hw_decoder_share=0.0), bad_images=None)
    if bad := sorted(index.bad.keys() & set(plan.indices.tolist())):
        raise BadImage([(str(index.path(i)), index.bad[i]) for i in bad], allowed=None)
    try:
        for step in range(len(plan)):
            yield loader(step)
    finally:
        loader.close()


def _resolved(plan: Plan | EvaluationPlan, options: LoaderOptions) -> LoaderOptions:
    """Return the options without "auto". Loads the view operator if it makes the views."""
    if options.device == "gpu":
        require_gpu()
    backend = choose_backend(options.backend)
    # Imported where they are used: `import pipelines.loader` must work where DALI does not.
    if backend == "dali":
        from pipelines.dali.view_operator.use import choose

        used = choose(options.view_operator, options.device, plan.augmentations)
        return replace(options, backend=backend, view_operator=used)
    if options.view_operator is True:
        raise DataError("view_operator: true is for DALI, but torchvision reads the images: set it to auto")
    return replace(options, backend=backend, view_operator=False)
