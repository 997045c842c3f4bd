"""How to install what an extra of Rollcast brings."""


def install_command(extra: str) -> str:
    """Returns the command, and where to run it: the distribution is on no index, so its name alone finds nothing."""
    return f"pip install -c constraints.txt '.[{extra}]' in a clone of Rollcast"
