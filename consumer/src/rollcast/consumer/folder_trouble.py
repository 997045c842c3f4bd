"""Why a folder cannot be used, and what to do."""

from pathlib import Path


def folder_trouble(error: OSError, options: str) -> str:
    """Returns what is wrong with a folder that was given with these options, and the remedy."""
    if isinstance(error, IsADirectoryError):
        return f"{error.filename}: {error.strerror}; move that folder away"
    if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename is not None:
        path = Path(error.filename)
        file = next((each for each in (path, *path.parents) if each.is_file()), None)
        if file is not None:
            return f"{file} is a file and not a folder; move it away, or give another folder with {options}"
    return f"{error}; make that folder writable, or give another one with {options}"
