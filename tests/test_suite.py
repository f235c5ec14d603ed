"""The suite's own lists name files that are there, and that may be dealt out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import DEALT_OUT, LONG, WAITING

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", [*WAITING, *LONG, *DEALT_OUT])
def test_the_files_that_are_named_are_there(file: str) -> None:
    assert (TESTS / f"{file}.py").is_file()


@pytest.mark.parametrize("file", DEALT_OUT)
def test_what_is_dealt_out_shares_nothing_long_in_the_making(file: str) -> None:
    shared = ('scope="module"', ": Hosts", ": Cluster")  # whose fixtures are a module's
    text = (TESTS / f"{file}.py").read_text()
    assert not [words for words in shared if words in text]
