"""The main promise as a property: any rollout, cut, shuffled and repeated, comes back as the direct payload."""

from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from fixtures.frames import ShardSource, direct_shards, frames_of
from rollcast.consumer.assembler import Assembler
from rollcast.consumer.decisions import Complete, Duplicate
from rollcast.consumer.difference import differences
from rollcast.consumer.restore import restore
from rollcast.consumer.rollout import Place
from rollcast.schemas import DpShard, SamplePart, build_dump_payload, decode
from rollcast.schemas.dtypes import ITEM_BYTES
from rollcast.schemas.parts import MIN_PART_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([np.float64(1.0), np.int16(-3), np.bool_(True), np.arange(3), object(), len])
)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    name = draw(st.sampled_from(list(ITEM_BYTES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3)) if draw(st.booleans()) else [draw(st.integers(0, 30_000))]
    dtype: torch.dtype = getattr(torch, name)
    size = int(np.prod(shape)) * dtype.itemsize
    seed = draw(st.integers(0, 2**16))
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 2 if name == "bool" else 256, size, dtype=np.uint8))
    return raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)


_VALUES = st.recursive(
    _SCALARS | _tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(-5, 5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def _shards(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(0, 6))

    def one_per_sample(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=count, max_size=count)

    data: dict[str, Any] = {"response_lengths": draw(one_per_sample(st.integers(0, 9)))}
    for name in draw(st.lists(st.sampled_from(["tokens", "images", "x", "y", "answer"]), unique=True, max_size=4)):
        kind = draw(st.sampled_from(["list", "tuple", "rows", "own"]))
        if kind == "rows":
            data[name] = torch.arange(count * 3).reshape(count, 3)
        elif kind == "own":
            data[name] = draw(_VALUES)
        else:
            values = draw(one_per_sample(_VALUES))
            data[name] = values if kind == "list" else tuple(values)
    for name in ("partition", "sample_indices"):
        places = draw(st.none() | one_per_sample(st.none() | st.integers(0, 99)) | one_per_sample(st.integers(0, 99)))
        if places is not None or draw(st.booleans()):
            data[name] = places
    if draw(st.booleans()):
        data["raw_reward"] = draw(st.lists(st.floats(0, 1), max_size=8))
        data["num_microbatches"] = [count]
    return data


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    shards=st.lists(_shards(), max_size=4),
    seed=st.integers(0, 2**32),
    max_part_bytes=st.sampled_from([MIN_PART_BYTES, 50_000, 900 * 1024]),
)
def test_any_rollout_comes_back_as_the_direct_payload_in_any_order_with_repeats(
    shards: list[dict[str, Any]], seed: int, max_part_bytes: int
) -> None:
    sources = [
        ShardSource(rank=3 + 2 * rank, data_parallel_rank=rank, rollout_data=data) for rank, data in enumerate(shards)
    ]
    direct = build_dump_payload(direct_shards(sources), rollout_id=7, writer_rank=3)
    frames = frames_of("run", 1, 7, sources, max_part_bytes=max_part_bytes)
    if not shards:
        assert not frames
        return
    assert max(map(len, frames)) <= max_part_bytes
    order = Random(seed)  # noqa: S311  # a shuffle, not a secret
    repeats = order.choices(frames, k=order.randrange(len(frames)))
    mixed = [*frames, *repeats]
    order.shuffle(mixed)
    assembler = Assembler(incomplete_after_s=1.0, max_resident_bytes=2**40)
    completed, duplicates = [], 0
    for offset, frame in enumerate(mixed):
        record = decode(frame)
        assert isinstance(record, (SamplePart, DpShard))
        for decision in assembler.add(record, Place(0, offset), size=len(frame), now=0.0):
            if isinstance(decision, Complete):
                completed.append(decision.rollout)
            else:
                assert isinstance(decision, Duplicate)
                duplicates += 1
    event(f"parts: {len(frames) // 8 * 8}+")
    assert duplicates == len(repeats)
    (rollout,) = completed
    assert not differences(restore(rollout).payload, direct)
