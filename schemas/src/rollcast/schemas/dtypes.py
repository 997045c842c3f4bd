"""Names and sizes of the element types that the wire carries, without importing torch."""

ITEM_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Bytes per element by torch's name of the dtype (without `torch.`)."""

PACKED_VALUE = "value"
"""Pseudo dtype: the bytes are an Avro `Value` that is too large to stand inline."""


def item_bytes(dtype: str) -> int:
    """Returns the bytes per element of `dtype` (1 for packed values).

    Raises:
        KeyError: the name is not one of the wire's.
    """
    return 1 if dtype == PACKED_VALUE else ITEM_BYTES[dtype]
