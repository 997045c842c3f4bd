"""Manifests that somebody has damaged or forged: each field is what it must be, or the manifest is refused."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.stored import MISSING, dump
from rollcast.consumer.errors import DumpFileError
from rollcast.consumer.rollout import OffsetSpan
from rollcast.consumer.store import Dump, Manifest
from rollcast.consumer.store.describing import manifest_of
from rollcast.consumer.store.manifest import ManifestFile

FILES = tuple(ManifestFile(name=f"7_{rank}.pt", rank=rank, sha256="ab" * 32, size=5) for rank in (0, 1))
HUGE, DEEP = 2**200, "[" * 1000 + "]" * 1000


def manifest(made: Dump) -> Manifest:
    assert made.measuring is not None
    return manifest_of(made, FILES, made.measuring.result())


def content(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(manifest(dump(missing=MISSING, closing_events=1)).to_json())
    found["gaps"] = [[2, 5, 9]]
    return found | changes


def read(changed: object) -> Manifest:
    return Manifest.from_json(json.dumps(changed))


@pytest.mark.parametrize("made", [dump(), dump(missing=MISSING, closing_events=2), dump(attempt=-(2**63))])
def test_what_was_written_is_read(made: Dump) -> None:
    written = manifest(made)
    assert Manifest.from_json(written.to_json()) == written


def test_gaps_are_read() -> None:
    assert read(content()).gaps == (OffsetSpan(2, 5, 9),)


COUNTS = (
    "shards",
    "samples",
    "parts",
    "own_columns",
    "duplicates",
    "replaced_values",
    "raw_bytes",
    "wire_bytes",
    "written_at_ms",
)


@pytest.mark.parametrize("name", [*COUNTS, "rollout_id", "attempt"])
@pytest.mark.parametrize("value", [HUGE, -HUGE, 1.5, True, "1", None, [1], {}])
def test_a_number_is_a_whole_one_of_bounded_size(name: str, value: object) -> None:
    with pytest.raises(DumpFileError, match="not a manifest"):
        read(content(**{name: value}))


@pytest.mark.parametrize("name", [*COUNTS, "rollout_id"])
def test_a_count_is_not_below_zero(name: str) -> None:
    with pytest.raises(DumpFileError, match="-1 is no integer from 0"):
        read(content(**{name: -1}))


@pytest.mark.parametrize("name", content())
def test_without_any_of_its_fields_it_is_refused_or_the_same(name: str) -> None:
    changed = content()
    del changed[name]
    if name in ("gaps", "missing", "complete", "own_columns"):
        assert read(changed).id == read(content()).id
    else:
        with pytest.raises(DumpFileError):
            read(changed)


def each(name: str, *values: object) -> list[dict[str, Any]]:
    return [content(**{name: value}) for value in values]


def each_file(name: str, *values: object) -> list[dict[str, Any]]:
    files = content()["files"]
    return each("files", *([files[0] | {name: value}, files[1]] for value in values))


def lacking(name: str, *values: object) -> list[dict[str, Any]]:
    missing = content()["missing"]
    return each("missing", *(missing | {name: value} for value in values))


@pytest.mark.parametrize(
    "changed",
    [
        *each_file("name", "", ".", "..", "../x.pt", "a/b", "/etc/passwd", "a\0b", "\ud800", "x" * 300),
        *each_file("name", None, 7, ["x"], "7_1.pt"),
        *each_file("size", -1, HUGE, 2**63 - 1, "5", None),
        *each_file("sha256", "", "AB" * 32, "ab" * 33, "gh" * 32, 7, None),
        *each_file("rank", 2**31, -(2**31) - 1, "0", None),
        *each("files", [], {}, None, "x", [None], [[]], [{}]),
        *each("run_id", "", "x" * 100_000, "\ud800", None, 7),
        *each("stream", "", "other", "policy-loss/x", None, ["train"]),
        *each("offsets", [], {"x": [1, 2]}, {"-1": [1, 2]}, {"1": [2, 1]}, {"1": [1]}),
        *each("offsets", {"1": [1, 2, 3]}, {"1": "12"}, {"1": 7}, {"1": None}, {"\u00b2": [1, 2]}),
        *each("offsets", {"1": [HUGE, HUGE]}, {"1" * 30: [1, 2]}, {"1" * 5000: [1, 2]}),
        *each("digests", [], {"0": "x"}, {"0": None}, {"x": "ab" * 32}),
        *each("gaps", {}, [1], [[1, 2]], [[1, 2, 3, 4]], [[1, 3, 2]], [["1", 2, 3]], "123"),
        *each("versions", [], None, {"python": 3}, {"python": ["3"]}),
        *each("missing", [], {}, 7, {"shards": [1]}),
        *lacking("shards", {}, ["x"], [-1], None),
        *lacking("slots", [], {"x": [1]}, {"1": [-2]}, {"1": 7}),
        *each("metrics", [], {"a": None}, {"a": {}}, {"a": []}),
        *each("format", "rollcast.manifest/2", None, {}, "x" * 10_000),
        *([], {}, None, 7, "x"),
    ],
)
def test_what_no_store_can_have_written_is_refused(changed: object) -> None:
    with pytest.raises(DumpFileError, match="manifest") as caught:
        read(changed)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["per_rollout_mean", "per_token_mean", "rollout_count", "token_count", "failure"])
@pytest.mark.parametrize("value", ["x", [1], -HUGE, True])
def test_a_metric_is_a_finite_number_or_none_and_its_counts_are_counts(name: str, value: object) -> None:
    changed = content()
    metric = next(iter(changed["metrics"].values()))
    metric[name] = value
    if (name, value) in (("failure", "x"), ("per_rollout_mean", -HUGE), ("per_token_mean", -HUGE)):
        assert read(changed).metrics
        return
    with pytest.raises(DumpFileError, match="not a manifest"):
        read(changed)


@pytest.mark.parametrize("text", ["", "{", DEEP, '{"a":' * 1000, b"\xff", "NaN", '{"run_id": NaN}', "1" * 10_000])
def test_what_is_no_json_or_nests_too_deep_is_refused(text: str | bytes) -> None:
    with pytest.raises(DumpFileError, match="not a manifest"):
        Manifest.from_json(text)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "1" * 400])
def test_a_mean_that_is_not_finite_is_refused(word: str) -> None:
    changed = content()
    next(iter(changed["metrics"].values()))["per_token_mean"] = 123456.5
    with pytest.raises(DumpFileError, match="not a manifest"):
        Manifest.from_json(json.dumps(changed).replace("123456.5", word))


def places(value: object, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*at, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from places(inner, (*at, index))


PLACES = list(places(content()))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(at=st.sampled_from(PLACES[1:]), value=VALUES)
def test_with_any_value_at_any_place_it_is_a_manifest_that_can_be_written_again_or_refused(
    at: tuple[Any, ...], value: object
) -> None:
    changed: Any = content()
    holder = changed
    for step in at[:-1]:
        holder = holder[step]
    holder[at[-1]] = value
    try:
        made = read(changed)
    except DumpFileError:
        return
    assert Manifest.from_json(made.to_json()) == made
    assert made.sha256
    assert made.file_bytes >= 0
