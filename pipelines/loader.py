"""Batches of views by step number, even when files are bad. This is the only way pixels leave `pipelines`.

`loader(step)` is a pure function of (plan, step) and the files. Consecutive steps are prepared ahead; asking for any
other step starts there, and that is all that resuming a run needs.

A file that cannot be decoded makes the engine fail. `Loader.__call__` then finds the file, chooses another image to
show in its place (`Plan.stand_in`), and prepares the step again.
"""

import re
from collections.abc import Callable, Generator, Mapping
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from typing_extensions import TypedDict, Unpack

from pipelines.backend import choose_backend, require_gpu
from pipelines.data_errors import BadImage, DataError
from pipelines.datasets.index import ImageIndex
from pipelines.output import say_line
from pipelines.sampling.augmentation import Augmentation
from pipelines.sampling.step_plan import BatchDraws, EvaluationPlan, StepPlan
from pipelines.verify import Decode, find_bad_images

# How DALI and torch name a lack of memory or a GPU's failure. Decoding alone would find the files of the step good, or
# all of them bad, where the memory is still short.
DEVICE_FAILURE = re.compile(
    r"[Cc]an't allocate|allocation failed|bad_alloc|out of memory|CUDA (\w+ API )?error"
)
STAND_IN_ATTEMPTS = 1000  # a data set in which so many draws in a row are bad has other problems


class LoaderOptions(TypedDict, total=False):
    """Options of training's and of an evaluation's loader. `_open_backend` holds the defaults."""

    device: str  # "cpu" decodes and augments on `threads` threads, "gpu" on GPU `device_id`
    device_id: int
    threads: int
    prefetch: int  # steps prepared ahead
    backend: str  # "dali", "torchvision", or "auto": DALI where it can be imported, else torchvision
    dtype: torch.dtype  # torch.float32 or torch.float16


def open_loader(
    index: ImageIndex,
    plan: StepPlan,
    *,
    bad_images: int = 0,
    view_operator: bool | Literal["auto"] = "auto",
    hw_decoder_share: float = 0.0,
    decoder_buffers: str = "grown",
    **options: Unpack[LoaderOptions],
) -> "Loader":
    """Open a loader of training views: `loader(step)` is one (B, 3, S, S) tensor for each augmentation of the plan.

    Values are in [0, 1], then normalized by each augmentation's mean and std; strides are channels-last; no gradient.
    Up to `bad_images` distinct undecodable files are replaced by others and counted (by this loader: each rank, stream
    and start of a run counts its own); one more raises BadImage. `view_operator` says what makes a view of the
    resized image with DALI, which changes no bit on a CPU: True `pipelines.dali.view_operator`, False DALI's operators,
    "auto" the view operator on a CPU where it can be built.

    With DALI on a GPU `hw_decoder_share` of each batch, 0 to 1, goes to the hardware JPEG decoder: above 0 an image's
    pixels can depend on its neighbors (`graphs.HW_DECODER_OFF`). `decoder_buffers` "largest" reserves memory for the
    largest image of the index, up to a limit (`room_for_buffers`), "grown" grows it as images come. Elsewhere both do
    nothing.

    Raises DataError when DALI, a GPU or the view operator is asked for and absent, ValueError for other values.
    """
    augments = any(isinstance(view, Augmentation) for view in plan.augmentations)
    backend = _open_backend(
        view_operator=view_operator if augments else False,
        hw_decoder_share=hw_decoder_share,
        decoder_buffers=decoder_buffers,
        **options,
    )
    index.require_good(bad_images)
    loader = Loader(index, plan, backend, allowed=bad_images)
    loader.replace(index.bad)
    return loader


def open_evaluation_loader(
    index: ImageIndex, plan: EvaluationPlan, **options: Unpack[LoaderOptions]
) -> Generator[list[torch.Tensor], None, None]:
    """Return a generator of the views of one pass over images; its `close()` frees the engine.

    Each step gives one (B, 3, S, S) tensor for each augmentation, on the device. Every image is shown once, in the
    order of the plan, and the last batch is ragged. An image of the size that `Center` asks for passes unchanged. One
    decoder serves all rows, because a result must not depend on an image's place in a batch. A bad image raises
    BadImage: an accuracy over other images than those named would be another accuracy.
    """
    backend = _open_backend(**options)
    bad = sorted(index.bad.keys() & set(plan.indices.tolist()))
    if bad:
        raise BadImage([(str(index.path(i)), index.bad[i]) for i in bad], allowed=None)
    return _one_pass(Loader(index, plan, backend, allowed=0), len(plan))


def _one_pass(loader: "Loader", steps: int) -> Generator[list[torch.Tensor], None, None]:
    try:
        for step in range(steps):
            try:
                views = loader(step)
            except BadImage as bad:
                # Without the step, which would read as a training step.
                raise BadImage(bad.files, allowed=None) from bad
            yield views
    finally:
        loader.close()


class Engine(Protocol):
    """Turns draws into pixels: each run() gives the next step's views, until a RuntimeError ends its use."""

    def run(self) -> list[torch.Tensor]: ...


class Backend(NamedTuple):
    """What makes the pixels of a loader."""

    name: str  # "dali" or "torchvision"
    start: Callable[..., Engine]
    decode: Decode  # the decoder of its engine, for single files
    threads: int
    view_operator: bool = False  # whether `pipelines.dali.view_operator` makes the views


