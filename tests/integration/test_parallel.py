"""Where a process stands, and what it says when it cannot know."""

import sys
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest
import torch.distributed as dist

from rollcast.producer.errors import ProducerError
from rollcast.producer.parallel import ParallelLayout, current_layout


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_without_torch_distributed_is_alone_and_writes() -> None:
    layout = current_layout()
    assert layout == ParallelLayout()
    assert layout.is_writer


@pytest.mark.usefixtures("world_of_one")
def test_missing_megatron_core_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ProducerError, match=r"cannot be imported .*install megatron-core 0.13 or newer"):
        current_layout()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("version", ["0.12.3", "0.9", "rc"])
def test_an_older_megatron_core_is_one_sentence(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    with pytest.raises(ProducerError, match=f"megatron-core is {version}; install 0.13 or newer"):
        current_layout()


@pytest.mark.usefixtures("world_of_one")
def test_groups_that_are_not_set_up_are_one_sentence() -> None:
    with pytest.raises(ProducerError, match="initialize_model_parallel"):
        current_layout()
