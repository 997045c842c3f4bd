"""Tensors of unfinished rollouts in mapped files: placed once, given back by the references, within a cap."""

import errno
import gc
import os
import random
import resource
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fixtures.frames import ShardSource, direct_shards, events_of
from fixtures.small_disk import small_file_system
from rollcast.consumer import differences
from rollcast.consumer.assembler import Assembler
from rollcast.consumer.decisions import Complete
from rollcast.consumer.errors import ScratchFullError
from rollcast.consumer.restore import restore
from rollcast.consumer.rivals import place_beside
from rollcast.consumer.rollout import Place, Rollout
from rollcast.consumer.scratch import Scratch
from rollcast.schemas import DEFAULT_LIMITS, Column, DpShard, LimitError, SamplePart, TensorSlice, build_dump_payload
from rollcast.schemas.codec import RAW
from rollcast.schemas.errors import ContractError
from rollcast.schemas.joining import PlacedSlice
from rollcast.schemas.parts import MIN_PART_BYTES

Event = SamplePart | DpShard


def sources(seed: int = 0) -> list[ShardSource]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ShardSource(
            rank=rank,
            data_parallel_rank=rank,
            rollout_data={
                "response_lengths": [30_000, 0, 5],
                "log_probs": [torch.randn(length, generator=generator) for length in (30_000, 0, 5)],
                "tokens": [torch.arange(length) for length in (30_000, 0, 5)],
                "half": [torch.ones(3, 2, dtype=torch.bfloat16)] * 3,
                "nested": [{"a": [torch.ones(20_000, dtype=torch.bool)], "b": "x" * 5000}] * 3,
                "own": torch.randn(7, 3000, generator=generator),
                "partition": [rank, 2 + rank, 4 + rank],
            },
        )
        for rank in range(2)
    ]


def events(seed: int = 0, rollout_id: int = 5) -> list[Event]:
    return list(events_of("run", 1, rollout_id, sources(seed), max_part_bytes=MIN_PART_BYTES))


def parts(seed: int = 0, rollout_id: int = 5) -> list[SamplePart]:
    return [event for event in events(seed, rollout_id) if isinstance(event, SamplePart)]


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    made = Scratch(tmp_path / "scratch", 2**30, DEFAULT_LIMITS)
    made.open()
    yield made
    gc.collect()
    assert made.used_bytes == 0
    assert list((tmp_path / "scratch").iterdir()) == []


def assembled(scratch: Scratch, incoming: list[Event]) -> Rollout:
    target = Assembler(incomplete_after_s=1, max_resident_bytes=10**9)
    found = []
    for offset, event in enumerate(incoming):
        placed = scratch.place(event) if isinstance(event, SamplePart) and target.wants(event) else event
        decisions = target.add(placed, Place(0, offset), size=1, now=0)
        found += [decision.rollout for decision in decisions if isinstance(decision, Complete)]
    (rollout,) = found
    return rollout


@pytest.mark.parametrize("seed", range(10))
def test_placed_in_any_order_with_repeats_the_payload_is_the_direct_one(scratch: Scratch, seed: int) -> None:
    incoming = events() + events()[::5]
    random.Random(seed).shuffle(incoming)  # noqa: S311 - not for secrets

    restored = restore(assembled(scratch, incoming))

    direct = build_dump_payload(direct_shards(sources()), rollout_id=5, writer_rank=0)
    assert differences(restored.payload, direct) == []
    tensors = [sample["log_probs"] for sample in restored.payload["samples"]] if restored.payload else []
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_tensors_of_the_payload_stand_in_the_scratch_and_not_in_memory(scratch: Scratch) -> None:
    rollout = assembled(scratch, events())
    spans = [
        (np.frombuffer(column.value.whole, np.uint8).ctypes.data, len(column.value.whole))
        for shard in rollout.shards
        for slot in shard.slots
        for part in slot.parts
        for column in part.columns
        if isinstance(column.value, PlacedSlice) and column.value.total_bytes
    ]

    payload = restore(rollout).payload

    assert payload is not None
    for sample in payload["samples"]:
        for tensor in (sample["log_probs"], sample["tokens"], sample["nested"]["a"][0]):
            assert not tensor.nbytes or (tensor.data_ptr(), tensor.nbytes) in spans


def test_space_is_given_back_when_the_last_reference_goes(scratch: Scratch) -> None:
    rollout = assembled(scratch, events())
    used = scratch.used_bytes
    payload = restore(rollout).payload
    del rollout
    assert scratch.used_bytes == used  # the payload stands in it

    del payload

    assert scratch.used_bytes == 0


def test_a_repeat_with_other_bytes_does_not_change_what_is_there(scratch: Scratch) -> None:
    first = parts()[0]
    other = replace(first, columns=parts(seed=1)[0].columns)
    placed = scratch.place(first)
    before = data_of(placed)

    again = scratch.place(other)

    assert data_of(placed) == before
    assert data_of(again) != before


