"""Tables and plot of jobs/bench_peers.py: docs/explanations/peers.md and peers.png."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHECKED_WINDOWS = 2
# relative to the distance that training has moved the parameters: above what rounding does, below a mean of means
SAME = {"fp32": 1e-2, "bf16": 1e-1}
FAMILIES = {"ddp": "DDP", "fsdp": "FSDP2"}
# heading of the part of peers.md that is written by hand
NOTES = "## How each one accumulates"
GLOO_CAVEAT = """\
gloo runs a reduce-scatter as an all-reduce. Between hosts, contenders that call it therefore send more on the link than
is counted, and take longer than they would on NCCL: compare the two in the table of bytes. The launcher exchanges the
parts directly. "Kept gathered" and `gather_once` hold parameters between forward and backward passes; all other rows
reshard after the forward pass, the default of FSDP2: see the table of memory.
"""


class Results:
    """Records of one file, in the order in which settings, contenders and accumulations appear there."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.timed = [record for record in records if not record["uneven"]]
        self.uneven = {record["contender"]: record["difference"] for record in records if record["uneven"]}
        self.settings, self.contenders = (
            list(dict.fromkeys(record[key] for record in self.timed)) for key in ("setting", "contender")
        )
        self.accumulations = sorted({record["accumulation"] for record in self.timed})
        self.families = {record["contender"]: record["family"] for record in self.timed}
        self.losses = {record["contender"]: record["loss"] for record in self.timed}
        self._cells = {(r["setting"], r["contender"], r["accumulation"]): r for r in self.timed}

    def family(self, name: str) -> list[str]:
        """Return the contenders of a family, this launcher's first."""
        return [contender for contender in self.contenders if self.families[contender] == name]

    def measured(self, setting: str) -> list[int]:
        """Return the accumulations of a setting."""
        return sorted({record["accumulation"] for record in self.timed if record["setting"] == setting})

    def cell(self, setting: str, contender: str, accumulation: int) -> dict[str, Any]:
        return self._cells[setting, contender, accumulation]

    def ours(self, setting: str, contender: str, accumulation: int) -> dict[str, Any]:
        """Return the launcher's cell that a contender's is compared with."""
        return self.cell(setting, self.family(self.families[contender])[0], accumulation)

    def ratios(self, setting: str, contender: str, accumulation: int) -> list[float]:
        """Return a contender's time as a multiple of the launcher's in the same round, for each round."""
        cell = setting, contender, accumulation
        return [a / b for a, b in zip(self.cell(*cell)["times_s"], self.ours(*cell)["times_s"], strict=True)]

    def time_text(self, setting: str, contender: str, accumulation: int) -> str:
        times_s = self.cell(setting, contender, accumulation)["times_s"]
        median, ratios = f"{statistics.median(times_s) * 1e3:,.1f}", self.ratios(setting, contender, accumulation)
        if contender == self.family(self.families[contender])[0]:
            low, _, high = statistics.quantiles([time_s * 1e3 for time_s in times_s], n=4)
            return f"{median} ms ({low:,.1f} to {high:,.1f})"
        low, ratio, high = statistics.quantiles(ratios, n=4)
        return f"{median} ms, **{ratio:.2f}** ({low:.2f} to {high:.2f})"

    def bytes_text(self, contender: str, accumulation: int) -> str:
        """Return the counted megabytes, how many times the launcher's that is, and those on the shaped links."""
        settings = [setting for setting in self.settings if accumulation in self.measured(setting)]
        cells = [self.cell(setting, contender, accumulation) for setting in settings]
        sent, own = cells[0]["sent_bytes"], self.ours(settings[0], contender, accumulation)["sent_bytes"]
        linked = [cell["link_bytes"] for cell in cells if cell["link_bytes"] is not None]
        link = f", link {statistics.median(linked) / 1e6:,.1f}" if linked else ""
        return f"{sent / 1e6:,.2f} ({sent / own:.2f}{link})"

    def memory_text(self, contender: str, accumulation: int) -> str:
        """Return the megabytes at the peak, and how many times the launcher's that is; the links do not matter."""
        setting = next(each for each in self.settings if accumulation in self.measured(each))
        peak = self.cell(setting, contender, accumulation)["peak_bytes"]
        return f"{peak / 1e6:,.2f} ({peak / self.ours(setting, contender, accumulation)['peak_bytes']:.2f})"

    def fixed_cost(self, plain: str = "DDP by hand") -> str:
        """Return a sentence on the time of the launcher's DDP in addition to that of a loop by hand."""
        setting = self.settings[0]
        if not {"launcher DDP", plain} <= set(self.contenders):
            return ""
        parts = []
        for accumulation in self.measured(setting):
            own, other = (self.cell(setting, name, accumulation)["times_s"] for name in ("launcher DDP", plain))
            low, more_ms, high = statistics.quantiles([(a - b) * 1e3 for a, b in zip(own, other, strict=True)], n=4)
            share = more_ms / 1e3 / statistics.median(other)
            parts.append(
                f"{more_ms:+.1f} ms ({share:+.0%}; middle half of the rounds {low:+.1f} to {high:+.1f} ms) at "
                f"accumulation {accumulation}"
            )
        return (
            "Under DDP the engine adds a fixed cost to each window: it counts items and bytes, compares the ranks and "
            "estimates the noise scale. The windows are short here, so that it shows: in the setting "
            f"{setting}, the median difference from DDP by hand is {', '.join(parts)}."
        )


