"""Hypothesis without a clock: on a busy machine a slow example says nothing about the code."""

from hypothesis import settings

settings.register_profile("fastsuncet", deadline=None)
settings.load_profile("fastsuncet")
