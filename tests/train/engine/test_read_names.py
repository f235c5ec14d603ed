"""Names that code reads, apart from what it only counts, collects or logs."""

from __future__ import annotations

import ast

import pytest

from launcher.train.engine.read_names import NamesRead


class Task:
    pass


@pytest.mark.parametrize(
    ("body", "read"),
    [
        pytest.param("self.n += 1", False, id="counted"),
        pytest.param("self.n = self.n + 1", False, id="counted by an assignment"),
        pytest.param("self.n = (1 + self.n) % 10", False, id="counted by a longer one"),
        pytest.param("self.n = self.n + 1; return self.n", True, id="counted and read"),
        pytest.param("self.n = self.n + f(self.n)", True, id="read by a function"),
        pytest.param("self.m = self.n + 1", True, id="read for another one"),
        pytest.param("self.n = 1; return self.n", False, id="set first"),
        pytest.param("self.n: int = 1; return self.n", False, id="set first with a type"),
        pytest.param("self.n: int; return self.n", True, id="declared"),
        *(pytest.param(f"self.log.{name}('at', self.n)", False, id=name)
          for name in ("info", "warn", "warning", "error", "exception", "critical")),
    ],
)  # fmt: skip
def test_names_that_a_method_reads(body: str, read: bool) -> None:
    reads = NamesRead()
    reads.visit(ast.parse(f"class Task:\n    def loss(self):\n        {body}"))
    assert reads.covers("task.n", Task()) == read