def table(head: Sequence[object], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, head)) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def tables_by_family(got: Results, cell_text: Callable[[str, int], str]) -> list[str]:
    """Return a table for each family: of each contender at each accumulation."""
    lines: list[str] = []
    for family, title in FAMILIES.items():
        names = got.family(family)
        rows = [[name, *(cell_text(name, each) for each in got.accumulations)] for name in names]
        lines += table([title, *got.accumulations], rows) if names else []
    return lines


def report(results: Path, to: Path) -> None:
    """Write peers.md, tables, and peers.png: time relative to the launcher over accumulation, one panel per setting."""
    got = Results([json.loads(text) for text in results.read_text().splitlines()])
    first = got.timed[0]
    same = SAME[first["precision"]]
    libraries = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    lines = [
        "# The engine beside other libraries", "",
        f"Made by `make bench-peers` (`jobs/bench_peers.py`) on {first['machine']}, in {first['precision']}, with "
        f"{first['ranks']} ranks: {libraries}. {got.fixed_cost()}".strip(),
        "", "![time relative to the launcher](peers.png)", "",
        "## Time of one optimizer step", "",
        "Columns: micro-batches per window. The first row of a table shows the median and the middle half of the "
        "launcher's windows; the others, their median and, in bold, how many times as long they take: the median of "
        "the ratios of each round, and the middle half of these (all of them, where there are three rounds). In each "
        "round every contender takes one window.", "",
    ]  # fmt: skip
    for family, title in FAMILIES.items():
        names = got.family(family)
        lines += [f"### {title}", ""] if names else []
        lines += [GLOO_CAVEAT] if names and family == "fsdp" else []
        for setting in got.settings if names else ():
            counts = got.measured(setting)
            rows = [[name, *(got.time_text(setting, name, each) for each in counts)] for name in names]
            rounds = [str(len(got.cell(setting, names[0], each)["times_s"])) for each in counts]
            lines += table([setting, *counts], [*rows, ["rounds", *rounds]])
    lines += [
        "## Bytes of one optimizer step", "",
        "Megabytes that a rank's collectives have to send, counted alike for all (`SentBytes` in "
        "jobs/bench_contenders.py); in brackets, as a multiple of the first row, and what a shaped host really sent "
        "on its link in the same window, with headers.", "",
    ]  # fmt: skip
    lines += tables_by_family(got, got.bytes_text)
    lines += [
        "## Memory at the peak of one optimizer step", "",
        "Megabytes of all tensors of a contender that are alive at once on rank 0, at most, in the second window: "
        "parameters, gradients, optimizer state, activations, the micro-batches, and buffers of collectives, counted "
        "alike for all (`PeakMemory` in jobs/bench_contenders.py); in brackets, as a multiple of the first row. Not "
        "counted: the data set, and the working memory inside operators and gloo.", "",
    ]  # fmt: skip
    lines += tables_by_family(got, got.memory_text)
    lines += [
        "## Equality of the result", "",
        "Distance of the parameters from those of one process that takes each window as one big batch in fp64, "
        f"relative to the distance that training has moved them, after {CHECKED_WINDOWS} windows; equal means less "
        f"than {same:.0e}. Samples of one length: the largest of all cells above. Unequal: of each sample between one "
        "and all targets count; the mean of a micro-batch's own items is then no equal part of the window's.", "",
    ]  # fmt: skip
    rows = []
    for name in got.contenders:
        largest = max(record["difference"] for record in got.timed if record["contender"] == name)
        uneven = _verdict(got.uneven[name], same) if name in got.uneven else "-"
        rows.append([name, got.losses[name], _verdict(largest, same), uneven])
    lines += table(["", "loss of the job's loop", "samples of one length", "unequal numbers of items"], rows)
    page = to / "peers.md"
    _, heading, after = page.read_text().partition(NOTES) if page.exists() else ("", "", "")
    page.write_text("\n".join(lines) + (f"\n{heading}{after}" if heading else ""))
    _plot(got, to / "peers.png")


def _verdict(difference: float, same: float) -> str:
    return f"equal ({difference:.0e})" if difference < same else f"**different** ({difference:.0e})"


def _plot(got: Results, to: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(got.settings), figsize=(5 * len(got.settings), 4.5), squeeze=False, sharey=True, layout="constrained"
    )  # fmt: skip
    for setting, panel in zip(got.settings, panels[0], strict=True):
        for number, name in enumerate(got.contenders):
            counts = got.measured(setting)
            ratios = [statistics.median(got.ratios(setting, name, each)) for each in counts]
            style = "-" if got.families[name] == "ddp" else "--"
            color, marker = f"C{number % 10}", "o" if number < 10 else "s"
            panel.plot(counts, ratios, style, marker=marker, color=color, label=name)
        panel.set(title=setting, xscale="log", yscale="log", xlabel="accumulation", xticks=got.accumulations)
        panel.set_xticklabels(map(str, got.accumulations))
        panel.set(yticks=(1, 2, 4, 8), yticklabels=("1", "2", "4", "8"))
        panel.minorticks_off()
    panels[0][0].set_ylabel("time, launcher of the same family = 1")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(to, dpi=80)
