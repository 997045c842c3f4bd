"""Records that cannot be used go to a topic of their own, with the reason."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor

from rollcast.consumer.brief import brief
from rollcast.consumer.errors import ConsumeError
from rollcast.consumer.outputs import Outputs, dead_letter
from rollcast.consumer.retry import Retry
from rollcast.consumer.rollout import Place
from rollcast.consumer.scratch import unplaced
from rollcast.consumer.stats import Stats
from rollcast.schemas import DeadLetter, DpShard, SamplePart, encode

_LETTERS_AT_ONCE = 64

_log = logging.getLogger("rollcast.consumer")


class DeadLetters:
    """Makes and delivers dead letters; whoever waits for that before an offset moves loses none.

    Args:
        topic: of the records.
        outputs: send them.
        retry: for that.
        stats: are counted.
        pool: encodes, off the event loop.
    """

    def __init__(self, topic: str, *, outputs: Outputs, retry: Retry, stats: Stats, pool: Executor) -> None:
        self._topic = topic
        self._outputs, self._retry, self._stats, self._pool = outputs, retry, stats, pool

    def letter(self, place: Place, key: bytes | None, value: bytes, kind: str, problem: str, run_id: str) -> DeadLetter:
        """Returns the dead letter of a record, which is counted and logged; `deliver` sends it."""
        self._stats.dead_letters[kind] += 1
        self._stats.count(run_id, kind)
        _log.warning("%s[%d]@%d goes to dead letters: %s", self._topic, place.partition, place.offset, brief(problem))
        reason = f"{kind}: {problem}"
        return dead_letter(self._topic, place.partition, place.offset, key=key, value=value, reason=reason)

    async def deliver(self, letters: Sequence[DeadLetter]) -> None:
        """Returns when the dead letters are delivered; one that Kafka refuses for good is counted and given up.

        Raises:
            StoppingError: the daemon stops before that.
        """
        if not letters:
            return
        try:
            await self._retry.until_done("send dead letters", lambda: self._outputs.send_dead_letters(letters))
        except ConsumeError as exc:
            if len(letters) > 1:
                for letter in letters:
                    await self.deliver([letter])
                return
            (letter,) = letters
            self._stats.lost_dead_letters += 1
            _log.error(
                "the dead letter of %s[%d]@%d is lost: %s", letter.topic, letter.partition, letter.offset, brief(exc)
            )

    async def set_aside(
        self, events: Iterable[tuple[SamplePart | DpShard, Place]], problem: str, kind: str = "content"
    ) -> None:
        """Returns when records whose event turned out to be unusable are dead letters; values are encoded anew.

        Raises:
            StoppingError: the daemon stops before that.
        """
        loop = asyncio.get_running_loop()
        letters: list[DeadLetter] = []
        for event, place in events:
            value = await loop.run_in_executor(self._pool, _encode, event)
            letters.append(self.letter(place, None, value, kind, problem, event.run_id))
            if len(letters) == _LETTERS_AT_ONCE:
                await self.deliver(letters)
                letters = []
        await self.deliver(letters)


def _encode(event: SamplePart | DpShard) -> bytes:
    return encode(unplaced(event) if isinstance(event, SamplePart) else event)
