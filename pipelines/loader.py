"""Batches of views by step number, whatever happens to the files: the one way pixels leave `pipelines`.

`loader(step)` is a pure function of (plan, step) and the files. Consecutive steps are prepared ahead; any
other step starts there, which is all that resuming is.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from pipelines.backend import choose_backend, require_gpu
from pipelines.dali.plugin.use import choose
from pipelines.data_errors import BadImage, DataError
from pipelines.find_bad_images import bad_images as probe
from pipelines.sampling.augmentation import Augmentation, Center
from pipelines.sampling.step_plan import CenterPlan, PassPlan, Plan, Visit

# Evaluations keep to it: what they measure must not depend on where in a batch an image is.
ONE_DECODER = MappingProxyType({"hw_decoder_share": 0.0, "decoder_buffers": "grown"})
STAND_IN_ATTEMPTS = 1000  # a data set in which that many draws in a row are bad has other problems


def open_loader(
    index: Any,  # pipelines.datasets.index.ImageIndex
    plan: Plan,
    augmentations: Sequence[Augmentation],
    *,
    device: str = "cpu",
    device_id: int = 0,
    threads: int = 3,
    prefetch: int = 2,
    backend: str = "auto",
    bad_images: int = 0,
    color_operator: str = "auto",
    dtype: torch.dtype = torch.float32,
    hw_decoder_share: float = 0.0,
    decoder_buffers: str = "grown",
) -> "Loader":
    """A loader of training views: `loader(step)` is one (B, 3, S, S) tensor per augmentation.

    Values are in [0, 1], then normalised by each augmentation's mean and std; `dtype` is torch.float32 or
    torch.float16; strides are channels-last; no gradient. `device` "gpu" decodes and augments on GPU
    `device_id`, "cpu" on `threads` threads. `backend` "auto" is DALI where it can be imported and otherwise
    torchvision, with a line that says so. Up to `bad_images` distinct undecodable files are replaced by
    others and counted (by this loader: each rank, stream and start of a run counts its own); one more raises
    BadImage. `color_operator` is what DALI makes exact colour with, which changes no pixel on a CPU: "plugin" is our
    own operator, "graph" DALI's, "auto" our own on a CPU where it was built.

    With DALI on a GPU `hw_decoder_share` of each batch, 0 to 1, goes to the hardware JPEG decoder: above 0 an
    image's pixels may depend on its row (`graphs.ONE_DECODER`). `decoder_buffers` "largest" sets memory aside
    for the largest image of the index, "grown" as images come. Elsewhere neither does anything.

    Raises DataError when DALI, a GPU or the plug-in is asked for and absent, ValueError for values that name nothing.
    """
    if tuple(augmentations) != plan.augmentations:
        raise ValueError("the loader's augmentations are not those that the plan draws for")
    pace = {"threads": threads, "prefetch": prefetch}
    if not any(each.recolors and each.color == "exact" for each in augmentations):
        color_operator = "graph"
    decoder = {"hw_decoder_share": hw_decoder_share, "decoder_buffers": decoder_buffers}
    engine = _engine(backend, device, device_id, dtype, color_operator, decoder=decoder, **pace)
    index.require_good(bad_images)
    own_color = bool(engine[1].keywords.get("plugin"))
    loader = Loader(index, plan, *engine, bad_images=bad_images, own_color=own_color)
    loader.count_bad(index.bad)
    return loader


def open_evaluation_loader(
    index: Any,  # pipelines.datasets.index.ImageIndex
    indices: np.ndarray,
    batch: int,
    size: int,
    resize: int,
    *,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
    device: str = "cpu",
    device_id: int = 0,
    threads: int = 3,
    prefetch: int = 2,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> "EvaluationLoader":
    """A loader of torchvision's `Resize(resize)`, `CenterCrop(size)` over `indices`; options as
    `open_loader`'s.

    An image that already has the target size passes unchanged. A bad image raises BadImage: an accuracy over
    other images than those named would be another accuracy.
    """
    plan = CenterPlan(index, indices, batch, Center(size, resize, tuple(mean), tuple(std)))
    pace = {"threads": threads, "prefetch": prefetch}
    return EvaluationLoader(_one_pass(index, plan, _engine(backend, device, device_id, dtype, **pace)), plan)


def open_pass_loader(
    index: Any,  # pipelines.datasets.index.ImageIndex
    plan: PassPlan,
    *,
    device: str = "cpu",
    device_id: int = 0,
    threads: int = 3,
    prefetch: int = 2,
    backend: str = "auto",
    dtype: torch.dtype = torch.float32,
) -> "PassLoader":
    """A loader of random views of the images of `plan`, each image once; options as `open_loader`'s.

    As in every evaluation a bad image raises BadImage.
    """
    pace = {"threads": threads, "prefetch": prefetch}
    return PassLoader(_one_pass(index, plan, _engine(backend, device, device_id, dtype, **pace)), plan)


def _one_pass(index: Any, plan: CenterPlan | PassPlan, engine: tuple) -> "Loader":
    bad = sorted(index.bad.keys() & set(plan.indices.tolist()))
    if bad:
        raise BadImage([(str(index.path(i)), index.bad[i]) for i in bad], allowed=None)
    return Loader(index, plan, *engine, bad_images=0)


class Engine(Protocol):
    """Turns visits into pixels: each run() gives the next step's, until a RuntimeError ends its use."""

    def run(self) -> list[torch.Tensor]: ...