def _open_backend(
    *,
    backend: str = "auto",
    device: str = "cpu",
    device_id: int = 0,
    threads: int = 3,
    prefetch: int = 2,
    dtype: torch.dtype = torch.float32,
    view_operator: bool | Literal["auto"] = False,
    hw_decoder_share: float = 0.0,
    decoder_buffers: str = "grown",
) -> Backend:
    if device not in ("cpu", "gpu"):
        raise ValueError(f'device must be "cpu" or "gpu", not {device!r}')
    if dtype not in (torch.float32, torch.float16):
        raise ValueError(f"dtype must be torch.float32 or torch.float16, not {dtype}")
    for name, value in (("threads", threads), ("prefetch", prefetch)):
        if value < 1:
            raise ValueError(f"{name} must be 1 or more, not {value}")
    if not 0 <= hw_decoder_share <= 1:
        raise ValueError(f"hw_decoder_share must be from 0 to 1, not {hw_decoder_share}")
    if decoder_buffers not in ("grown", "largest"):
        raise ValueError(f'decoder_buffers must be "grown" or "largest", not {decoder_buffers!r}')
    if device == "gpu":
        require_gpu()
    options = {"device": device, "device_id": device_id, "dtype": dtype}
    options |= {"threads": threads, "prefetch": prefetch}
    # Imported where they are used: `import pipelines.loader` must work where DALI does not.
    if choose_backend(backend) == "dali":
        from pipelines.dali.engine import DaliDecoder, DaliEngine
        from pipelines.dali.view_operator.use import choose

        use_view_operator = choose(view_operator, device)
        decoder = {"hw_decoder_share": hw_decoder_share, "decoder_buffers": decoder_buffers}
        start = partial(DaliEngine, view_operator=use_view_operator, **options, **decoder)
        return Backend("dali", start, DaliDecoder(device, device_id), threads, use_view_operator)
    if view_operator is True:
        raise DataError(
            "view_operator: true asks for an operator of DALI's, but torchvision reads the images: set it to auto, or "
            "backend to dali"
        )
    from pipelines.torchvision_engine import TorchvisionEngine, pil_decode

    return Backend("torchvision", partial(TorchvisionEngine, **options), pil_decode, threads)


class Loader:
    """Runs an engine step by step, starts it anew where asked, and replaces files that cannot be decoded.

    `backend` names what makes the pixels; `bad` maps the path of each undecodable file met so far to the reason, and
    `replaced` its index to that of the image shown in its place.
    """

    def __init__(self, index: ImageIndex, plan: StepPlan, backend: Backend, *, allowed: int):
        self.backend = backend.name
        self.uses_view_operator = backend.view_operator
        self.bad: dict[str, str] = {}
        self.replaced: dict[int, int] = {}
        self._index, self._plan, self._backend, self._allowed = index, plan, backend, allowed
        self._engine: Engine | None = None
        self._next_step = 0
        self._draws: dict[int, BatchDraws] = {}

    def __call__(self, step: int) -> list[torch.Tensor]:
        """Return the views of `step`. Raises BadImage when more files are bad than are allowed."""
        while True:  # each repetition has replaced another bad file, and only `bad_images` are allowed
            if self._engine is None or step != self._next_step:
                self.close()
                self._engine = self._backend.start(
                    self._index,
                    self._plan.augmentations,
                    draws=self.draws,
                    first_step=step,
                    batch=self._plan.batch,
                )
            try:
                views = self._engine.run()
            except RuntimeError as error:
                failed = self.draws(step)
                self.close()  # a DALI pipeline that failed once always fails
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
        if threads != self._backend.threads:
            self.close()
            start = partial(self._backend.start, threads=threads)
            self._backend = self._backend._replace(start=start, threads=threads)

    def close(self) -> None:
        """Free the engine and what it has read ahead. The loader can be used again: it starts anew."""
        self._engine = None
        self._draws.clear()

    def _replace_bad_images(self, draws: BatchDraws, error: RuntimeError) -> None:
        """Find stand-ins for the undecodable files of a failed step.

        Raises BadImage for more bad files than are allowed, and `error` if all files are good.
        """
        found = {}
        if self._index.pixels is None:
            found = find_bad_images(self._index, draws.indices, self._backend.decode)
        if not found:
            raise error
        if len(self.replaced) + len(found) > self._allowed:
            self.bad.update(self._by_path(found))
            raise BadImage(list(self.bad.items()), draws.step, allowed=self._allowed) from error
        self.replace(found)
        for i, reason in found.items():
            name, stand_in = self._index.name(i), self._index.name(self.replaced[i])
            say_line(
                f"step {draws.step}: {name} cannot be decoded ({reason}); {stand_in} is shown instead "
                f"({len(self.replaced)} of {self._allowed} bad images allowed)"
            )

    def replace(self, found: Mapping[int, str]) -> None:
        """Choose a stand-in for each bad image in `found` (index -> reason) and each one found before."""
        self.bad.update(self._by_path(found))
        known = {**self.replaced, **found}
        # All are chosen again: an earlier stand-in can be among the bad ones now.
        for bad in known:
            candidates = (self._plan.stand_in(bad, attempt) for attempt in range(STAND_IN_ATTEMPTS))
            stand_in = next((each for each in candidates if each not in known), None)
            if stand_in is None:
                name = self._index.name(bad)
                raise DataError(f"no image can stand in for {name}: too many others are bad as well")
            self.replaced[bad] = stand_in

    def _by_path(self, found: Mapping[int, str]) -> dict[str, str]:
        return {str(self._index.path(i)): reason for i, reason in found.items()}
