"""Config keys of strategy.compress=powersgd: the group powersgd."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.key_facts import FREE, STEP, at_least, key

_ONLY = "strategy.compress=powersgd"


@dataclass(frozen=True, kw_only=True)
class PowersgdConfig:
    """Gradients that DDP sends as low-rank factors (strategy.compress=powersgd)."""

    rank: int = key(1, at_least(1), only=_ONLY, resume=FREE, affects=STEP, was="strategy.powersgd_rank")
    """Rank of the factors."""
    start: int = key(10, at_least(2), only=_ONLY, resume=FREE, affects=STEP, was="strategy.powersgd_start")
    """Synchronisations sent uncompressed before compression starts."""
