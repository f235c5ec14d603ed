"""Config keys of outer steps: the group outer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from launcher.config.key_facts import NEW_RUN, STEP, above, at_least, between, forced, key, never

OuterKind = StrEnum("OuterKind", {"none": "none", "diloco": "diloco"})
_RULE = forced("it defines what is averaged between sites, and when")
_SITES = never("the checkpoints of sites differ; " + NEW_RUN)
_PARTS = never("averages that are under way are of other parts of the model")
_DELAY = never("averages that are under way arrive after it")
_ONLY = "outer=diloco"


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """Outer steps between sites that are joined by slow links. Not the gradient of one global batch: see
    docs/explanations/outer.md."""

    kind: OuterKind = key(OuterKind.none, resume=_SITES, affects=STEP, nullable=False)
    """none: all ranks take each optimizer step together; diloco: the ranks of a site do, on its share of the global
    batch, and the sites average their progress every ``every`` steps (DiLoCo)."""
    group: str | int = key("node", only=_ONLY, resume=_SITES, affects=STEP)
    """diloco: the ranks of a site: node: of one host; shard: of one shard group of strategy.shard_size ranks (hsdp,
    whose sites then compute as fsdp); or their number."""
    every: int = key(50, at_least(1), only=_ONLY, resume=_RULE, affects="learning time")
    """diloco: optimizer steps between two averages of a parameter."""
    lr: float = key(0.7, above(0), only=_ONLY, resume=_RULE, affects="learning")
    """diloco: learning rate of the outer step."""
    momentum: float = key(0.9, between(0, 1), only=_ONLY, resume=_RULE, affects="learning")
    """diloco: Nesterov momentum of the outer step; 0 and lr=1: plain averaging."""
    fragments: int = key(1, at_least(1), only=_ONLY, resume=_PARTS, affects=STEP)
    """diloco: parts of the model that are averaged in turn, every/fragments steps apart (Streaming DiLoCo)."""
    delay: int = key(0, at_least(0), only=_ONLY, resume=_DELAY, affects=STEP)
    """diloco: optimizer steps for which a part is under way while training continues; below every."""
    mixing: float | None = key(None, between(0, 1), only=f"{_ONLY} outer.delay", resume=_RULE, affects="learning")
    """diloco: share of the site's own parameters, which have changed during the delay, that is kept when an average
    arrives. Default: 0.5 with a delay; without one 0, and no other value."""

    @property
    def divides(self) -> str:
        """ "package.module:function" that divides a job into sites; empty: it is not divided."""
        return "" if self.kind is OuterKind.none else "launcher.extensions.outer.outer_plan:divided"

    def fragments_after(self, step: int) -> list[int]:
        """Return the fragments that are sent after a step, in turn within each round of ``every`` steps: the last one
        after all of them."""
        offsets = [self.every * (number + 1) // self.fragments % self.every for number in range(self.fragments)]
        return [fragment for fragment, offset in enumerate(offsets) if step % self.every == offset]
