"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math


def warmup_cosine(
    step: int,
    *,
    steps: int,
    warmup_steps: int,
    start_lr: float,
    lr: float,
    final_lr: float = 0.0,
    legacy: bool = False,
) -> float:
    """Return the learning rate of update `step` (the first is 0) in a run of `steps` updates (recipe section 4.2).

    It is linear from `start_lr` at step 0 to `lr` at step `warmup_steps`, then half a cosine to `final_lr` at
    `steps`, one past the last update: the last update's rate lies a little above `final_lr`. Without warm-up
    `start_lr` is unused. `step == steps` is allowed, a later step is not.

    `legacy` is the authors' first release, and so presumably the paper's runs: it subtracts the warm-up from
    the cosine's length twice, so that the rate touches `final_lr` at `steps - warmup_steps` and rises again
    from there (to 0.18 of 4.8 in 100 epochs with 10 of warm-up, to 0.005 in 500).

    Raises ValueError for a step outside the run, a warm-up longer than the run, or under `legacy` one that
    leaves no cosine (2 warmup_steps >= steps).
    """
    if not 0 <= step <= steps:
        raise ValueError(f"warmup_cosine: step {step} is outside the run, 0 to {steps}")
    if not 0 <= warmup_steps <= steps:
        raise ValueError(f"warmup_cosine: {warmup_steps} warm-up steps do not fit a run of {steps}")
    if legacy and warmup_steps and 2 * warmup_steps >= steps:
        raise ValueError(f"warmup_cosine: legacy needs more than {2 * warmup_steps} steps, got {steps}")
    if step < warmup_steps:
        return start_lr + (lr - start_lr) * step / warmup_steps
    length = steps - (2 if legacy else 1) * warmup_steps
    progress = (step - warmup_steps) / max(1, length)
    fraction = 0.5 * (1 + math.cos(math.pi * progress))
    # Exact at both ends, unlike final_lr + (lr - final_lr) * fraction.
    return fraction * lr + (1 - fraction) * final_lr
