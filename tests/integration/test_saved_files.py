"""Saved files that torch maps, of any size, and that other readers of archives take."""

import io
import zipfile
from pathlib import Path

import torch

from rollcast.consumer.difference import differences
from rollcast.consumer.store.archive import Archive
from rollcast.consumer.store.pickled import pickled
from rollcast.consumer.store.saving import save


def saved_at(path: Path, content: object) -> None:
    with path.open("wb") as file:
        for _ in save(content, file.write):
            pass


def test_tensors_are_mapped_and_share_nothing(tmp_path: Path) -> None:
    tensor = torch.arange(10_000.0)
    path = tmp_path / "dump.pt"
    saved_at(path, {"same": [tensor, tensor], "part": tensor[5:9], "turned": tensor.reshape(100, 100).T})

    loaded = torch.load(path, weights_only=True, mmap=True)

    assert torch.equal(loaded["same"][0], tensor)
    assert torch.equal(loaded["same"][1], tensor)
    assert torch.equal(loaded["part"], tensor[5:9])
    assert torch.equal(loaded["turned"], tensor.reshape(100, 100).T)
    assert loaded["part"].untyped_storage().nbytes() == 16
    assert loaded["same"][0].data_ptr() != loaded["same"][1].data_ptr()


def test_torch_finds_the_data_without_looking_for_it(tmp_path: Path) -> None:
    from torch.utils.serialization import config

    content = {"a": torch.arange(5), "empty": torch.empty(0), "b": [torch.arange(70.0), torch.tensor(True)]}
    path = tmp_path / "dump.pt"
    saved_at(path, content)
    config.load.calculate_storage_offsets = True
    try:
        loaded = torch.load(path, weights_only=True, mmap=True)
    finally:
        config.load.calculate_storage_offsets = False
    assert differences(loaded, content) == []


def test_more_records_than_a_first_archive_could_have() -> None:
    out = io.BytesIO()
    archive = Archive(out.write)
    data, (tensor,) = pickled({"a": torch.arange(5)})
    for extra in range(66_000):
        archive.add(f"extra/{extra}", b"x")
    for name, record in (("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")):
        archive.add(name, record)
    archive.add("data/0", tensor.numpy().tobytes())
    archive.end()

    out.seek(0)
    assert torch.equal(torch.load(out, weights_only=True)["a"], tensor)
    with zipfile.ZipFile(out) as records:
        assert len(records.namelist()) == 66_004


def test_a_file_beyond_four_gigabytes(tmp_path: Path) -> None:
    large = torch.zeros(2**32 + 5, dtype=torch.uint8)
    path = tmp_path / "dump.pt"
    with path.open("wb") as file:

        def write_sparsely(data: bytes | memoryview) -> None:
            if len(data) == large.numel():
                file.seek(len(data), io.SEEK_CUR)
            else:
                file.write(data)

        shares = [*save({"large": large, "last": torch.arange(7)}, write_sparsely)]

    assert shares == [0.5, 1]
    loaded = torch.load(path, weights_only=True, mmap=True)

    assert loaded["large"].shape == large.shape
    assert int(loaded["large"][-1]) == 0
    assert torch.equal(loaded["last"], torch.arange(7))
    with zipfile.ZipFile(path) as records:
        assert records.getinfo("archive/data/0").file_size == large.numel()
        assert records.getinfo("archive/data/1").header_offset > large.numel()
