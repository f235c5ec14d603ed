"""Config group ``outer``: steps between sites."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.choices import OuterCompress, OuterKind


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Outer steps between sites that are joined by slow links. Not the gradient of one global batch: see
    docs/guides/outer.md."""

    kind: OuterKind = OuterKind.none
    """none: all ranks take each optimizer step together; diloco: the ranks of a site do, on its share of the global
    batch, and the sites average their progress every ``every`` steps (DiLoCo)."""
    group: str | int = "node"
    """diloco: the ranks of a site: node: of one host; shard: of one shard group of strategy.shard_size ranks (hsdp,
    whose sites then compute as fsdp); or their number."""
    every: int = 50
    """diloco: optimizer steps between two averages of a parameter."""
    lr: float = 0.7
    """diloco: learning rate of the outer step."""
    momentum: float = 0.9
    """diloco: Nesterov momentum of the outer step; 0 and lr=1: plain averaging."""
    fragments: int = 1
    """diloco: parts of the model that are averaged in turn, every/fragments steps apart (Streaming DiLoCo)."""
    delay: int = 0
    """diloco: optimizer steps for which a part is under way while training continues; below every."""
    mixing: float | None = None
    """diloco: share of the site's own parameters, which have changed during the delay, that is kept when an average
    arrives. Default: 0.5 with a delay; without one 0, and no other value."""
    compress: OuterCompress = OuterCompress.none
    """diloco: what is sent of the change of each parameter: none: all of it, in fp32; int8, int4: whole numbers, with a
    scale for each 256 or 64 parameters; topk: the 64 largest of each 4,096, in 8 bits. What is not sent is added to the
    next change (error feedback)."""
