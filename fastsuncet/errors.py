"""The ways a run can end other than well, each with the exit code a scheduler can act on.

0 done, 2 the config is wrong (never retry), 3 the data is (`pipelines.data_errors.DataError`), 4 the numbers are, 5 no
checkpoint can be used, 75 saved on a signal (EX_TEMPFAIL: requeue).
"""


class FastSuncetError(Exception):
    """Base of every error that is for a person: its text says what is wrong, where, and what to do."""

    exit_code = 1


class ConfigError(FastSuncetError):
    """A setting is missing, misspelt, out of range, or does not fit the world size or the data."""

    exit_code = 2


class NumericalError(FastSuncetError):
    """A loss stopped being a number. The text names the step, the term and the files."""

    exit_code = 4


class CheckpointError(FastSuncetError):
    """A checkpoint cannot be written, or none can be read, or it belongs to another config."""

    exit_code = 5


class Preempted(FastSuncetError):
    """A signal asked the run to stop; everything is saved and the same command continues it."""

    exit_code = 75
