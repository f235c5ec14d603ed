"""Batch solver: which batch sizes fit together. ``launcher.plan.windows`` maps windows to samples.

A job whose number of hosts is a range is planned for the most hosts. On fewer, global batch and micro-batch stay the
same, so that neither training nor a rank's memory changes; accumulation follows.

Standard library only; the plan, the workers and the tests all use these functions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launcher.config.key_facts import TOKENS, tokens_in
from launcher.config.schema import Balance, BatchConfig, Norm, OnOom, ShortWindow
from launcher.errors import ConfigError
from launcher.quantities import count

DEFAULT_GLOBAL_SIZE = 64
DEFAULT_MICRO_SIZE = 4
AUTO = "auto"
# values of batch.norm that installed packages add: they do not depend on the split of a window
EXACT_NORMS = tuple(norm.value for norm in Norm if norm.looks_ahead)


def ways_out_of_one_value(*, short: bool) -> str:
    """Return advice for a BatchNorm that fails on a micro-batch of one sample. ``short``: of a short window."""
    sizes = "batch.short_window=drop, another" if short else "a larger batch.micro_size or"
    ways = [f"{sizes} batch.global_size", *(f"batch.norm={name}" for name in EXACT_NORMS)]
    return f"Use {', '.join(ways)}, or a model() that returns the layer in eval mode."


@dataclass(frozen=True, kw_only=True)
class RampStage:
    """Stage of the batch ramp: ``windows`` of ``global_size`` samples, including skipped ones (fp16, no item)."""

    windows: int
    global_size: int


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Solved global batch: ``global_size == micro_size * accumulation * world_size`` if the ranks' shares are equal.

    Otherwise ``global_size`` is smaller than the product, by less than one micro-batch of every rank.

    Attributes:
        micro_size: samples per micro-batch, the largest if shares are unequal.
        ramp: stages before ``global_size`` is reached; they have lower accumulation.
        norm: statistics that a BatchNorm uses.
        on_oom: reaction to a rank running out of memory.
        balance: division of a window's samples into micro-batches.
        micro_tokens: most tokens of a micro-batch; a window may then have more micro-batches than ``accumulation``.
        sites: number of sites, each of which has windows of this size at the same time (see ``SitesPlan``).
    """

    global_size: int
    micro_size: int
    accumulation: int
    world_size: int
    ramp: tuple[RampStage, ...] = ()
    norm: Norm = Norm.leave
    on_oom: OnOom = OnOom.stop
    balance: Balance = Balance.none
    micro_tokens: int | None = None
    sites: int = 1

    def of_site(self, sites: int) -> Batch:
        """Return the part of one of ``sites`` sites, which divide the ranks and every window into equal parts."""
        return self._scaled(lambda number: number // sites, sites)

    @property
    def of_all_sites(self) -> Batch:
        """Return the batch of all sites together."""
        return self._scaled(lambda number: number * self.sites, 1)

    def _scaled(self, scaled: Callable[[int], int], sites: int) -> Batch:
        ramp = tuple(dataclasses.replace(stage, global_size=scaled(stage.global_size)) for stage in self.ramp)
        sizes = scaled(self.global_size), scaled(self.world_size)
        return dataclasses.replace(self, global_size=sizes[0], world_size=sizes[1], ramp=ramp, sites=sites)

    @functools.cached_property  # each window asks for it
    def unit(self) -> int:
        """Return the samples of one micro-batch on every rank."""
        return self.micro_size * self.world_size

    @property
    def sizes(self) -> list[int]:
        """Return the samples of a full window: after the ramp, and in each of its stages."""
        return [self.global_size, *(stage.global_size for stage in self.ramp)]

    def shrunk(self) -> Batch | None:
        """Return the same windows in micro-batches of half the size and tokens; None if micro_size is 1."""
        if self.micro_size == 1:
            return None
        return self.in_micro_batches_of(-(-self.micro_size // 2))

    def in_micro_batches_of(self, micro_size: int) -> Batch:
        """Return the same windows in micro-batches of ``micro_size``; ``micro_tokens`` changes in proportion."""
        accumulation = -(-self.global_size // (micro_size * self.world_size))
        tokens = None if self.micro_tokens is None else max(1, self.micro_tokens * micro_size // self.micro_size)
        return dataclasses.replace(self, micro_size=micro_size, accumulation=accumulation, micro_tokens=tokens)

    def on_one_rank(self) -> Batch:
        """Return the same windows on one rank, in micro-batches of the same size."""
        return dataclasses.replace(self, world_size=1, sites=1).in_micro_batches_of(self.micro_size)

    def of_ready_batches(self, size: int | None) -> Batch:
        """Return the same windows, counted in batches that are used as micro-batches.

        Args:
            size: samples of such a batch; None if that is not known.

        Raises:
            ConfigError: a window does not consist of whole batches.
        """
        micro, whole = self.micro_size, "the batches of the training data are the micro-batches, and are used whole."
        if size is not None and size != micro:
            remedy = f"Use batch.micro_size={size}, or give the DataLoader batch_size={micro}."
            raise ConfigError("batch.micro_size", micro, f"the training data has batches of {size} samples.", remedy)
        for window in self.sizes:
            if window % micro:
                key, remedy = "batch.global_size", f"Use a multiple of {micro} samples, the size of a batch."
                raise ConfigError(key if window == self.global_size else "batch.ramp", window, whole, remedy)
        keys = {"balance": self.balance is not Balance.none, "on_oom": self.on_oom is OnOom.shrink and micro > 1}
        for key in (key for key, refused in keys.items() if refused):
            value = getattr(self, key).value
            raise ConfigError(f"batch.{key}", value, whole, "Leave it out, or use the DataLoader's dataset instead.")
        ramp = tuple(dataclasses.replace(stage, global_size=stage.global_size // micro) for stage in self.ramp)
        return dataclasses.replace(self, global_size=self.global_size // micro, micro_size=1, ramp=ramp)

    def accumulation_at(self, index: int) -> int:
        """Return the accumulation of window ``index`` of the run if that window is full."""
        return -(-self.global_size_at(index) // self.unit)

    @property
    def even(self) -> bool:
        """Return whether all ranks have equally many samples in every full window."""
        return all(size % self.unit == 0 for size in self.sizes)

    @property
    def may_exceed_plan(self) -> bool:
        """Return whether a window may have more micro-batches than ``accumulation``."""
        return self.on_oom is OnOom.shrink or self.micro_tokens is not None

    @property
    def accumulates(self) -> bool:
        """Return whether a window may ever have several micro-batches."""
        return self.accumulation > 1 or self.may_exceed_plan

    @property
    def predicted_accumulation(self) -> int:
        """Return the micro-batches that bytes and memory are predicted for: with ``micro_tokens`` several, whose
        gradients some policies keep between them."""
        return self.accumulation if self.micro_tokens is None else max(2, self.accumulation)

    @property
    def random_parts(self) -> bool:
        """Return whether each rank's part of a window is a random one."""
        return self.balance is Balance.none

    @property
    def text(self) -> str:
        """Return a text such as "64 samples = 4 micro-batch × 8 accumulation × 2 ranks"."""
        ranks, total = count(self.world_size, "rank"), count(self.global_size, "sample")
        product = f"{self.micro_size} micro-batch × {self.accumulation} accumulation × {ranks}"
        if self.micro_tokens is not None:
            most = f"{count(self.micro_size, 'sample')} and {count(self.micro_tokens, 'token')}"
            return f"{total}, shared by {ranks} in micro-batches of at most {most}"
        if self.global_size == self.micro_size * self.accumulation * self.world_size:
            return f"{total} = {product}"
        size = self.global_size / (self.accumulation * self.world_size)
        return f"{total}, shared by {product}: {math.floor(size)} or {math.ceil(size)} in each micro-batch"

    def global_size_at(self, index: int) -> int:
        """Return the samples of window ``index`` of the run if that window is full."""
        for stage in self.ramp:
            if index < stage.windows:
                return stage.global_size
            index -= stage.windows
        return self.global_size


def require_tokens(value: Any) -> int | None:
    """Return the tokens of a sample as a task or a script states them; None if it states none.

    Raises:
        ConfigError: they are no number of tokens.
    """
    if value is None:
        return None
    try:
        tokens = operator.index(value)
    except TypeError:
        tokens = 0
    if tokens < 1:
        raise ConfigError("tokens_per_sample", value, "must be a whole number of at least 1, or None.")
    return tokens


def in_samples(config: BatchConfig, tokens: int | None) -> BatchConfig:
    """Return ``config`` with global_size in place of global_tokens.

    Args:
        tokens: tokens of each sample; None if they are not known.

    Raises:
        ConfigError: they are not known, the sizes contradict each other, or a sample would be divided.
    """
    if (value := config.global_tokens) is None:
        return config
    key, total = "batch.global_tokens", tokens_in(value)
    if total is None:
        raise ConfigError(key, value, TOKENS.problem)
    if tokens is None:
        raise ConfigError(
            key, value, "the tokens of a sample are not known.",
            "If all samples have equally many, give the task a method tokens_per_sample(); a loop of your own gives "
            "the number to make_plan(tokens_per_sample=...). Otherwise use batch.global_size, in samples.",
        )  # fmt: skip
    size, rest = divmod(total, tokens)
    if rest:
        raise ConfigError(
            key, value, f"{total:,} tokens are no whole number of samples, which have {tokens:,} each.",
            f"Nearest choices: {key}={_listed(_nearest_multiples(total, tokens))}.",
        )  # fmt: skip
    if config.global_size not in (None, size):
        raise ConfigError(
            key, value, f"is {count(size, 'sample')} of {tokens:,} tokens, and batch.global_size={config.global_size}.",
            "Leave one of the two out (=null).",
        )  # fmt: skip
    return dataclasses.replace(config, global_size=size, global_tokens=None)


def before_tokens(config: BatchConfig) -> BatchConfig:
    """Return ``config`` with a global batch that all ranks can share in place of one in tokens, for a plan that is
    made before the tokens of a sample are known."""
    if config.global_tokens is None:
        return config
    micro = config.micro_size if isinstance(config.micro_size, int) else 1
    return dataclasses.replace(
        config, global_size=None, global_tokens=None, micro_size=micro, accumulation=config.accumulation or 1, ramp=[]
    )


def solve_batch(config: BatchConfig, world_size: int) -> Batch:
    """Derive the sizes that the user left open from the sizes that are set.

    Nothing is rounded, except accumulation with ``uneven``.

    Raises:
        ConfigError: a size below 1, sizes that contradict each other, or a division with a remainder; the message
            lists the nearest choices that work.
    """
    sizes = {"global_size": config.global_size, "micro_size": _fixed_micro(config), "accumulation": config.accumulation}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"batch.{name}", value, "must be at least 1.", "Leave it out to have it derived.")
    total, micro, accumulation = config.global_size, _fixed_micro(config), config.accumulation
    if total is None and micro is not None and accumulation is not None:
        total = micro * accumulation * world_size
    total = DEFAULT_GLOBAL_SIZE if total is None else total
    if micro is None:
        micro = _derive_micro(config, total, world_size)
    rounds = -(-total // (micro * world_size))
    if accumulation is None:
        accumulation = rounds if config.uneven else _divide(total, micro, world_size, "micro_size", micro)
    if accumulation != rounds or (not config.uneven and micro * accumulation * world_size != total):
        product = micro * accumulation * world_size
        if config.uneven:
            raise ConfigError(
                "batch.accumulation", accumulation,
                f"must be {rounds}: {total} samples, {count(world_size, 'rank')}, micro-batches of at most {micro}.",
                f"Use batch.accumulation={rounds}, or leave it out (=null).",
            )  # fmt: skip
        raise ConfigError(
            "batch.global_size", total,
            f"micro_size {micro} x accumulation {accumulation} x {world_size} ranks is {product}, and must be {total}.",
            "Leave one of the three out (=null) and it is derived from the other two.",
        )  # fmt: skip
    ramp = _solve_ramp(config.ramp, 1 if config.uneven else micro * world_size, total)
    return Batch(
        global_size=total, micro_size=micro, accumulation=accumulation, world_size=world_size, ramp=ramp,
        norm=config.norm, on_oom=OnOom.shrink if config.micro_size == AUTO else config.on_oom, balance=config.balance,
        micro_tokens=None if config.micro_tokens is None else tokens_in(config.micro_tokens),
    )  # fmt: skip


def with_any_global_size(config: BatchConfig, error: ConfigError) -> tuple[BatchConfig, str]:
    """Return ``config`` with a global batch that any number of ranks can share, and a note on it.

    Raises:
        ConfigError: ``error``, if the user has chosen the global batch.
    """
    sizes = config.micro_size, config.accumulation
    if config.global_size is not None or config.micro_size == AUTO or None not in sizes:
        raise error
    config = dataclasses.replace(config, micro_size=config.micro_size or 1, accumulation=config.accumulation or 1)
    return config, (
        f"batch.global_size is not set, and its default cannot be shared by the ranks: batch.micro_size="
        f"{config.micro_size} and batch.accumulation={config.accumulation} are assumed."
    )


def solve_largest(config: BatchConfig, world_size: int) -> Batch:
    """Return the batch on the most hosts. A range of hosts permits unequal shares where needed, without ``uneven``."""
    try:
        return solve_batch(config, world_size)
    except ConfigError as error:
        if config.uneven:
            raise
        try:
            return solve_batch(dataclasses.replace(config, uneven=True), world_size)
        except ConfigError:
            raise error from None


def solve_smaller(config: BatchConfig, largest: Batch, world_size: int) -> Batch:
    """Return the same global batch in micro-batches of the same size, on fewer ranks."""
    sizes = {"global_size": largest.global_size, "micro_size": largest.micro_size, "accumulation": None}
    # batch.micro_size=auto has set on_oom
    return solve_largest(dataclasses.replace(config, **sizes, on_oom=largest.on_oom), world_size)


def batch_notes(config: BatchConfig, batches: dict[int, Batch], batch_norms: int | None) -> tuple[str, ...]:
    """Return the notes on the numbers of hosts that the job may have.

    Args:
        batches: by number of hosts.
        batch_norms: number of the model's BatchNorm layers.
    """
    lines: list[str] = []
    most = max(batches)
    uneven = [n for n, batch in sorted(batches.items()) if not batch.even]
    if uneven and not config.uneven:
        lines.append(
            f"On {_listed(uneven)} host{'' if uneven == [1] else 's'} the ranks take unequal shares of a window, with "
            "the same gradient (as with batch.uneven=true)."
        )
    if config.accumulation is not None:
        lines.append(f"batch.accumulation={config.accumulation} applies to {most} hosts; on fewer it is higher.")
    if batch_norms and (config.norm is Norm.sync or (config.norm is Norm.leave and uneven)):
        lines.append(
            "What a BatchNorm normalises by depends on the number of hosts; with "
            f"batch.norm={' or '.join((*EXACT_NORMS, Norm.freeze.value))} it does not."
        )
    return tuple(lines)


def _listed(numbers: list[int]) -> str:
    """Return ``2``, ``2 or 3``, ``2, 3 or 5``."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _fixed_micro(config: BatchConfig) -> int | None:
    if isinstance(config.micro_size, str) and config.micro_size != AUTO:
        raise ConfigError("batch.micro_size", config.micro_size, "must be a whole number, or auto.")
    return None if isinstance(config.micro_size, str) else config.micro_size


def _solve_ramp(stages: list[list[int]], unit: int, total: int) -> tuple[RampStage, ...]:
    """Validate the ramp.

    Args:
        unit: samples of one micro-batch on every rank.
        total: global batch after the ramp.
    """
    ramp: list[RampStage] = []
    for stage in stages:
        if len(stage) != 2 or min(stage) < 1:
            raise ConfigError(
                "batch.ramp", stages, f"{stage} is not a stage.",
                "Write [windows, samples] for each, both at least 1, such as batch.ramp=[[100,16],[200,32]].",
            )  # fmt: skip
        windows, size = stage
        before = ramp[-1].global_size if ramp else 0
        if size % unit:
            near = [each for each in _nearest_multiples(size, unit) if before < each < total]
            raise ConfigError(
                "batch.ramp", stages, f"{size} samples cannot be shared by the ranks in micro-batches: {unit} at once.",
                f"{f'Nearest choices: {_listed(near)}; or use' if near else 'Use'} a smaller batch.micro_size.",
            )  # fmt: skip
        if not before < size < total:
            raise ConfigError(
                "batch.ramp", stages, f"{size} samples after {before} do not rise towards batch.global_size={total}.",
                "Make every stage larger than the one before it, and the last one smaller than global_size.",
            )  # fmt: skip
        ramp.append(RampStage(windows=windows, global_size=size))
    return tuple(ramp)


def _derive_micro(config: BatchConfig, total: int, world_size: int) -> int:
    """Return the micro-batch that was left open: of ``auto`` a rank's whole share of a window, else a small one."""
    is_auto, accumulation = config.micro_size == AUTO, config.accumulation
    if accumulation is not None:
        if is_auto:
            raise ConfigError(
                "batch.accumulation", accumulation, "has no effect with batch.micro_size=auto, which determines it.",
                "Leave one of the two out.",
            )  # fmt: skip
        if config.uneven:
            return -(-total // (accumulation * world_size))
        return _divide(total, accumulation, world_size, "accumulation", accumulation)
    if config.uneven and (is_auto or total % world_size):
        share = -(-total // world_size)
        return share if is_auto else min(DEFAULT_MICRO_SIZE, share)
    share = _divide(total, 1, world_size, "global_size", total)
    stages = [stage[-1] for stage in config.ramp if stage]  # invalid ones are left to the messages of _solve_ramp
    share = math.gcd(share, *(size // world_size for size in stages if size > 0 and size % world_size == 0))
    return share if is_auto else max(d for d in range(1, DEFAULT_MICRO_SIZE + 1) if share % d == 0)


def _divide(total: int, factor: int, world_size: int, name: str, value: int) -> int:
    quotient, rest = divmod(total, factor * world_size)
    if quotient and not rest:
        return quotient
    unit = factor * world_size
    choices = [f"batch.global_size={_listed(_nearest_multiples(total, unit))}"]
    if name != "global_size" and total % world_size == 0:
        choices.append(f"batch.{name}={_listed(_nearest_divisors(total // world_size, value))}")
    if total % factor == 0:
        worlds = _nearest_divisors(total // factor, world_size)
        choices.append(f"{_listed(worlds)} ranks (cluster.workers_per_node)")
    choices.append("unequal shares (batch.uneven=true)")
    given = f"batch.global_size={total}" + (f" batch.{name}={value}" if name != "global_size" else "")
    units = f" in units of {factor}" if factor > 1 else ""
    problem = f"{total} samples cannot be shared by {count(world_size, 'rank')}{units}."
    raise ConfigError(given, None, problem, f"Nearest choices: {'; or '.join(choices)}.")


def _nearest_multiples(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [m for m in (below, below + unit) if m > 0]


def _nearest_divisors(value: int, target: int) -> list[int]:
    """Return the divisors of ``value`` next below and above ``target``, without ``target`` itself."""
    low = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    divisors = sorted({*low, *(value // d for d in low)} - {target})
    return [*[d for d in divisors if d < target][-1:], *[d for d in divisors if d > target][:1]]


def norm_of_window_loss(norm: Norm) -> ConfigError:
    """Return the error for a ``batch.norm`` that looks ahead, with accumulation and a task that has ``window_loss``,
    which both need passes of their own over the window."""
    return ConfigError(
        "batch.norm", norm, "does not work with a task that has window_loss and accumulation.",
        "Use batch.norm=sync, or batch.accumulation=1.",
    )  # fmt: skip


def require_short_batches(policy: ShortWindow) -> None:
    """Check that short windows of ready batches are kept.

    Raises:
        ConfigError: they are to be dropped.
    """
    if policy is ShortWindow.drop:
        raise ConfigError(
            "batch.short_window", "drop", "the training data has ready batches: its DataLoader decides.",
            "Leave it out, and give the DataLoader as many samples as whole windows have.",
        )  # fmt: skip
