"""Config keys of precision=float8: the group float8."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from launcher.config.key_facts import FREE, STEP, key

Float8Recipe = StrEnum(
    "Float8Recipe", {"rowwise_with_gw_hp": "rowwise_with_gw_hp", "rowwise": "rowwise", "tensorwise": "tensorwise"}
)
_ONLY = "precision=float8"


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Number format precision=float8: bf16, with linear layers whose products are computed in float8 by torchao."""

    recipe: Float8Recipe = key(
        Float8Recipe.rowwise_with_gw_hp, only=_ONLY, resume=FREE, affects=STEP, was="precision.float8_recipe"
    )
    """Numbers that share a scale. rowwise_with_gw_hp: those of a token, and the gradient of weights is computed in
    bf16, so that no number depends on the other tokens of a micro-batch; rowwise, tensorwise: faster, and the gradient
    depends on how samples are divided into micro-batches."""
    exclude: list[str] = key(["lora_"], only=_ONLY, resume=FREE, affects=STEP, was="precision.float8_exclude")
    """Regular expressions; a linear layer whose name contains a match stays in bf16. Default: the adapters of PEFT."""
    emulate: bool = key(False, only=_ONLY, resume=FREE, affects=STEP, was="precision.float8_emulate")
    """Round to float8 and multiply in fp32, on any device: slow, for tests."""
