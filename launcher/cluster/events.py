"""events.jsonl: what happened to a run beside training, one JSON object an event, in order."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, cast

from launcher.paths import RunPaths


def note(paths: RunPaths, event: str, **known: Any) -> None:
    """Append an event. ``event``: submitted, changed, started, restarted, stopped, killed, requeued, not requeued,
    hang, disconnected, lost, failed, done, cancelled."""
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **known})
    with paths.events.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(paths: RunPaths) -> list[dict[str, Any]]:
    """Without lines that are torn, or were written into each other by two hosts: the others still tell the story."""
    try:
        lines = paths.events.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [event for line in lines if (event := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    # the end of a torn line may be JSON too: a part of the event
    whole = isinstance(event, dict) and "at" in event and "event" in event
    return cast("dict[str, Any]", event) if whole else None
