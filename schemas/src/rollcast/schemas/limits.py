"""Caps on what an untrusted record may claim."""

from dataclasses import dataclass, fields

DEFAULT_MAX_PART_BYTES = 900 * 1024
"""Largest encoded part: default brokers take it, with room for the batch header."""


MAX_NUMBER_KEYS = 4096
"""Most numbers among the keys of one map: unlike text, they can be chosen to make a dict of n keys take n * n steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Caps checked before anything is allocated; a record above one is refused with `LimitError`.

    Attributes:
        max_message_bytes: encoded size of one event.
        max_items: array items of one event, or of one packed value, all arrays together.
        max_inline_values: values inside the lists, tuples and maps of one part; the writer packs larger ones.
        max_part_raw_bytes: decoded size of all tensor slices of one part.
        max_depth: nesting of one event, in schema levels (a list in a list is four).
        max_tensor_bytes: size of one decoded tensor.
        max_slot_bytes: decoded size of all tensors of one slot.
        max_parts: parts of one slot.
        max_samples: samples of one shard.
        max_shards: data-parallel shards of one rollout.
        max_run_id_chars: length of a run id.
        max_name_chars: length of a column name.
    """

    max_message_bytes: int = 64 * 1024 * 1024
    max_items: int = 262_144
    max_inline_values: int = 65_536
    max_part_raw_bytes: int = 16 * 1024 * 1024
    max_depth: int = 200
    max_tensor_bytes: int = 4 * 1024**3
    max_slot_bytes: int = 16 * 1024**3
    max_parts: int = 1_000_000
    max_samples: int = 1_000_000
    max_shards: int = 65_536
    max_run_id_chars: int = 1024
    max_name_chars: int = 1024

    def __post_init__(self) -> None:
        """Refuses a cap that is not positive."""
        for field in fields(self):
            if getattr(self, field.name) <= 0:
                raise ValueError(f"Limits.{field.name} is {getattr(self, field.name)}; it must be positive")


DEFAULT_LIMITS = Limits()
