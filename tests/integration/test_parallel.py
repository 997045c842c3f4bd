"""Where a process stands, and what it says when it cannot know."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest
import torch.distributed as dist

from rollcast.producer.errors import ProducerError
from rollcast.producer.parallel import ParallelLayout, current_layout
from rollcast.schemas.install import install_command


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


@pytest.mark.parametrize(
    ("hidden", "said"),
    [
        ("torch", f"rollcast.producer needs torch: {install_command('producer')}"),
        ("rollcast.producer.background", "import of rollcast.producer.background halted; None in sys.modules"),
    ],
)
def test_a_trainer_without_what_the_extra_brings_reads_one_sentence_with_its_remedy(hidden: str, said: str) -> None:
    program = f"import sys; sys.modules[{hidden!r}] = None; from rollcast.producer import Publisher"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"ModuleNotFoundError: {said}"
    assert "direct cause" not in done.stderr
    assert "another exception" not in done.stderr
