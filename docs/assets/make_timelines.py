"""Draws windows as timelines: window.svg, average.svg and policies.svg, in light and dark. Takes no time.

    python docs/assets/make_timelines.py            # or: make docs-pictures
    python docs/assets/make_timelines.py --check    # exit status 1 if a picture is not up to date

The times follow the rules by which torch's FSDP2 and DDP overlap computation and communication, for a model of three
equal parts. DDP sends a part's gradients once they are ready, and waits for all of them at the end of the backward
pass. FSDP gathers a part while the one before it computes, and reduces a part's gradients while the next one computes;
HSDP sends reduced gradients to the replicas on their own stream. A part needs 1 unit of time forward, 2 backward, 1 for
an all-gather or a reduce-scatter, 2 for an all-reduce.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from xml.sax.saxutils import escape

from launcher.config.schema import StrategyKind, Sync
from launcher.plan.sync_policy import SHARDED, Collective, reduces, reduces_over_all

HERE = Path(__file__).resolve().parent
PARTS, MICRO_BATCHES = 3, 4
COST = {Collective.all_gather: 1.0, Collective.reduce_scatter: 1.0, Collective.all_reduce: 2.0}
COMPUTE, SHARDS, REPLICAS = "computation", "shard group", "replicas"
OPTIMIZER_S = 1.0
MICRO_BATCH_S = 3 * PARTS
# items and loss sums of each micro-batch, by rank
ITEMS = ((5, 3, 6, 2), (4, 7, 1, 4))
LOSSES = ((10.0, 9.0, 12.0, 7.0), (12.0, 7.0, 5.0, 12.0))

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .small { font-size: 11px; } .strong { font-weight: 600; }
.axis { stroke: #8c959f; } .dashed { stroke: #8c959f; stroke-dasharray: 4 3; }
.mark { stroke: #cf222e; stroke-width: 1.5; }
.forward { fill: #9ec5f4; } .backward { fill: #4a8ee0; } .optimizer { fill: #8c959f; } .gather { fill: #e8b04b; }
.reduce { fill: #d9653b; } .replicas { fill: #a463c2; } .inside { fill: #10151c; }
@media (prefers-color-scheme: dark) {
  text { fill: #d5dce4; } .forward { fill: #3b6aa6; } .backward { fill: #6aa8f2; } .inside { fill: #ffffff; }
  .backward-inside { fill: #10151c; } .mark { stroke: #ff7b72; }
}"""


@dataclass(frozen=True)
class Bar:
    """Time in which a stream works. ``kind``: a class of STYLE."""

    lane: str
    kind: str
    start: float
    end: float


class Mark(StrEnum):
    """Event of a timeline that is no collective.

    Attributes:
        backward: the backward pass starts.
        wait: the parameters of the oldest all-gather in progress are needed.
    """

    backward = "backward"
    wait = "wait"


# seconds of computation, and the event after it: a collective that starts, or a mark; None: the micro-batch ends
Span = tuple[float, Collective | Mark | None]


class Streams:
    """Streams of a rank that record what each of them does, and when.

    Attributes:
        now: time of the computation stream.
    """

    def __init__(self, *, sharded: bool) -> None:
        self.bars: list[Bar] = []
        self.now = self._computed = 0.0
        self._sharded = sharded
        self._shard_free = self._replica_free = self._reduced = 0.0
        self._in_use = 0.0  # time at which the parameters of the latest awaited gather were there
        self._gathers: deque[float] = deque()

    def micro_batch(self, spans: Sequence[Span]) -> None:
        """Run a micro-batch."""
        self._in_use = self.now
        for seconds, event in spans:
            if seconds:
                kind = "forward" if self._computed % MICRO_BATCH_S < PARTS else "backward"
                self.bars.append(Bar(COMPUTE, kind, self.now, self.now + seconds))
                self._computed += seconds
                self.now += seconds
            if isinstance(event, Collective):
                self._communicate(event)
            elif event is Mark.wait and self._gathers:
                self.now = self._in_use = max(self.now, self._gathers.popleft())
        self.now = max(self.now, self._reduced, self._replica_free)

    def _communicate(self, kind: Collective) -> None:
        if kind is Collective.all_gather:
            self._shard_free = max(self._shard_free, self._in_use) + COST[kind]
            self._gathers.append(self._shard_free)
            self._record(SHARDS, "gather", self._shard_free, kind)
        elif kind is Collective.reduce_scatter:
            self.now = max(self.now, self._reduced)
            self._shard_free = self._reduced = max(self._shard_free, self.now) + COST[kind]
            self._record(SHARDS, "reduce", self._shard_free, kind)
        else:
            start = self._reduced if self._sharded else self.now
            self._replica_free = max(self._replica_free, start) + COST[kind]
            self._record(REPLICAS, "replicas", self._replica_free, kind)

    def _record(self, lane: str, kind: str, end: float, collective: Collective) -> None:
        self.bars.append(Bar(lane, kind, end - COST[collective], end))


