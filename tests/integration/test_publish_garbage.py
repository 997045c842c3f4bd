"""What a publish leaves to Python's garbage collector, which stops a whole trainer while it runs."""

import gc
from pathlib import Path

import torch

from fixtures.publishers import spool_publisher
from fixtures.waiting import wait_until
from rollcast.producer.spool.folder import SpoolFolder


def test_thousands_of_tensors_are_not_thousands_of_objects_to_collect(tmp_path: Path) -> None:
    samples, fields, rollouts = 200, 10, 5
    data = {
        "response_lengths": [3] * samples,
        **{f"field-{number}": [torch.ones(3) for _ in range(samples)] for number in range(fields)},
    }
    publisher, spool = spool_publisher(tmp_path), SpoolFolder(tmp_path)
    collections: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        for rollout_id in range(rollouts):
            publisher.publish(rollout_id, data)
        wait_until(lambda: len(spool.bundles()) == rollouts)
    finally:
        gc.callbacks.remove(note)
    publisher.close(0.1)
    # 2,000 tensors a rollout, of each of which only the shape is an object until the rollout is committed.
    most_objects = 2 * samples * fields * rollouts
    assert len(collections) <= most_objects // gc.get_threshold()[0]