def data_of(part: SamplePart) -> list[bytes]:
    return [bytes(column.value.data) for column in part.columns if isinstance(column.value, TensorSlice)]


def test_what_may_be_a_repeat_takes_no_room_for_the_rest_of_its_tensors(scratch: Scratch) -> None:
    first = parts()[0]
    whole = TensorSlice(
        dtype="uint8", shape=(2**26,), total_bytes=2**26, offset=2**20, slice_bytes=4, codec="RAW", data=b"abcd"
    )
    part = replace(first, columns=(Column("long", 0, whole),))

    placed = scratch.place(part, apart=True)

    assert data_of(placed) == [b"abcd"]
    assert scratch.used_bytes <= 2**20


def raw_part(content: bytes, sent: bytes | None = None) -> SamplePart:
    size, data = len(content), content if sent is None else sent
    piece = TensorSlice(
        dtype="uint8", shape=(size,), total_bytes=size, offset=0, slice_bytes=size, codec=RAW, data=data
    )
    return replace(parts()[0], columns=(Column("x", 0, None), Column("bytes", 0, piece)))


def test_a_repeat_takes_no_room_and_what_differs_in_one_byte_waits_for_some(tmp_path: Path) -> None:
    part, other = raw_part(bytes(10_000)), raw_part(bytes(9_999) + b"x")
    scratch = Scratch(tmp_path, 2**16, DEFAULT_LIMITS)
    held = scratch.place(part, apart=True)
    assert scratch.used_bytes == 12_288
    others = [scratch.segment(4096) for _ in range((2**16 - scratch.used_bytes) // 4096)]
    assert scratch.used_bytes == 2**16

    assert place_beside(scratch, part, [held]) is part
    with pytest.raises(ScratchFullError):
        place_beside(scratch, other, [held])
    others.clear()

    rival = place_beside(scratch, other, [held])
    assert (data_of(held), data_of(rival)) == (data_of(part), data_of(other))
    assert place_beside(scratch, other, [held, rival]) is other


def test_a_corrupt_repeat_is_refused(scratch: Scratch) -> None:
    held = scratch.place(raw_part(bytes(1000)))
    with pytest.raises(ContractError):
        place_beside(scratch, raw_part(bytes(1000), sent=b"cut"), [held])


def test_what_comes_after_forget_does_not_touch_what_came_before(scratch: Scratch) -> None:
    incoming = events()
    before = assembled(scratch, incoming)

    scratch.forget()
    again = assembled(scratch, incoming)

    direct = build_dump_payload(direct_shards(sources()), rollout_id=5, writer_rank=0)
    assert differences(restore(before).payload, direct) == []
    del before
    assert differences(restore(again).payload, direct) == []


def test_a_tensor_whose_slices_stand_in_two_places_is_put_together(scratch: Scratch) -> None:
    incoming = events()
    target = Assembler(incomplete_after_s=1, max_resident_bytes=10**9)
    found = []
    for offset, event in enumerate(incoming):
        if offset % 3 == 0:
            scratch.forget()
        placed = scratch.place(event) if isinstance(event, SamplePart) else event
        decisions = target.add(placed, Place(0, offset), size=1, now=0)
        found += [decision.rollout for decision in decisions if isinstance(decision, Complete)]

    direct = build_dump_payload(direct_shards(sources()), rollout_id=5, writer_rank=0)
    assert differences(restore(found[0]).payload, direct) == []


def with_slice(part: SamplePart, **change: Any) -> SamplePart:
    columns = tuple(
        replace(column, value=replace(column.value, **change)) if isinstance(column.value, TensorSlice) else column
        for column in part.columns
    )
    return replace(part, columns=columns)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (-1, -4)},
        {"shape": (10**12,)},
        {"total_bytes": 2**50},
        {"shape": (2**40,), "total_bytes": 2**40, "dtype": "uint8"},
        {"dtype": "object"},
        {"codec": "ZSTD", "data": b"x"},
        {"codec": "SPOOL"},
        {"offset": 2**40},
        {"offset": -8},
        {"slice_bytes": -1},
        {"data": b""},
    ],
)
def test_hostile_slices_are_refused_before_anything_is_kept(scratch: Scratch, change: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        scratch.place(with_slice(parts()[0], **change))

    assert scratch.used_bytes == 0


def test_slices_that_announce_different_tensors_do_not_meet(scratch: Scratch) -> None:
    first = next(part for part in parts() if any(is_cut(column.value) for column in part.columns))
    placed = scratch.place(first)
    before = data_of(placed)
    (piece,) = [column.value for column in first.columns if is_cut(column.value)]
    assert isinstance(piece, TensorSlice)

    other = scratch.place(
        replace(
            first,
            part=first.part + 1,
            columns=tuple(
                replace(
                    column, value=replace(piece, shape=(piece.total_bytes // 4 + 1,), total_bytes=piece.total_bytes + 4)
                )
                for column in first.columns
                if is_cut(column.value)
            ),
        )
    )

    assert data_of(placed) == before
    assert len(data_of(other)) == 1


def is_cut(value: object) -> bool:
    return isinstance(value, TensorSlice) and value.dtype == "float32" and value.slice_bytes < value.total_bytes


def test_above_the_cap_a_part_has_to_wait_and_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 2 * 2**20, DEFAULT_LIMITS)
    first, second, third = (parts(rollout_id=rollout_id)[0] for rollout_id in range(3))
    kept = [scratch.place(first), scratch.place(second)]
    with pytest.raises(ScratchFullError, match=f"max_scratch_bytes={2 * 2**20}"):
        scratch.place(third)

    assert len(kept) == 2
    assert scratch.used_bytes <= 2 * 2**20
    kept.clear()
    assert scratch.used_bytes == 0
    with pytest.raises(LimitError, match="the room that a part takes"):
        Scratch(tmp_path, 2**18, DEFAULT_LIMITS).place(parts()[0])


def test_a_full_disk_is_an_error_and_leaves_nothing(scratch: Scratch, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            scratch.place(parts()[0])
    assert scratch.used_bytes == 0
    assert data_of(scratch.place(parts()[0]))


def test_no_file_stays_open_and_none_has_a_name(scratch: Scratch, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))

    kept = [scratch.place(parts(rollout_id=rollout_id)[0]) for rollout_id in range(50)]

    assert len(os.listdir("/proc/self/fd")) == before
    assert list((tmp_path / "scratch").iterdir()) == []
    assert scratch.used_bytes >= 50 * 2**20
    assert len(kept) == 50


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted), max_size=30))
def test_a_byte_is_free_until_it_is_filled(spans: list[list[int]]) -> None:
    from rollcast.consumer.scratch import _Tensor

    tensor = _Tensor(memoryview(b""), None)  # type: ignore[arg-type]  # it only has to live as long
    filled: set[int] = set()
    for start, end in spans:
        free = tensor.is_free(start, end)
        assert free == filled.isdisjoint(range(start, end))
        if free:
            tensor.fill(start, end)
            filled |= set(range(start, end))


