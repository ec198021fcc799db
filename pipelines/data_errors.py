"""Errors in the data, in words for the person who owns it."""

import errno

# Of a disk, a file server or a mount that fails: no image is at fault, and the next attempt can succeed.
LOST = (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENODEV, errno.ETIMEDOUT)


class DataError(Exception):
    """The data cannot be used as asked: a missing folder, names that do not match, an empty class. Exit code 3."""

    exit_code = 3


class CannotWrite(DataError):
    """An index or a pack cannot be written: the disk is full, or there is no permission. Exit code 5."""

    exit_code = 5


class BadImage(DataError):
    """One or more image files cannot be decoded.

    `files` holds (path, reason) for each. `step` is the training step that asked for them, None outside training.
    `allowed` is how many can be replaced by others, None where none can.
    """

    def __init__(self, files: list[tuple[str, str]], step: int | None = None, *, allowed: int | None = 0):
        self.files = files
        self.step = step
        where = ""
        if step is not None:
            where = f" up to step {step}" if allowed else f" in the batch of step {step}"
        count = "1 image" if len(files) == 1 else f"{len(files)} images"
        lines = "\n".join(f"  {path}: {reason}" for path, reason in files)
        remedy = "Repair or remove them"
        if allowed is not None:
            remedy += f", or allow more than {allowed} to be replaced by others (bad_images)"
        super().__init__(f"{count}{where} cannot be decoded:\n{lines}\n{remedy}.")
