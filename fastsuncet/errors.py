"""Errors for the user, each with the exit code that a scheduler can act on; 3 is that of `pipelines.data_errors`."""


class FastSuncetError(Exception):
    """Base of every error for the user. Its text says what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(FastSuncetError):
    """A setting or an argument is missing, misspelled, out of range, or does not fit the world size or the data."""

    exit_code = 2


class NumericalError(FastSuncetError):
    """A loss or a weight is not finite. The text names the step, the loss term and the files."""

    exit_code = 4


class CheckpointError(FastSuncetError):
    """A checkpoint, or another file of a run, cannot be written or read, or it belongs to another config."""

    exit_code = 5


class Preempted(FastSuncetError):
    """A signal asked the run to stop. Everything is saved, and the same command continues it."""

    exit_code = 75  # EX_TEMPFAIL: requeue


class HungError(FastSuncetError):
    """A rank made no step for meta.timeout seconds. The same command continues from the newest checkpoint."""

    exit_code = 124
