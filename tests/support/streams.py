"""Streams of small pictures through both back-ends."""

import numpy as np
import pytest
import torch

from pipelines.backend import LoaderOptions, dali_problem
from pipelines.datasets.index import ImageIndex
from pipelines.loader import Loader, open_evaluation_loader
from pipelines.sampling.augmentation import Augmentation, Center
from pipelines.sampling.samplers import ClassSampler, UnlabeledSampler
from pipelines.sampling.step_plan import EvaluationPlan, Plan

needs_dali = pytest.mark.skipif(dali_problem() is not None, reason=f"DALI cannot be used: {dali_problem()}")
BACKENDS = [pytest.param("dali", marks=needs_dali), "torchvision"]
SMALL = Augmentation(size=32)


def unlabeled(
    index: ImageIndex, batch=6, world_size=1, rank=0, augmentations=(SMALL, SMALL), seed=0, role="unlabeled"
) -> Plan:
    sampler = UnlabeledSampler(len(index), batch, world_size, seed)
    return Plan(index, sampler, augmentations, seed=seed, role=role, rank=rank)


def labeled(index: ImageIndex, indices: np.ndarray, world_size=1, rank=0) -> Plan:
    sampler = ClassSampler(indices, index.labels[indices], 3, 2, world_size, seed=0)
    return Plan(index, sampler, (SMALL,), seed=0, role="labeled", rank=rank)


def opened(plan: Plan, backend: str = "auto", *, bad_images=0, **options) -> Loader:
    options = {"threads": 1, "backend": backend, **options}
    return Loader(plan, LoaderOptions(**options), bad_images=bad_images)


def evaluation(index: ImageIndex, indices, backend: str, batch=4, size=32, resize=32):
    plan = EvaluationPlan(index, indices, batch, (Center(size, resize),))
    return open_evaluation_loader(plan, LoaderOptions(threads=1, backend=backend))


def assert_same(views: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert len(views) == len(others)
    assert all(torch.equal(view, other) for view, other in zip(views, others))
