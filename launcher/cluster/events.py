"""events.jsonl: what happened to a run beside training, one JSON object an event, in order."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from launcher.paths import RunPaths


def note(paths: RunPaths, event: str, **known: Any) -> None:
    """Append an event. ``event``: submitted, started, stopped, killed, requeued, not requeued,
    disconnected, failed, done, cancelled."""
    line = json.dumps({"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **known})
    with paths.events.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read(paths: RunPaths) -> list[dict[str, Any]]:
    try:
        lines = paths.events.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]