def test_a_rollout_leaves_no_entry_behind(scratch: Scratch) -> None:
    placed = [scratch.place(part) for part in parts()]
    space = weakref.ref(scratch._rollouts[next(iter(scratch._rollouts.keys()))])
    assert space() is not None

    placed.clear()

    assert space() is None
    assert len(scratch._rollouts) == 0


def test_a_full_disk_is_full_scratch_where_something_can_be_given_up(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "disk", 4 * 2**20) as disk:
        scratch = Scratch(disk, 2**40, DEFAULT_LIMITS)
        held = [scratch.segment(2**20)]
        with pytest.raises(ScratchFullError):
            scratch.segment(2**30)
        held.clear()
        with pytest.raises(OSError, match="No space left"):
            scratch.segment(2**30)


def test_a_scratch_folder_that_was_removed_is_made_again(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path / "scratch", 2**30, DEFAULT_LIMITS)
    scratch.open()
    (tmp_path / "scratch").rmdir()
    assert len(scratch.segment(100)) == 4096


@pytest.mark.parametrize(
    "look_at",
    [
        lambda memory: memory[5:9],
        lambda memory: memory.data[5:9],
        lambda memory: np.frombuffer(memory.data, np.uint8)[5:9],
        lambda memory: torch.frombuffer(memory.data, dtype=torch.uint8)[5:9],
    ],
    ids=["array", "memoryview", "array of a memoryview", "tensor"],
)
def test_a_segment_is_used_again_with_its_pages_once_nothing_refers_to_it(
    scratch: Scratch, look_at: Callable[[np.ndarray[Any, Any]], Any]
) -> None:
    size = 64 * 2**20
    memory = scratch.segment(size)
    memory.fill(7)
    address, view = memory.ctypes.data, look_at(memory)
    del memory
    other = scratch.segment(size)
    assert other.ctypes.data != address, "somebody still looks at the first"
    other.fill(8)
    assert bytes(view) == bytes([7]) * 4
    del view
    again = scratch.segment(size)
    assert again.ctypes.data == address
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    again.fill(9)
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < size / 4096 / 10


def test_spare_segments_take_no_room_from_what_is_needed(tmp_path: Path) -> None:
    scratch = Scratch(tmp_path, 256 * 2**20, DEFAULT_LIMITS)
    scratch.open()
    held = [scratch.segment(64 * 2**20) for _ in range(3)]
    held.clear()
    assert scratch.used_bytes == 0
    whole = scratch.segment(250 * 2**20)
    assert scratch.used_bytes == len(whole)
