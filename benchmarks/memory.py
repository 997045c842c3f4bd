"""How much memory the daemon takes for a rollout larger than it may hold, and for 200 open ones.

Anonymous memory, sampled every 20 ms, above what the imports take; real broker, default settings. Run it with
`make bench`, or with a size in MB as its argument.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fixtures.installation import installation
from fixtures.memory import MB, Usage, interleaved_rollouts, measured, one_large_rollout
from rollcast.consumer.broker import BrokerConfig, JvmBroker
from rollcast.consumer.topics import prepare_topics

ROLLOUTS = 200


def main() -> None:
    """Measures both and prints them."""
    total = int(sys.argv[1]) * MB if len(sys.argv) > 1 else 4000 * MB
    asyncio.run(compare(total))


async def compare(total: int) -> None:
    """Measures one rollout of that size, and many that have it together."""
    ways = {
        "one rollout": (1, lambda: one_large_rollout(total)),
        f"{ROLLOUTS} interleaved": (ROLLOUTS, lambda: interleaved_rollouts(ROLLOUTS, total // ROLLOUTS)),
    }
    results = {}
    print(f"{'what':16} {'raw MB':>8} {'sent MB':>8} {'peak MB':>8} {'of raw':>7} {'seconds':>8}")
    for way, (rollouts, records) in ways.items():
        usage = await measure(rollouts, records())
        results[way] = asdict(usage) | {"raw_bytes": total}
        print(
            f"{way:16} {total / MB:8.0f} {usage.sent_bytes / MB:8.0f} {usage.peak_bytes / MB:8.0f} "
            f"{usage.peak_bytes / total:7.1%} {usage.seconds:8.1f}"
        )
    out = Path(__file__).parent / "results" / "memory.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(results, indent=2) + "\n")


async def measure(rollouts: int, records: Iterator[tuple[bytes, bytes]]) -> Usage:
    """Measures on a broker and in a folder of its own, which are gone at the end."""
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        JvmBroker(BrokerConfig(data_dir=Path(folder) / "broker")) as at,
    ):
        installed = installation(at.bootstrap_servers, Path(folder))
        await prepare_topics(installed.config)
        return await measured(installed, records, rollouts)


if __name__ == "__main__":
    sys.exit(main())
