"""The learning rate against the authors' two releases, and its properties."""

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsuncet.optim import warmup_cosine
from tests.support.vectors import load_vectors

RUN = re.compile(r"E(\d+)_ipe(\d+)_wu(\d+)_start([\d.]+)_ref([\d.]+)_final([\d.]+)")
rates = st.floats(1e-4, 10)
runs = st.integers(1, 2000).flatmap(
    lambda steps: st.fixed_dictionaries(
        {"steps": st.just(steps), "warmup_steps": st.integers(0, steps), "start_lr": rates, "lr": rates}
        | {"final_lr": st.floats(0, 1)}
    )
)


@pytest.mark.parametrize(("release", "legacy"), [("v0", True), ("v1", False)])
def test_warmup_cosine_is_the_authors_at_every_step(release, legacy):
    vectors = load_vectors(f"vectors_schedule_{release}")
    assert len(vectors) == 4
    for name, expected in vectors.items():
        epochs, per_epoch, warmup, start, lr, final = map(float, RUN.fullmatch(name).groups())
        steps, rates = int(epochs * per_epoch), {"start_lr": start, "lr": lr, "final_lr": final}
        run = {"steps": steps, "warmup_steps": int(warmup * per_epoch), **rates, "legacy": legacy}
        ours = [warmup_cosine(step, **run) for step in range(steps)]
        assert ours == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15), name


@given(run=runs)
def test_warmup_cosine_rises_and_falls_without_a_jump(run):
    run["start_lr"] = min(run["start_lr"], run["lr"])
    run["final_lr"] = min(run["final_lr"], run["lr"])
    rate = [warmup_cosine(step, **run) for step in range(run["steps"] + 1)]
    peak = run["warmup_steps"]
    assert rate[peak] == run["lr"]
    assert rate[0] == run["start_lr"] or not peak
    assert rate[-1] == run["final_lr"] or peak == run["steps"]
    rounding = 1e-12 * run["lr"]
    assert all(a <= b + rounding for a, b in pairwise(rate[: peak + 1]))
    assert all(a >= b - rounding for a, b in pairwise(rate[peak:]))
    slope = (run["lr"] - run["start_lr"]) / max(1, peak)
    steepest = math.pi / 2 * (run["lr"] - run["final_lr"]) / max(1, run["steps"] - peak)
    assert all(abs(b - a) <= max(slope, steepest) * (1 + 1e-9) + rounding for a, b in pairwise(rate))
    assert all(0 <= r <= run["lr"] + rounding for r in rate)


@pytest.mark.parametrize(
    ("step", "change", "message"),
    [
        (-1, {}, "step -1 is outside the run, 0 to 100"),
        (101, {}, "step 101 is outside the run, 0 to 100"),
        (0, {"warmup_steps": -1}, "-1 warm-up steps do not fit a run of 100"),
        (0, {"warmup_steps": 50, "legacy": True}, "legacy needs more than 100 steps, got 100"),
    ],
)
def test_warmup_cosine_refuses_steps_outside_the_run(step, change, message):
    run = {"steps": 100, "warmup_steps": 10, "start_lr": 0.1, "lr": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        warmup_cosine(step, **run)
