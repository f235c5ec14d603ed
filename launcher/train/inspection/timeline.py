"""Timeline of a window: operators with their FLOPs and bytes, and collectives, in the order of the program.

It is recorded in the last window of the trace that also predicts the memory. The timeline of a shortened model extends
to the whole one: collectives of a further block repeat those of the block before it, and between two collectives the
number of each operator grows by the same amount with each block.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from launcher.config.schema import PrecisionKind
from launcher.loss import Loss
from launcher.plan.replay import Mark, Span
from launcher.plan.roofline import Operator, OperatorKind, Roofline
from launcher.plan.sync_policy import Collective
from launcher.train.inspection.fusion import FusedOperator, Fusion, bytes_of
from launcher.train.inspection.repeated_blocks import BlockRun, difference
from launcher.train.measure.comm_meter import Meter

_aten: Any = torch.ops.aten
# operators that allocate without writing, or whose result shares memory with an input although their schema does not
# say so
_FREE = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten._unsafe_view,
    _aten._reshape_alias, _aten.lift_fresh, _aten.detach_, _aten.resize_, _aten.set_, _aten._local_scalar_dense,
}  # fmt: skip
# operators that read, or write, only as many elements of their first input as they have indices for
_LOOKUPS = {_aten.embedding, _aten.gather, _aten.index_select, _aten.index}
_SCATTERS = {_aten.scatter, _aten.scatter_, _aten.scatter_add, _aten.scatter_add_, _aten.index_put, _aten.index_put_}
# operators that do not read what they write to
_OVERWRITE = {_aten.copy_, _aten.fill_, _aten.zero_, _aten._foreach_copy_, _aten._foreach_zero_}
_SUMS = (_aten.addmm, _aten.baddbmm)  # the factors of these follow the sum that the product is added to
_FORMATS = {
    torch.bfloat16: PrecisionKind.bf16, torch.float16: PrecisionKind.fp16,
    torch.float8_e4m3fn: PrecisionKind.float8, torch.float8_e5m2: PrecisionKind.float8,
}  # fmt: skip
_EVENTS: tuple[Collective | Mark, ...] = (*Collective, *Mark)


@dataclass(frozen=True)
class Stretch:
    """Operators that run one after the other, and the event after them.

    Attributes:
        operators: number of each. It may be negative where a longer model has a larger operator instead.
        event: collective that starts, or mark.
        payload_bytes: of the collective.
    """

    operators: Mapping[Operator, int]
    event: Collective | Mark
    payload_bytes: int = 0

    @property
    def code(self) -> int:
        """Return the event and its payload as one number, which grows with the payload."""
        return (self.payload_bytes + 1) * len(_EVENTS) + _EVENTS.index(self.event)

    def grown(self, operators: Mapping[Operator, int], code: int) -> Stretch:
        """Return this stretch with further operators, and a payload that is larger by ``code``."""
        total = {each: self.operators.get(each, 0) + operators.get(each, 0) for each in {**self.operators, **operators}}
        return Stretch(total, self.event, self.payload_bytes + code // len(_EVENTS))


class TimelineRecorder:
    """Recorder of a trace's timeline.

    Attributes:
        fusion: fuses the operators of compiled modules.
        stretches: recorded since the last start.
        items: items of the loss in a micro-batch; None if their number depends on values.
    """

    def __init__(self) -> None:
        self.fusion = Fusion()
        self.stretches: list[Stretch] = []
        self.items: float | None = None
        self._operators: Counter[Operator] = Counter()
        # what they write is known at the end only
        self._fused: list[tuple[Counter[Operator], FusedOperator]] = []
        self._pass: int | None = None  # of the compiled module whose operators are being fused
        self._active = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in this context, and its collectives."""
        count, wait = Meter.count, FSDPParamGroup.wait_for_unshard

        def counted(meter: Meter, kind: Collective, payload_bytes: int, *args: Any, **kwargs: Any) -> None:
            self.mark(kind, payload_bytes)
            count(meter, kind, payload_bytes, *args, **kwargs)

        def waited(group: FSDPParamGroup) -> None:
            if group._all_gather_result is not None:
                self.mark(Mark.wait)
            wait(group)

        self.stretches, self._operators, self._active = [], Counter(), True
        try:
            with patch.object(Meter, "count", counted), patch.object(FSDPParamGroup, "wait_for_unshard", waited):
                yield
        finally:
            self._active = False
            for operators, fused in self._fused:
                read, written = fused.traffic()
                if written:  # a compiler leaves out what nothing needs
                    operators[Operator(OperatorKind.memory, PrecisionKind.fp32, 0, read, written)] += 1
            self._fused = []

    def mark(self, event: Collective | Mark, payload_bytes: int = 0) -> None:
        """End the current stretch."""
        if not self._active:
            return
        self._close_fused()
        self.stretches.append(Stretch(self._operators, event, payload_bytes))
        self._operators = Counter()

    def ran(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operator."""
        packet = function.overloadpacket
        if not self._active or packet in _FREE or function.is_view:
            return
        inputs, outputs = _tensors((args, kwargs)), _tensors(result)
        if function.namespace not in ("aten", "fsdp"):
            self._close_fused()
            self.fusion.use(inputs)
            return
        formula = FLOPS.get(packet)
        if formula is None:
            self._add_memory(function, args, kwargs, inputs, outputs)
            return
        kind = OperatorKind.attention if "attention" in function.name() else OperatorKind.product
        factor = args[1] if packet in _SUMS else args[0]
        dtype = getattr(factor, "widened_from", None) or _FORMATS.get(factor.dtype, PrecisionKind.fp32)
        self._close_fused()
        self.fusion.use(inputs)
        self._count(kind, dtype, formula(*args, **kwargs, out_val=result), bytes_of(inputs), bytes_of(outputs))

    def add_clipping(self, gradients: Sequence[Tensor]) -> None:
        """Record the norm and the scaling of gradients."""
        if self._active:
            self._count(OperatorKind.memory, PrecisionKind.fp32, 0, 2 * bytes_of(gradients), bytes_of(gradients))

    def count_items(self, losses: Sequence[Loss]) -> None:
        """Record the items of a micro-batch's loss; those of several terms are not comparable."""
        items = losses[0].items
        self.items = float(items) if len(losses) == 1 and isinstance(items, int | float) else None

    def _count(self, kind: OperatorKind, dtype: PrecisionKind, flops: float, read: int, written: int) -> None:
        self._operators[Operator(kind, dtype, round(flops), read, written)] += 1

    def _add_memory(self, function: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        packet = function.overloadpacket
        if packet is _aten._to_copy and inputs[0].dtype in _FORMATS and outputs[0].dtype is torch.float32:
            # A product of inputs that were just widened runs in the narrow format on a GPU, which sums in fp32. A CPU,
            # on which a plan for GPUs may be traced, has no such product.
            outputs[0].widened_from = _FORMATS[inputs[0].dtype]  # pyright: ignore[reportAttributeAccessIssue]
        written = _written(function, args, kwargs)
        if written and (packet in _OVERWRITE or "out" in kwargs):
            inputs = [each for each in inputs if all(each is not other for other in written)]
        if self._is_fused(packet):
            self.fusion.add(inputs, written or outputs)
            return
        self.fusion.use(inputs)
        read, wrote = bytes_of(inputs), bytes_of(written or outputs)
        if packet in _LOOKUPS or packet in _SCATTERS:
            number = outputs[0].numel() if packet in _LOOKUPS else min(each.numel() for each in inputs)
            read = wrote = number * inputs[0].itemsize
        self._count(OperatorKind.memory, PrecisionKind.fp32, 0, read, wrote)

    def _is_fused(self, packet: Any) -> bool:
        current = None if packet in _SCATTERS else self.fusion.current_pass()
        if current is None or current != self._pass:
            self._close_fused()
        self._pass = current
        return current is not None

    def _close_fused(self) -> None:
        self._fused += [(self._operators, each) for each in self.fusion.close()]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the inputs that an operator writes to."""
    positions, names = _writes(function)
    values = [args[position] for position in positions if position < len(args)]
    return _tensors([*values, *(kwargs[name] for name in names if name in kwargs)])


@functools.cache
def _writes(function: Any) -> tuple[list[int], list[str]]:
    """Return positions and names of the arguments that an operator writes to. The gradients of fused optimizers are not
    among them: they are changed only by loss scaling."""
    arguments = [
        (position, argument.name)
        for position, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads"
    ]
    return [position for position, _ in arguments], [name for _, name in arguments]


def _attention(formula: Callable[..., float], causal: int) -> Callable[..., float]:
    """Return a formula of executed FLOPs. With a causal mask half of the scores are skipped.

    Args:
        causal: position of the argument ``is_causal``.
    """

    def flops(*args: Any, **kwargs: Any) -> float:
        is_causal = kwargs.get("is_causal", args[causal] if len(args) > causal else False)
        return formula(*args, **kwargs) / (2 if is_causal else 1)

    return flops


def _forward(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _backward(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> float:
    """Return the FLOPs of five products, of which the forward pass has two: the scores are computed again."""
    return 2.5 * sdpa_flop_count(query.shape, key.shape, value.shape)


# executed FLOPs of operators that are products or attention; the count of a model's FLOPs (measure/flops) differs
FLOPS: dict[Any, Callable[..., float]] = {
    **cast("dict[Any, Callable[..., float]]", flop_registry),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention(_forward, 4),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(_backward, 7),
    _aten._scaled_dot_product_flash_attention: _attention(_forward, 4),
    _aten._scaled_dot_product_flash_attention_backward: _attention(_backward, 10),
    _aten._scaled_dot_product_cudnn_attention: _attention(_forward, 6),
    _aten._scaled_dot_product_efficient_attention: _attention(_forward, 6),
}


def whole_timeline(
    runs: Mapping[BlockRun, int], shortest: Sequence[Stretch], longer: Mapping[BlockRun, Sequence[Stretch]]
) -> list[Stretch]:
    """Return the timeline of the whole model.

    Args:
        runs: for each run of equal blocks, its blocks in ``shortest``.
        longer: for each run, the timeline with one block of it more.

    Raises:
        IrregularModel: a further block does not repeat the collectives of the one before.
    """
    inserted: dict[int, list[Stretch]] = {}
    whole = list(shortest)
    codes = [stretch.code for stretch in shortest]
    for run, timeline in longer.items():
        more = len(run.names) - runs[run]
        found = difference(codes, [stretch.code for stretch in timeline])
        groups, sizes, j = sorted(found.groups, key=lambda each: each[0]), dict(found.sizes), 0
        for i, stretch in enumerate(shortest):
            while groups and groups[0][0] == i:
                length = len(groups.pop(0)[1])
                inserted.setdefault(i, []).extend([*timeline[j : j + length]] * more)
                j += length
            added = _times(_minus(timeline[j].operators, stretch.operators), more)
            whole[i] = whole[i].grown(added, sizes.get(i, 0) * more)
            j += 1
    return [*itertools.chain.from_iterable([*inserted.get(i, ()), stretch] for i, stretch in enumerate(whole))]


def _minus(some: Mapping[Operator, int], others: Mapping[Operator, int]) -> dict[Operator, int]:
    changes = {each: some.get(each, 0) - others.get(each, 0) for each in {**some, **others}}
    return {each: number for each, number in changes.items() if number}


def _times(operators: Mapping[Operator, int], factor: int) -> dict[Operator, int]:
    return {each: number * factor for each, number in operators.items()}


def operator_numbers(stretches: Sequence[Stretch]) -> Counter[Operator]:
    """Return the number of each operator."""
    numbers: Counter[Operator] = Counter()
    for stretch in stretches:
        numbers.update(stretch.operators)
    return numbers


def timed_spans(stretches: Sequence[Stretch], roofline: Roofline) -> list[Span]:
    """Return the seconds of each stretch on a device."""
    known = functools.cache(roofline.seconds)

    def seconds(stretch: Stretch) -> float:
        return max(0.0, sum(number * known(operator) for operator, number in stretch.operators.items()))

    return [(seconds(stretch), stretch.event.value, stretch.payload_bytes) for stretch in stretches]
