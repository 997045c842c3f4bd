"""Coverage-guided search for inputs that break the readers; outside CI, by `make fuzz`.

    python tests/fuzz/coverage_guided.py TARGET CORPUS_FOLDER [libFuzzer options]

Drives the properties of the unit tests with libFuzzer, through atheris. It ends with an error at the first input that
provokes anything but a typed error, takes longer than 10 seconds, or needs more than 2 GiB; the input is kept in the
corpus folder's parent.
"""

import sys
from collections.abc import Callable
from hashlib import shake_256
from importlib import import_module
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

# Installed by the make target alone, so that its types are not there for the checkers.
atheris: Any = import_module("atheris")

with atheris.instrument_imports(include=["rollcast.schemas", "rollcast.consumer"]):
    from fixtures.hostile_frames import SEED_FRAMES, check_frame, check_value, mutated_frames, value_bodies
    from fixtures.hostile_parts import check_slot, hostile_slots
    from fixtures.hostile_streams import check_stream, hostile_streams
    from rollcast.schemas import SamplePart


def _check_record(frame: bytes) -> None:
    event = check_frame(frame)
    if isinstance(event, SamplePart):
        check_slot([event])


def _guided(strategy: st.SearchStrategy[object], check: Callable[..., object]) -> Callable[[bytes], object]:
    """Lets libFuzzer choose what the strategy draws."""

    @settings(deadline=None, database=None)
    @given(strategy)
    def test(example: object) -> None:
        check(example)

    untyped: Any = test
    run: Callable[[bytes], object] = untyped.hypothesis.fuzz_one_input
    return run


_TARGETS: dict[str, Callable[[], Callable[[bytes], object]]] = {
    "records": lambda: _check_record,
    "frames": lambda: _guided(mutated_frames, _check_record),
    "values": lambda: _guided(value_bodies, check_value),
    "slots": lambda: _guided(hostile_slots, check_slot),
    "streams": lambda: _guided(hostile_streams, check_stream),
}


def main() -> None:
    target, folder, *options = sys.argv[1:]
    corpus = Path(folder)
    corpus.mkdir(parents=True, exist_ok=True)
    # hypothesis draws from the bytes, and needs enough of them.
    seeds = SEED_FRAMES if target == "records" else [shake_256(bytes([number])).digest(4000) for number in range(20)]
    for number, seed in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    run = _TARGETS[target]()
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-artifact_prefix={corpus.parent}/{target}-",
        "-timeout=10",
        "-rss_limit_mb=2048",
        "-max_len=40000",
        "-len_control=0",
        *options,
    ]
    atheris.Setup(arguments, lambda data: run(data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
