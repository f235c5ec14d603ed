"""Content of a checkpoint's files, and files that its index may name, whoever wrote them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MEMORY_FORMAT,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import Metadata

import launcher
from launcher.errors import WrongCheckpoint
from launcher.train.checkpoint import file_format
from launcher.train.checkpoint.weights import CheckpointWeights
from tests.infra.checkpoints import make_checkpoint


class By:
    """Pickled as an attribute of something: so Python 3.11.2, Debian 12's, writes a member of an Enum."""

    def __init__(self, owner: Any, name: str) -> None:
        self.told = (owner, name)

    def __reduce__(self) -> Any:
        return getattr, self.told


def read(value: object) -> object:
    return file_format._Unpickler(io.BytesIO(pickle.dumps(value))).load()


def test_a_member_of_an_enum_is_read_in_either_form() -> None:
    member = MEMORY_FORMAT.TORCH_CONTIGUOUS_FORMAT
    assert read(member) is member
    assert read(By(MEMORY_FORMAT, member.name)) is member


@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (MEMORY_FORMAT, "__class__"), (MEMORY_FORMAT, "mro")]
)
def test_no_other_attribute_is(owner: Any, name: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match="which no checkpoint needs"):
        read(By(owner, name))


def redirected(directory: Path, place: object) -> Path:
    """Let the index of a checkpoint name another file for each tensor."""
    index = directory / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = dataclasses.replace(info, relative_path=place)
    index.write_bytes(pickle.dumps(metadata))
    return directory


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_file_of_another_directory_is_read(tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", {"a": torch.ones(2)}) / "__0_0.distcp"
    for number, place in enumerate((str(other), "../other/__0_0.distcp", "sub/../../other/__0_0.distcp", "..", other)):
        crafted = redirected(make_checkpoint(tmp_path / str(number), {"a": torch.zeros(2)}), place)
        with pytest.raises(WrongCheckpoint, match=r"\.metadata cannot be read: it names .*not in its|TypeError"):
            file_format.read_values({"model.a": torch.zeros(2)}, crafted, no_dist=True)
        with pytest.raises(WrongCheckpoint, match=r"\.metadata cannot be read"):
            CheckpointWeights(crafted)
    manifest = tmp_path / "0" / "manifest.json"
    for name in (str(other), "../other/__0_0.distcp", ".."):
        manifest.write_text(
            json.dumps({"format": file_format.CHECKPOINT_FORMAT, "files": {name: {"bytes": 1, "crc32": 1}}})
        )
        assert file_format.read_manifest(tmp_path / "0") == (
            f"its manifest.json names {name}, which is not in its directory"
        )


@pytest.mark.parametrize(
    ("fields", "wrote"),
    [({"format": 99, "launcher_version": "9.1"}, "9.1"), ({"format": 1}, "an older one"), ({}, "an")],
)
def test_another_format_is_refused_with_both_versions(fields: dict[str, Any], wrote: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(fields | {"files": {}}))
    own, number = re.escape(launcher.__version__), file_format.CHECKPOINT_FORMAT
    words = rf"has format {fields.get('format')}, .* \({own}\) reads format {number}\.\n.*\({wrote}"
    with pytest.raises(WrongCheckpoint, match=words):
        file_format.read_manifest(tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_file_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "made", {"a": torch.zeros(2)})
    data = directory / "__0_0.distcp"
    data.unlink()
    os.mkfifo(data)
    assert file_format.problems(directory, {data.name: (0, 0)}) == [f"{data.name} is no regular file"]
    with pytest.raises(WrongCheckpoint, match=r"made cannot be read: Unreadable: .* is no regular file"):
        file_format.read_values({"model.a": torch.zeros(2)}, directory, no_dist=True)
    for name in (".metadata", "manifest.json"):
        (directory / name).unlink()
        os.mkfifo(directory / name)
    with pytest.raises(WrongCheckpoint, match=r"\.metadata cannot be read: .* is no regular file"):
        file_format.Reader(directory).read_metadata()
    assert "is no regular file" in file_format.read_manifest(directory)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_torch_cannot_load_is_told_with_its_cause(tmp_path: Path) -> None:
    """Its exception is no Exception, so it would end a process without a word."""
    directory = make_checkpoint(tmp_path / "made", {"a": torch.zeros(2), "b": torch.zeros(2)})
    with pytest.raises(WrongCheckpoint, match=r"made cannot be read: (?s:.)*Restore the checkpoint from a copy"):
        file_format.read_values({"model.c": torch.zeros(2)}, directory, no_dist=True)
    dcp.save({"model.a": torch.zeros(2)}, checkpoint_id=tmp_path / "whole", no_dist=True)
    (tmp_path / "whole" / "__0_0.distcp").write_bytes(b"no tensor")
    with pytest.raises(WrongCheckpoint, match="whole cannot be read: "):
        file_format.read_values({"model.a": torch.zeros(2)}, tmp_path / "whole", no_dist=True)
