"""The events against their schemas, and golden records of every released schema."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollcast.schemas import (
    Column,
    DeadLetter,
    DpShard,
    DumpCompleted,
    EncodeError,
    Event,
    MetricPoint,
    SamplePart,
    TensorRef,
    TensorSlice,
    decode,
    encode,
    framing,
)

_GOLDEN = Path(__file__).parent / "golden"

EVENTS: dict[str, Event] = {
    "SamplePart": SamplePart(
        run_id="run",
        attempt=3,
        rollout_id=7,
        data_parallel_rank=1,
        slot=0,
        rollout_position=4,
        sample_index=None,
        part=0,
        part_count=2,
        columns=(
            Column("reward", 0, 0.1),
            Column("mixed", 0, [None, True, 1, "text", b"raw", (1.5,), {1: "int key", "k": TensorRef(1)}]),
            Column(
                "mixed",
                1,
                TensorSlice(
                    dtype="bfloat16",
                    shape=(2,),
                    total_bytes=4,
                    offset=0,
                    slice_bytes=4,
                    codec="RAW",
                    data=bytes.fromhex("803fcdbd"),
                ),
            ),
        ),
    ),
    "DpShard": DpShard(
        run_id="run",
        attempt=3,
        rollout_id=7,
        data_parallel_rank=1,
        data_parallel_size=2,
        rank=6,
        tensor_parallel_size=1,
        pipeline_parallel_size=2,
        context_parallel_size=2,
        context_parallel_layout="zigzag-thd",
        sample_count=1,
        slot_digests=(b"0123456789abcdef", b"fedcba9876543210"),
        part_counts=(2, 1),
        raw_bytes=4,
        replaced_values=0,
        dropped_reason=None,
        published_at_ms=1_700_000_000_000,
    ),
    "DumpCompleted": DumpCompleted(
        run_id="run",
        attempt=3,
        rollout_id=7,
        path="dumps/run/7.pt",
        sha256="ab" * 32,
        file_bytes=10,
        complete=True,
        shard_count=2,
        sample_count=8,
        part_count=9,
        completed_at_ms=1_700_000_000_000,
    ),
    "MetricPoint": MetricPoint(
        run_id="run",
        attempt=3,
        rollout_id=7,
        name="k3_kl",
        per_rollout_mean=0.25,
        per_token_mean=None,
        rollout_count=4,
        token_count=12,
        non_finite_count=1,
        computed_at_ms=1_700_000_000_000,
    ),
    "DeadLetter": DeadLetter(
        topic="rollcast.records",
        partition=2,
        offset=11,
        reason="cut",
        key=None,
        value=b"\xc3",
        value_bytes=1,
        seen_at_ms=1_700_000_000_000,
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_has_exactly_the_fields_of_its_schema(name: str) -> None:
    schema = framing.current_schema(name)
    assert [field.name for field in fields(type(EVENTS[name]))] == [field["name"] for field in schema.avsc["fields"]]


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_comes_back_equal(name: str) -> None:
    assert decode(encode(EVENTS[name])) == EVENTS[name]


def test_every_schema_in_the_package_has_an_event_and_a_golden_record() -> None:
    released = {f"{schema.event}.{header[2:].hex()}" for header, schema in framing.schemas().items()}
    assert released == {file.stem for file in _GOLDEN.glob("*.hex")}


@pytest.mark.parametrize("file", sorted(_GOLDEN.glob("*.hex")), ids=lambda file: file.stem)
def test_a_golden_record_of_each_released_schema_still_decodes(file: Path) -> None:
    assert decode(bytes.fromhex(file.read_text())) == EVENTS[file.name.split(".")[0]]


def test_plain_values_keep_their_python_types() -> None:
    event = decode(encode(EVENTS["SamplePart"]))
    assert isinstance(event, SamplePart)
    values: Any = event.columns[1].value
    assert [type(value) for value in values] == [type(None), bool, int, str, bytes, tuple, dict]
    assert [type(key) for key in values[6]] == [int, str]


def test_a_double_is_not_rounded_to_a_float() -> None:
    event = decode(encode(EVENTS["SamplePart"]))
    assert isinstance(event, SamplePart)
    assert event.columns[0].value == 0.1


@pytest.mark.parametrize(
    ("field", "value"), [("run_id", None), ("attempt", "three"), ("rollout_id", 2**63), ("slot", None)]
)
def test_a_field_that_does_not_fit_is_refused_by_the_writer(field: str, value: object) -> None:
    wrong: dict[str, Any] = {name: getattr(EVENTS["SamplePart"], name) for name in SamplePart.__slots__} | {
        field: value
    }
    with pytest.raises(EncodeError, match="SamplePart"):
        encode(SamplePart(**wrong))


def test_a_misspelt_or_missing_field_is_refused_by_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    datum = framing.event_to_avro(EVENTS["DeadLetter"])
    for broken in ({**datum, "topics": "x"}, {key: value for key, value in datum.items() if key != "topic"}):
        monkeypatch.setattr(framing, "event_to_avro", lambda _, broken=broken: broken)
        with pytest.raises(EncodeError):
            encode(EVENTS["DeadLetter"])