def _engine(
    backend: str,
    device: str,
    device_id: int,
    dtype: torch.dtype,
    color_operator: str = "graph",
    *,
    decoder: Mapping[str, Any] = ONE_DECODER,
    **pace: int,
) -> tuple:
    """(name, engine still to be started, decoder) of the back-end that is asked for and there."""
    if device not in ("cpu", "gpu"):
        raise ValueError(f'device is "cpu" or "gpu", not {device!r}')
    if dtype not in (torch.float32, torch.float16):
        raise ValueError(f"dtype is torch.float32 or torch.float16, not {dtype}")
    for name, value in pace.items():
        if value < 1:
            raise ValueError(f"{name} is a number of 1 or more, not {value}")
    if not 0 <= decoder["hw_decoder_share"] <= 1:
        raise ValueError(f"hw_decoder_share is a number from 0 to 1, not {decoder['hw_decoder_share']}")
    if decoder["decoder_buffers"] not in ("grown", "largest"):
        raise ValueError(f'decoder_buffers is "grown" or "largest", not {decoder["decoder_buffers"]!r}')
    if device == "gpu":
        require_gpu()
    options = {"device": device, "device_id": device_id, "dtype": dtype, **pace}
    # Imported where they are used: `import pipelines.loader` must work where DALI does not.
    if choose_backend(backend) == "dali":
        from pipelines.dali.engine import DaliDecoder, DaliEngine

        plugin = choose(color_operator, device)
        return (
            "dali",
            partial(DaliEngine, plugin=plugin, **options, **decoder),
            DaliDecoder(device, device_id),
        )
    if color_operator == "plugin":  # an operator of DALI's, which "auto" did not find or nobody asked for
        raise DataError(
            "color_operator: plugin was asked for, and torchvision reads the images, which has no such operator: "
            "take auto, or a backend of dali"
        )
    from pipelines.torchvision_engine import TwinEngine, pil_decode

    return "torchvision", partial(TwinEngine, **options), pil_decode


