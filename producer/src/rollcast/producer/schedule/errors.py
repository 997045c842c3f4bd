"""The error of the schedule."""

from rollcast.producer.errors import ProducerError


class ScheduleError(ProducerError, ValueError):
    """No schedule can be made of these samples and settings; the message says what to change."""
