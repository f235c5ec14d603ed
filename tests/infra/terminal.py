"""Commands that are typed on a terminal."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Mapping
from pathlib import Path

from tests.helpers import launch_command, patience
from tests.infra import warm


def on_terminal(
    *arguments: str, cwd: Path, env: Mapping[str, str], until: str = "", then: bytes = b""
) -> tuple[int, str]:
    """Type `launch ARGUMENTS` on a terminal, and ``then`` once it shows ``until``. Return its status and output."""
    leader, follower = pty.openpty()
    process = warm.Popen(
        launch_command(*arguments), cwd=cwd, env={**os.environ, **env}, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    shown, end, typed = b"", time.monotonic() + patience(60), False
    while True:
        if not typed and until.encode() in shown:
            os.write(leader, then)
            typed = True
        readable, _, _ = select.select([leader], [], [], max(0.0, end - time.monotonic()))
        assert readable, shown
        try:
            shown += os.read(leader, 10_000)
        except OSError:  # the end of a terminal's output
            break
    status = process.wait(patience(60))
    os.close(leader)
    assert typed, shown
    return status, shown.decode(errors="replace")