def between(sync: Sync, spans: Sequence[Span]) -> list[Span]:
    """Return a micro-batch that is neither the first nor the last one of its window, from the first one: parameters
    that stay gathered are not gathered again."""
    if sync is not Sync.gather_once:
        return list(spans)
    kept: list[Span] = []
    carried = 0.0
    for seconds, event in spans:
        carried += seconds
        if event not in (Collective.all_gather, Mark.wait):
            kept.append((carried, event))
            carried = 0.0
    return [*kept, (carried, None)]


def spans(kind: StrategyKind, sync: Sync, *, first: bool, last: bool) -> list[Span]:
    """Return a micro-batch of the model: its computation and the collectives that the policy runs, in program order."""
    shards = kind in SHARDED
    kept = sync is Sync.gather_once
    gathers_forward, gathers_backward = shards and (first or not kept), shards and not kept
    found: list[Span] = []
    for part in range(PARTS):
        if gathers_forward:
            found += [(float(part > 0), Collective.all_gather), (0.0, Mark.wait)]
        elif part:
            found.append((1.0, Mark.wait))
    found.append((1.0, Mark.backward))
    if gathers_backward:
        found.append((0.0, Collective.all_gather))
    for part in range(PARTS):
        if gathers_backward:  # the next part's parameters are gathered while this one computes
            found.append((0.0, Mark.wait))
            if part < PARTS - 1:
                found.append((0.0, Collective.all_gather))
        events: list[Collective | Mark] = [Collective.reduce_scatter] if shards and reduces(sync, last=last) else []
        if kind is not StrategyKind.fsdp and reduces_over_all(sync, last=last):
            events.append(Collective.all_reduce)
        seconds = [2.0, *[0.0] * len(events)]
        found += [(seconds[place], event) for place, event in enumerate(events or [Mark.wait])]
    return found


@dataclass(frozen=True)
class Window:
    """Replayed window: its bars, and the times at which its micro-batches end."""

    bars: list[Bar]
    ends: list[float]

    @property
    def compute(self) -> float:
        return sum(bar.end - bar.start for bar in self.bars if bar.lane == COMPUTE and bar.kind != "optimizer")


def window(kind: StrategyKind, sync: Sync) -> Window:
    """Replay a window of MICRO_BATCHES."""
    streams = Streams(sharded=kind in SHARDED)
    first, last = (spans(kind, sync, first=not last, last=last) for last in (False, True))
    ends: list[float] = []
    for part in (first, *[between(sync, first)] * (MICRO_BATCHES - 2), last):
        streams.micro_batch(part)
        ends.append(streams.now)
    optimizer = Bar(COMPUTE, "optimizer", streams.now, streams.now + OPTIMIZER_S)
    return Window([*streams.bars, optimizer], ends)


class Drawing:
    """SVG picture. Lengths in pixels."""

    def __init__(self, title: str, description: str) -> None:
        self._title, self._description = title, description
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._shapes.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._shapes.append(f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self._shapes.append(f'<text class="{kind}" {place}>{escape(words)}</text>')

    def svg(self, width: int, height: int) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
                f'height="{height}" role="img">',
                f"<title>{escape(self._title)}</title>",
                f"<desc>{escape(self._description)}</desc>",
                f"<style>{STYLE}</style>",
                *self._shapes,
                "</svg>\n",
            ]
        )


