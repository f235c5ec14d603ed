"""Names that a checkpoint's index may contain, whichever Python wrote it."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING as MEMORY_FORMAT,  # pyright: ignore[reportPrivateUsage]
)
from torch.distributed.checkpoint.metadata import Metadata

from launcher.train.checkpoint import file_format


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
