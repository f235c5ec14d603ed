"""Facts beside each key: complete, and about keys that exist."""

from __future__ import annotations

import pytest

from launcher.config.key_facts import AFFECTED, key
from launcher.config.schema import facts_by_key, known_keys


def test_a_key_says_what_it_affects_and_whether_a_resume_may_change_it() -> None:
    known = known_keys()
    assert {name for name in facts_by_key() if not name.endswith(".*")} <= {*known}
    for name, facts in facts_by_key().items():
        assert facts.affects <= {*AFFECTED}
        assert all(condition.partition("=")[0] in known for condition in facts.only.split()), name
    with pytest.raises(TypeError, match="'resume' and 'affects'"):
        key(None)  # pyright: ignore[reportCallIssue]
