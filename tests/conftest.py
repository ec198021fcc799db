"""Hypothesis without a clock: on a busy machine a slow example says nothing about the code."""

import contextlib

# A bare GPU machine may lack it. The tests that use it import it by themselves and say so; those for the GPU do not.
with contextlib.suppress(ImportError):
    from hypothesis import settings

    settings.register_profile("fastsuncet", deadline=None)
    settings.load_profile("fastsuncet")
