"""A bundle on its way is one shipper's alone, and it shows on the bundle when that shipper dies."""

import contextlib
import fcntl
import os
from pathlib import Path

MAX_DEATHS = 20
"""A bundle is set aside when so many shippers have died while it was on its way."""

FORGIVEN_DEATHS = 2
"""So many may have come from outside: they keep a bundle's place in the order."""

_MARK = "shipping"


class Claims:
    """Bundles that this process has on their way.

    The lock of the spool does not do: a shipper for all runs and one for a single destination may meet, and so may
    those for two destinations when a run gets another one. Two at one bundle would be worse than sending it twice, for
    the first that is done gives the tensor file away to be filled again.
    """

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        self._marked: set[Path] = set()

    def take(self, bundle: Path) -> bool:
        """Makes a bundle this process's own, until it is given back; tells whether no other process has it.

        Raises:
            FileNotFoundError: it is not there any more.
        """
        descriptor = os.open(bundle, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            # A file system that cannot lock folders: the lock of the spool has to do.
            pass
        self._held[bundle] = descriptor
        if not os.path.samestat(os.fstat(descriptor), bundle.stat()):
            raise FileNotFoundError(f"{bundle} was replaced")
        # A full disk does not take the mark, which must not keep the bundle from leaving it.
        with contextlib.suppress(OSError), (bundle / _MARK).open("ab") as mark:
            mark.write(b".")
            self._marked.add(bundle)
        return True

    def deaths(self, bundle: Path) -> int:
        """Returns how many shippers have died while they had this bundle, which is not taken now."""
        try:
            return (bundle / _MARK).stat().st_size
        except OSError:
            return 0

    def suspicion(self, bundle: Path) -> int:
        """Returns how far back a bundle has to stand for those deaths; a few come from outside, and change nothing."""
        return max(0, self.deaths(bundle) - FORGIVEN_DEATHS)

    def clear_deaths(self, bundle: Path) -> None:
        """Forgets the deaths at a bundle that is taken: whoever moves it back from the poison wants it tried again."""
        with contextlib.suppress(OSError):
            os.unlink(_MARK, dir_fd=self._held[bundle])

    def survived(self, bundle: Path) -> None:
        """Notes that nothing of a bundle that is taken can kill any more: a death from now on is not its fault."""
        if bundle not in self._marked:
            return
        self._marked.remove(bundle)
        with contextlib.suppress(OSError):
            mark = os.open(_MARK, os.O_WRONLY, dir_fd=self._held[bundle])
            try:
                os.truncate(mark, max(0, os.fstat(mark).st_size - 1))
            finally:
                os.close(mark)

    def give_back(self, bundle: Path) -> None:
        """Ends the claim on a bundle, if there is one, wherever the bundle is by now."""
        if bundle in self._held:
            self.survived(bundle)
            os.close(self._held.pop(bundle))

    def give_all_back(self) -> None:
        """Ends all claims."""
        for bundle in tuple(self._held):
            self.give_back(bundle)
