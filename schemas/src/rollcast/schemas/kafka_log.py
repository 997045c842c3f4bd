"""What aiokafka logs, in moderation."""

import logging

_REPEAT_AFTER_S = 60.0


class OncePerMinute(logging.Filter):
    """Shows a message of aiokafka once a minute: while a broker is down it repeats several in each second."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether the record is shown."""
        if not record.name.startswith("aiokafka"):
            return True
        last = self._shown.get(record.msg)
        if last is not None and record.created - last < _REPEAT_AFTER_S:
            return False
        self._shown[record.msg] = record.created
        return True
