"""Installed package with entry points, in a directory of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def install(place: Path, name: str, points: Mapping[str, Mapping[str, str]], version: str = "1.0") -> dict[str, str]:
    """Declare entry points of a package in ``place``, and return the environment in which they are found."""
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {target}\n" for n, target in each.items()) for group, each in points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])])}
