"""Where two dumps differ."""

import math
import struct

import pytest
import torch

from rollcast.consumer import differences

OTHER_NAN = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]


def payload(**column: object) -> dict[str, object]:
    return {"format_version": 2, "samples": [{"tokens": torch.arange(3), **column}, {"tokens": torch.arange(2)}]}


def shown(a: object, b: object, *, rtol: float = 0.0, atol: float = 0.0, limit: int | None = None) -> list[str]:
    return [str(difference) for difference in differences(a, b, rtol=rtol, atol=atol, limit=limit)]


def test_equal_payloads_have_no_differences() -> None:
    assert (
        shown(payload(x=(1, None, b"a", {"k": [torch.empty(0)]})), payload(x=(1, None, b"a", {"k": [torch.empty(0)]})))
        == []
    )


def test_a_difference_names_sample_field_element_and_both_values() -> None:
    a, b = payload(log_probs=torch.tensor([1.0, 2.0, 3.0])), payload(log_probs=torch.tensor([1.0, 2.5, 4.0]))

    assert shown(a, b) == [
        "samples[0] log_probs: 2 of 3 elements differ, first at [1]: 2.0 against 2.5, largest distance 1"
    ]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, 1.0),
        (1, True),
        ((1,), [1]),
        ("a", b"a"),
        (None, 0),
        (0.0, -0.0),
        (math.nan, OTHER_NAN),
        (torch.tensor(1), torch.tensor(1.0)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(0, 3), torch.zeros(0, 2)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16)),
        ([1], [1, 2]),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({1: 0}, {True: 0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.tensor(True), torch.tensor(False)),
        (torch.tensor([1j]), torch.tensor([2j])),
    ],
)
def test_type_dtype_shape_order_and_bits_count(a: object, b: object) -> None:
    assert shown(payload(x=a), payload(x=b))


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        OTHER_NAN,
        torch.tensor([math.nan, math.inf]),
        torch.tensor([1.0, -0.1]).to(torch.float8_e5m2),
        torch.tensor([1 + 2j]),
        torch.tensor(3),
        torch.ones(4, 4)[::2, 1],
    ],
)
def test_the_same_bits_are_equal(value: object) -> None:
    assert shown(payload(x=value), payload(x=value)) == []


def test_a_strided_tensor_equals_its_contiguous_copy() -> None:
    strided = torch.arange(12.0).reshape(3, 4).T

    assert shown(strided, strided.contiguous()) == []


def test_within_a_tolerance_floats_are_equal_but_nothing_else_is() -> None:
    a, b = (
        payload(x=torch.tensor([1.0, math.nan]), y=2.0, z=3),
        payload(x=torch.tensor([1.001, math.nan]), y=2.001, z=3),
    )

    assert len(shown(a, b)) == 2
    assert shown(a, b, atol=0.01) == []
    assert shown(a, b, rtol=0.01) == []
    assert shown(torch.tensor([1]), torch.tensor([2]), atol=10) != []
    assert shown(math.inf, -math.inf, atol=10) != []
    assert shown(math.inf, 1.0, rtol=10) != []


def test_only_as_many_differences_as_asked_for_are_found() -> None:
    assert len(shown([0] * 100, [1] * 100, limit=3)) == 3
