"""The daemon's memory does not grow with a rollout: a gigabyte passes through it."""

import pytest

from fixtures.installation import Installation
from fixtures.memory import MB, measured, one_large_rollout


@pytest.mark.timeout(300)
async def test_a_rollout_of_a_gigabyte_takes_less_than_400_mb_of_anonymous_memory(installed: Installation) -> None:
    usage = await measured(installed, one_large_rollout(1000 * MB), rollouts=1)

    assert usage.peak_bytes < 400 * MB