class Loader:
    """Runs an engine step by step, starts it anew where asked, and finds the file behind a failure.

    `backend` is "dali" or "torchvision"; `own_color` is whether exact colour is our own operator's; `bad` maps the
    path of each undecodable file met so far to the reason, and `replaced` its index to that of the image shown in
    its place.
    """

    def __init__(
        self,
        index: Any,
        plan: Plan | CenterPlan | PassPlan,
        backend: str,
        engine: Callable[..., Engine],
        decode: Callable,  # see pipelines.find_bad_images
        *,
        bad_images: int,
        own_color: bool = False,
    ):
        self.backend = backend
        self.own_color = own_color
        self.bad: dict[str, str] = {}
        self.replaced: dict[int, int] = {}
        self._index, self._plan, self._engine_of, self._decode = index, plan, engine, decode
        self._bad_images = bad_images
        self._engine: Engine | None = None
        self._next_step = 0
        self._visits: dict[int, Visit] = {}

    def __call__(self, step: int) -> list[torch.Tensor]:
        """The views of `step`. Raises BadImage when more files are bad than are allowed."""
        while True:  # each round but the last finds a bad file that was not known, and few are allowed
            if self._engine is None or step != self._next_step:
                self.close()
                self._engine = self._engine_of(
                    self._index,
                    self._plan.augmentations,
                    visit=self.visit,
                    first_step=step,
                    batch=self._plan.batch,
                )
            try:
                views = self._engine.run()
            except RuntimeError as error:
                bad_visit = self.visit(step)
                self.close()  # a DALI pipeline that failed once fails for ever
                self._replace_bad_images(bad_visit, error)
                continue
            self._next_step = step + 1
            for past in [s for s in self._visits if s < step]:
                del self._visits[past]
            return views

    def visit(self, step: int) -> Visit:
        """Images, labels and parameters of `step`, stand-ins included: to be asked after `loader(step)`.

        Before it, a bad image of that step may not have been met yet, and its label would be the wrong one.
        """
        if step not in self._visits:
            self._visits[step] = self._plan(step, self.replaced)
        return self._visits[step]

    def close(self) -> None:
        """Frees the engine and what it has read ahead. The loader may be used again: it starts anew."""
        self._engine = None
        self._visits.clear()

    def _replace_bad_images(self, visit: Visit, error: RuntimeError) -> None:
        """Finds stand-ins for a step's undecodable files. Raises BadImage, or `error` if all are good."""
        found = {}
        if self._index.pixels is None:
            found = probe(self._index, visit.indices, self._decode)
        if not found:
            raise error
        if len(self.replaced) + len(found) > self._bad_images:
            self.bad.update(self._by_path(found))
            raise BadImage(list(self.bad.items()), visit.step, allowed=self._bad_images) from error
        self.count_bad(found)
        for i, reason in found.items():
            name, stand_in = self._index.name(i), self._index.name(self.replaced[i])
            print(
                f"step {visit.step}: {name} cannot be decoded ({reason}); {stand_in} stands in for it "
                f"({len(self.replaced)} of {self._bad_images} bad images allowed)",
                flush=True,
            )

    def count_bad(self, found: Mapping[int, str]) -> None:
        """Takes note of images (index -> reason) that must not be shown, and chooses who stands in for
        them."""
        self.bad.update(self._by_path(found))
        known = {**self.replaced, **found}
        # All are chosen anew: a stand-in of earlier may be among the bad ones now.
        self.replaced = {bad: self._stand_in(bad, known) for bad in known}

    def _by_path(self, found: Mapping[int, str]) -> dict[str, str]:
        return {str(self._index.path(i)): reason for i, reason in found.items()}

    def _stand_in(self, bad: int, known: Container[int]) -> int:
        for attempt in range(STAND_IN_ATTEMPTS):
            candidate = self._plan.stand_in(bad, attempt)
            if candidate not in known:
                return candidate
        raise DataError(f"no image can stand in for {self._index.name(bad)}: too many others are bad as well")


class PassLoader:
    """Iterates over (views, labels (B,), indices (B,)): each image once, the last batch ragged.

    `views` are one (B, 3, S, S) tensor for each of the plan's, on the device; labels and indices are int64 on
    the CPU, where they cost no transfer. May be iterated again.
    """

    def __init__(self, loader: Loader, plan: CenterPlan | PassPlan):
        self._loader, self._plan = loader, plan
        self.backend = loader.backend

    def __len__(self) -> int:
        return len(self._plan)

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor]]:
        try:
            for step in range(len(self._plan)):
                try:
                    views = self._loader(step)
                except BadImage as bad:
                    # Without the step: it would read as one of training's.
                    raise BadImage(bad.files, allowed=None) from bad
                visit = self._loader.visit(step)
                yield views, torch.from_numpy(visit.labels), torch.from_numpy(visit.indices)
        finally:
            self.close()

    def close(self) -> None:
        """Frees the engine; iterating again starts a new one."""
        self._loader.close()


class EvaluationLoader(PassLoader):
    """Iterates over (images (B, 3, S, S), labels (B,), indices (B,)): a PassLoader of one view."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for (images,), labels, indices in super().__iter__():
            yield images, labels, indices
