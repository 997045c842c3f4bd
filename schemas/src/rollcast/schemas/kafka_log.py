"""What aiokafka logs: nothing while we tell a failure ourselves, then in moderation."""

import logging

_REPEAT_AFTER_S = 60.0

_client_log = logging.getLogger("aiokafka")


def hide_client_log() -> None:
    """Hides what the client says until a broker has let it in: its refusals are told in one sentence of ours."""
    _client_log.setLevel(logging.CRITICAL)


def show_client_log() -> None:
    """Shows warnings and errors of the client, each message once a minute; for the handlers that there are by now."""
    _client_log.setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(OncePerMinute())


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
