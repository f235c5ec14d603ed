"""Part of one site in an exchange through a store: a header in JSON, after its length, and the numbers."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from launcher.quantities import count
from launcher.train.outer.store_client import OuterExchange


def make_part(header: dict[str, Any], payload: Tensor) -> bytes:
    """Return a part. ``payload``: bytes in host memory."""
    text = json.dumps(header).encode()
    return b"%d\n%b%b" % (len(text), text, payload.numpy().tobytes())


def part_header(value: bytes) -> dict[str, Any]:
    """Return what a site says of its part."""
    length, _, rest = value.partition(b"\n")
    return json.loads(rest[: int(length)])


def part_problem(
    value: bytes | None, site: int, exchange: OuterExchange, norm: float, history: str, size: int
) -> str | None:  # fmt: skip
    """Return why a member's part of an exchange cannot be used; None if it can."""
    which = f"the part of site {site} in the average after step {exchange.step}"
    if value is None:
        return (
            f"{which} is not there any more, because all sites have saved checkpoints since.\n"
            "  Resume from a newer checkpoint: copy one of another site."
        )
    header = part_header(value)
    first = value.partition(b"\n")[0]
    expected = len(first) + 1 + int(first) + 8 * sum(header["buffers"].values()) + size
    if len(value) != expected:
        return f"{which} has {count(len(value), 'byte')} instead of {expected}: its model has other parameters."
    if header["history"] != history:
        return (
            f"{which} was computed after other averages than those of this site.\n"
            "  Their checkpoints are not of one job: resume all sites from their own."
        )
    if abs(header["norm"] - norm) > 1e-4 * max(abs(norm), 1e-30):
        return (
            f"{which} was computed with shared parameters of norm {header['norm']:g}, and this site's are {norm:g}.\n"
            "  The sites have drifted apart: resume all of them from checkpoints of the same step."
        )
    return None
