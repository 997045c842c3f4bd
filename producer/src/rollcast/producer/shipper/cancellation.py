"""Cancellations that aiokafka swallows."""

import asyncio


def pass_on_cancellation() -> None:
    """Raises a cancellation of this task that has not arrived; for after a client was closed.

    A client that closes waits for tasks that it has cancelled, and takes a cancellation of its caller for theirs.

    Raises:
        CancelledError: the task is being cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
