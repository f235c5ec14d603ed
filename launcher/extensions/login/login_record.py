"""Record of the login nodes to which this user has sent projects, in the user's own state directory.

It is not a file of the project: one that comes along with a cloned project must not decide where a command runs.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import secrets
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.extensions.login.login_shell import RemoteProject, record_file, runs_here
from launcher.rundir.files import read_json, value_from_json, write_json


def places(runs: Path) -> list[RemoteProject]:
    """Return the projects on login nodes that have runs of this directory of runs.

    Raises:
        UserError: the record is damaged.
    """
    return _places(_read(), runs)


def remember(place: RemoteProject) -> None:
    """Add a place, or replace the one that differs in its shell lines only."""
    runs = runs_here(place.runs)
    with _changed() as record:
        others = [each for each in _places(record, runs) if dataclasses.replace(each, setup=place.setup) != place]
        record["places"][str(runs.resolve())] = [dataclasses.asdict(each) for each in [*others, place]]


def project_id(directory: Path) -> str:
    """Return a number for a project in this directory of this user, which no other one has."""
    record = _read()
    if not record["id"]:
        with _changed() as record:
            record["id"] = record["id"] or secrets.token_hex(8)
    return hashlib.sha256(f"{record['id']}:{directory}".encode()).hexdigest()[:16]


def _read() -> dict[str, Any]:
    try:
        record: dict[str, Any] = {"id": "", "places": {}}
        record |= read_json(record_file()) or {}
        for runs in record["places"]:
            _places(record, Path(runs))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{record_file()}: is damaged: {error}.\n  Delete it; the next submission writes it.") from None
    return record


def _places(record: dict[str, Any], runs: Path) -> list[RemoteProject]:
    return [value_from_json(RemoteProject, entry) for entry in record["places"].get(str(runs.resolve()), [])]


@contextmanager
def _changed() -> Generator[dict[str, Any]]:
    """Context that yields the record and writes it at the end, while no other command does."""
    file = record_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o700)  # the shell lines may contain a secret
    with file.with_suffix(".lock").open("a") as lock:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        record = _read()
        yield record
        write_json(file, record)
