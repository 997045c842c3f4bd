"""The steps in which a dump is published and removed, by name: where a crash test strikes."""

from collections.abc import Callable
from enum import StrEnum
from typing import TypeAlias


class Step(StrEnum):
    """What has just been done; what follows has not begun.

    Between any two of them a process may die. Then the dump's name is absent or has a whole file, a manifest never
    describes another file than the one that is there, and the next `open` and `publish` end in the right state.
    """

    BEGUN = "a temporary file exists"
    WRITTEN = "every temporary file is whole and on the disk"
    KEPT_ASIDE = "the older attempt's dump has its second name, with a manifest"
    WITHDRAWN = "the older manifest is gone, so that nothing describes the name"
    NAMED = "one file has its final name"
    NAMES_SYNCED = "all files have their final names, on the disk"
    PUBLISHED = "the manifest stands: the dump is published"
    TIDIED = "what the dump made obsolete is gone"
    RETIRED = "the manifest of a dump that the retention removes has become a tombstone"
    REMOVED = "its files are gone"


AtStep: TypeAlias = Callable[[Step], None]
"""Called after each step."""


def nothing(_step: Step) -> None:
    """Does nothing at a step."""
