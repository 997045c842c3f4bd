"""A rollout that was handed out to the dump that can be made of it. CPU work, for a worker thread."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollcast.consumer.config import ConsumeConfig
from rollcast.consumer.errors import LayoutError
from rollcast.consumer.restore import Restored, restore
from rollcast.consumer.rivals import settle
from rollcast.consumer.rollout import Place, Rollout, SlotCut
from rollcast.consumer.store import Dump, dump_of
from rollcast.schemas import SamplePart


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What became of a rollout that was handed out.

    Attributes:
        rollout: with the right parts.
        restored: of it.
        dump: of it, if it can be made.
        wrong: parts that had the identity of the right ones.
    """

    rollout: Rollout
    restored: Restored
    dump: Dump | None
    wrong: Sequence[tuple[SamplePart, Place]]

    @property
    def refused(self) -> list[SlotCut]:
        """The cuts whose content is not what was announced."""
        return [each.cut for bad in self.restored.bad_slots for each in (bad.slot, *bad.slot.rivals)]


def prepare(handed_out: Rollout, config: ConsumeConfig) -> Prepared:
    """Returns the rollout's dump, or why there is none."""
    rollout, wrong = settle(handed_out, config.limits)
    restored = restore(rollout, config.limits)
    dump = None
    if restored.payload is not None:
        try:
            dump = dump_of(rollout, restored.payload, restored.missing, config.layout)
        except LayoutError as exc:
            restored = replace(restored, payload=None, problem=str(exc))
    return Prepared(rollout=rollout, restored=restored, dump=dump, wrong=wrong)
