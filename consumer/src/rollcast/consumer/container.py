"""Whether a file is what torch.save writes, as far as it can be told without torch, which takes seconds to load."""

from pathlib import Path

from rollcast.consumer.errors import DumpFileError, ShutFileError

_ZIP_MAGIC = b"PK\x03\x04"


def check_beginning(path: Path) -> None:
    """Returns if the file can be read and begins like an archive of torch.save.

    Raises:
        DumpFileError: it cannot, or does not; a `ShutFileError` where this user may not read it.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_ZIP_MAGIC))
    except IsADirectoryError as exc:
        raise DumpFileError(f"{path} is a folder; give the .pt file of a dump (only `verify` takes folders)") from exc
    except PermissionError as exc:
        raise ShutFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    except OSError as exc:
        raise DumpFileError(f"{path} cannot be read: {exc.strerror or exc}") from exc
    if magic != _ZIP_MAGIC:
        raise DumpFileError(f"{path} is not a torch file")
