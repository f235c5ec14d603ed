"""Config group of the number formats, which is part of the schema (launcher/config/schema.py)."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.choices import Float8Recipe, Parameters, PrecisionKind


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the parameters and of the forward and backward passes."""

    kind: PrecisionKind = PrecisionKind.auto
    """fp32, or autocast to bf16 or fp16 (with loss scaling), or float8: bf16, with linear layers whose products are
    computed in float8 by torchao. auto: bf16 if every worker's device computes it without emulation, else fp32; decided
    once for a run."""
    init_scale: float | None = None
    """fp16: first loss scale."""
    reduce_dtype: PrecisionKind | None = None
    """fsdp, hsdp: format in which gradients are summed between ranks. Default: fp32."""
    growth_interval: int | None = None
    """fp16: steps without overflow after which the scale doubles."""
    parameters: Parameters = Parameters.fp32
    """Trained parameters that model() returns in bf16 or fp16. fp32: convert them; keep: they stay, and their
    gradients and optimizer state have that format too. Frozen parameters stay, except with precision=fp32."""
    tf32: bool = False
    """GPUs: use TF32 for fp32 matrix products and convolutions; it rounds their inputs to 10 mantissa bits."""
    float8_recipe: Float8Recipe | None = None
    """float8: what shares a scale. rowwise_with_gw_hp: the numbers of a token, and the gradient of weights is computed
    in bf16, so that no number depends on the other tokens of a micro-batch; rowwise, tensorwise: faster, and the
    gradient depends on how samples are divided into micro-batches. Default: rowwise_with_gw_hp."""
    float8_exclude: list[str] | None = None
    """float8: regular expressions; a linear layer whose name contains a match stays in bf16. Default: [lora_], the
    adapters of PEFT."""
    float8_emulate: bool = False
    """float8: round to float8 and multiply in fp32, on any device: slow, for tests."""