def legend(drawing: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    for kind, words in entries:
        drawing.box(x, y - 10, 12, 12, kind)
        drawing.text(x + 17, y, words, "small")
        x += 32 + 5.8 * len(words)


def draw_window() -> str:
    """Return the picture of a window of two ranks under DDP with sync=boundary."""
    drawing = Drawing(
        "A window on two ranks", "Four micro-batches each; gradients are all-reduced during the last backward pass."
    )
    left, scale, row = 70.0, 16.5, 34.0
    replayed = window(StrategyKind.ddp, Sync.boundary)
    end = replayed.bars[-1].end
    starts = [0.0, *replayed.ends[:-1]]
    for number, (start, stop) in enumerate(zip(starts, replayed.ends, strict=True)):
        boundary = number == MICRO_BATCHES - 1
        name = "boundary" if boundary else f"micro-batch {number + 1}"
        middle = left + scale * (start + min(stop, start + MICRO_BATCH_S)) / 2
        drawing.text(middle, 22, name, "strong" if boundary else "", "middle")
    for rank, items in enumerate(ITEMS):
        top = 36 + rank * 88.0
        drawing.text(8, top + 21, f"rank {rank}", "strong")
        for bar in replayed.bars:
            if bar.lane == COMPUTE:
                drawing.box(left + scale * bar.start, top, scale * (bar.end - bar.start) - 1.5, row, bar.kind)
        for start, number in zip(starts, items, strict=True):
            middle = left + scale * (start + MICRO_BATCH_S / 2)
            drawing.text(middle, top + row + 15, f"{number} items", "small", "middle")
    top = 36 + 88.0 - 30
    for bar in replayed.bars:
        if bar.lane == REPLICAS:
            drawing.box(left + scale * bar.start, top, scale * (bar.end - bar.start) - 1.5, 20, bar.kind)
    for start in starts[1:]:
        drawing.line(left + scale * start - 0.75, 30, left + scale * start - 0.75, 170, "dashed")
    drawing.line(left + scale * end, 30, left + scale * end, 190, "mark")
    drawing.text(left + scale * end - 4, 204, "the next window starts", "small", "end")
    legend(
        drawing, left, 228,
        [
            ("forward", "forward"), ("backward", "backward"), ("replicas", "all-reduce"),
            ("optimizer", "clip, optimizer step"),
        ],
    )  # fmt: skip
    return drawing.svg(round(left + scale * end + 14), 240)


def draw_average() -> str:
    """Return the picture of the exact average: areas of boxes are loss sums, their widths are items."""
    items = [number for rank in ITEMS for number in rank]
    losses = [loss for rank in LOSSES for loss in rank]
    exact = sum(losses) / sum(items)
    mean_of_means = sum(loss / number for loss, number in zip(losses, items, strict=True)) / len(items)
    drawing = Drawing("The exact average", f"{exact:.2f}, where the mean of the means is {mean_of_means:.2f}.")
    left, bottom, scale, rise, gap = 60.0, 210.0, 15.0, 36.0, 3.0
    x = left
    for place, (loss, number) in enumerate(zip(losses, items, strict=True)):
        height = rise * loss / number
        kind = "forward" if place < MICRO_BATCHES else "backward"
        drawing.box(x, bottom - height, scale * number - gap, height, kind)
        drawing.text(x + (scale * number - gap) / 2, bottom - 8, f"{loss:g}", f"small inside {kind}-inside", "middle")
        drawing.text(x + (scale * number - gap) / 2, bottom + 15, str(number), "small", "middle")
        x += scale * number + (12 if place == MICRO_BATCHES - 1 else 0)
    drawing.line(left - 6, bottom, x, bottom, "axis")
    drawing.text(left - 10, bottom + 15, "items", "small", "end")
    drawing.text(left - 10, bottom - 8, "sum", "small", "end")
    for value, kind, words in (
        (exact, "mark", f"exact: {sum(losses):g} / {sum(items)} = {exact:.2f}"),
        (mean_of_means, "dashed", f"mean of the {len(items)} means: {mean_of_means:.2f}"),
    ):
        drawing.line(left - 6, bottom - rise * value, x + 6, bottom - rise * value, kind)
        drawing.text(x + 12, bottom - rise * value + 4, words, "strong" if kind == "mark" else "")
    entries = [("forward", "micro-batches of rank 0"), ("backward", "of rank 1; the area is the loss sum")]
    legend(drawing, left, 250, entries)
    return drawing.svg(round(x + 190), 262)


POLICIES = (
    (StrategyKind.ddp, Sync.every), (StrategyKind.ddp, Sync.boundary),
    (StrategyKind.fsdp, Sync.every), (StrategyKind.fsdp, Sync.boundary), (StrategyKind.fsdp, Sync.gather_once),
    (StrategyKind.hsdp, Sync.every), (StrategyKind.hsdp, Sync.replicas_at_boundary),
    (StrategyKind.hsdp, Sync.boundary), (StrategyKind.hsdp, Sync.gather_once),
)  # fmt: skip


def draw_policies() -> str:
    """Return the picture of a window under each policy, on one scale of time."""
    drawing = Drawing("A window under each sync policy", "Computation above, collectives below, on one scale of time.")
    left, scale, y = 208.0, 10.0, 14.0
    windows = {policy: window(*policy) for policy in POLICIES}
    longest = max(each.bars[-1].end for each in windows.values())
    for (kind, sync), replayed in windows.items():
        lanes = [lane for lane in (COMPUTE, SHARDS, REPLICAS) if any(bar.lane == lane for bar in replayed.bars)]
        drawing.text(8, y + 13, f"{kind.value} {sync.value}", "strong")
        ratio = replayed.bars[-1].end / (replayed.compute + OPTIMIZER_S)
        drawing.text(8, y + 28, f"{ratio:.2f} × computation", "small")
        for bar in replayed.bars:
            top = y + 15 * lanes.index(bar.lane)
            drawing.box(left + scale * bar.start, top, scale * (bar.end - bar.start) - 1, 13, bar.kind)
        for end in replayed.ends[:-1]:
            drawing.line(left + scale * end - 0.5, y - 3, left + scale * end - 0.5, y + 15 * len(lanes) + 1, "dashed")
        y += 15 * max(len(lanes), 2) + 16
    legend(
        drawing, 8, y + 8,
        [
            ("forward", "forward"), ("backward", "backward"), ("gather", "all-gather of parameters"),
            ("reduce", "reduce-scatter of gradients"), ("replicas", "all-reduce of gradients"),
            ("optimizer", "optimizer"),
        ],
    )  # fmt: skip
    return drawing.svg(round(left + scale * longest + 30), round(y + 20))


PICTURES = {"window.svg": draw_window, "average.svg": draw_average, "policies.svg": draw_policies}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a picture is not up to date"
    )
    check = parser.parse_args().check
    wrong = 0
    for name, draw in PICTURES.items():
        place, new = HERE / name, draw()
        if check:
            wrong += not place.exists() or place.read_text(encoding="utf-8") != new
        else:
            place.write_text(new, encoding="utf-8")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
