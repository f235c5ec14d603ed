"""One optimizer step in this launcher's engine, in hand-written loops and in other libraries, taking turns in one run.

    make bench-peers                                                  # here, and on two shaped hosts on this machine
    launch run [cluster=hosts ...] -- jobs/bench_peers.py measure --setting NAME --out results.jsonl
    python jobs/bench_peers.py report --results results.jsonl --to docs/explanations

All contenders live in the same processes and train the same model from the same initial values on the same
micro-batches. They first take two windows, after which their parameters are compared with those of one process that
computes each window as one big batch in fp64. The windows that are timed come after these, in rounds: each contender
takes one window in each round, and the order rotates. A window's time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from bench_contenders import CLIP_NORM, HAND_WRITTEN, IGNORED, LEARNING_RATE, Contender, Job, PeakMemory, SentBytes, loss_sum
from bench_libraries import LIBRARIES
from bench_sync import ACCUMULATIONS, MICRO_SIZE, machine
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from launcher.tasks.bytes_gpt import BytesGPT

CHECKED_WINDOWS = 2
MIN_ROUNDS, MAX_ROUNDS = 3, 200
UNEVEN_ACCUMULATION = 4
# relative to the distance that training has moved the parameters: above what rounding does, below a mean of means
SAME = {"fp32": 1e-2, "bf16": 1e-1}
FAMILIES = {"ddp": "DDP", "fsdp": "FSDP2"}
# heading of the part of peers.md that is written by hand
NOTES = "## How each one accumulates"
PACKAGES = {
    "Accelerate": "accelerate", "Lightning Fabric": "lightning-fabric", "transformers": "transformers",
    "torchtitan": "torchtitan",
}  # fmt: skip
GLOO_CAVEAT = """\
gloo runs a reduce-scatter as an all-reduce. Between hosts, contenders that call it therefore send more on the link than
is counted, and take longer than they would on NCCL: compare the two in the table of bytes. The launcher exchanges the
parts directly. "Kept gathered" and `gather_once` hold parameters between forward and backward passes; all other rows
reshard after the forward pass, the default of FSDP2, and need less memory.
"""


def samples(text: Tensor, *, uneven: bool) -> TensorDataset:
    """Return tokens and targets of ``text`` [samples, time + 1]. ``uneven``: of each sample only the first few targets
    count, between one and all of them."""
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    if uneven:
        count, time_steps = targets.shape
        lengths = torch.randint(1, time_steps + 1, (count, 1), generator=torch.Generator().manual_seed(0))
        targets[torch.arange(time_steps) >= lengths] = IGNORED
    return TensorDataset(tokens, targets)


def reference(job: Job, windows: int) -> tuple[Tensor, Tensor]:
    """Return all parameters before and after ``windows`` optimizer steps of one process, each on one batch, in fp64."""
    model = job.model().double()
    before = flat(model)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for window in range(windows):
        parts = [batch for rank in range(dist.get_world_size()) for batch in job.micro_batches(window, rank)]
        tokens, targets = (torch.cat(column) for column in zip(*parts, strict=True))
        logits = model(tokens)
        items = (targets != IGNORED).sum()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        assert torch.isclose(loss.float(), loss_sum(logits, targets) / items)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return before, flat(model)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters of a model in one fp64 tensor; every rank calls this for a sharded one."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().double().flatten() for p in whole])


def difference(contender: Contender, expected: tuple[Tensor, Tensor]) -> float:
    """Return the distance of a contender's parameters from the expected ones, relative to the distance trained."""
    before, after = expected
    return ((flat(contender.raw) - after).norm() / (after - before).norm()).item()


def link_bytes() -> int | None:
    """Return the bytes that this host has sent on its link; None if it is the whole machine, not a shaped host."""
    counters = psutil.net_io_counters(pernic=True)
    return counters["eth0"].bytes_sent if "eth1" in counters and "eth0" in counters else None


@contextmanager
def active(*counters: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for counter in counters:
            stack.enter_context(counter)
        yield


class Cell:
    """All contenders at one accumulation."""

    def __init__(self, job: Job, kinds: Sequence[type[Contender]]) -> None:
        self.job = job
        self.contenders = [kind(job) for kind in kinds]
        self.times: dict[str, list[float]] = {each.name: [] for each in self.contenders}
        self.sent: dict[str, tuple[int, int | None]] = {}
        self.peak: dict[str, int] = {}

    def check(self) -> dict[str, float]:
        """Take the first windows, count bytes and memory of the last of them, and compare with the reference."""
        expected = reference(self.job, CHECKED_WINDOWS)
        for window in range(CHECKED_WINDOWS):
            counted = window == CHECKED_WINDOWS - 1
            for each in self.contenders:
                counter, memory, before = SentBytes(), PeakMemory(self.job.data), link_bytes()
                dist.barrier()
                each.step(window, active(memory, counter) if counted else nullcontext())
                dist.barrier()
                after = link_bytes()
                self.sent[each.name] = counter.bytes, None if before is None or after is None else after - before
                self.peak[each.name] = memory.peak
        return {each.name: difference(each, expected) for each in self.contenders}

    def time(self, budget_s: float) -> None:
        """Take turns for about ``budget_s`` seconds."""
        start = time.perf_counter()
        for number in range(MAX_ROUNDS):
            shift = number % len(self.contenders)
            for each in self.contenders[shift:] + self.contenders[:shift]:
                dist.barrier()
                start_s = time.perf_counter()
                each.step(CHECKED_WINDOWS + number, nullcontext())
                self.times[each.name].append(time.perf_counter() - start_s)
            over = torch.tensor(number + 1 >= MIN_ROUNDS and time.perf_counter() - start > budget_s)
            dist.broadcast(over, 0)
            if over:
                break
        for name, own in self.times.items():
            slowest = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            self.times[name] = slowest.tolist()

    def close(self) -> None:
        for each in self.contenders:
            each.close()


def measure(arguments: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    width = arguments.width
    task = BytesGPT(width=width, depth=arguments.depth, heads=max(1, width // 64), seq_len=64)
    kinds = [kind for kind in (*HAND_WRITTEN, *LIBRARIES) if not arguments.only or kind.name in arguments.only]
    bf16 = arguments.precision == "bf16"
    count = 4 * max(*arguments.accumulation, UNEVEN_ACCUMULATION) * MICRO_SIZE * dist.get_world_size()
    data = task.train_data()
    text = torch.stack([data[index] for index in range(count)]).long()
    same = {
        "setting": arguments.setting, "precision": arguments.precision, "ranks": dist.get_world_size(),
        "machine": machine(), "versions": versions(kinds),
    }  # fmt: skip
    cells = [(accumulation, False) for accumulation in arguments.accumulation]
    for accumulation, uneven in cells + [(UNEVEN_ACCUMULATION, True)] * arguments.uneven:
        job = Job(task, samples(text, uneven=uneven), accumulation, MICRO_SIZE, bf16)
        cell = Cell(job, kinds)
        differences = cell.check()
        if not uneven:
            cell.time(arguments.seconds)
        for each in cell.contenders:
            sent_bytes, on_link = cell.sent[each.name]
            record = {
                **same, "contender": each.name, "family": each.family, "loss": each.loss,
                "accumulation": accumulation, "uneven": uneven,
                "times_s": cell.times[each.name], "sent_bytes": sent_bytes, "link_bytes": on_link,
                "peak_bytes": cell.peak[each.name], "difference": differences[each.name],
            }  # fmt: skip
            if dist.get_rank() == 0:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                print(line(record), flush=True)
        cell.close()
    dist.barrier()
    dist.destroy_process_group()


def versions(kinds: Sequence[type[Contender]]) -> dict[str, str]:
    used = [package for start, package in PACKAGES.items() if any(kind.name.startswith(start) for kind in kinds)]
    return {name: version(name) for name in ("torch", *used)}


def line(record: dict[str, Any]) -> str:
    times = record["times_s"]
    taken = f"{statistics.median(times) * 1e3:8,.1f} ms ({len(times)} windows)" if times else "uneven items"
    return (
        f"{record['setting']:<12} {record['accumulation']:>3}  {record['contender']:<30} {taken}   "
        f"{record['sent_bytes'] / 1e6:7.2f} MB sent   {record['peak_bytes'] / 1e6:7.2f} MB held   off by {record['difference']:.1e}"
    )


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

    def fixed_cost(self, plain: str = "DDP by hand") -> str:
        """Return a sentence on the time of the launcher's DDP in addition to that of a loop by hand."""
        setting = self.settings[0]
        if not {"launcher DDP", plain} <= set(self.contenders):
            return ""
        parts = []
        for accumulation in self.measured(setting):
            own, other = (self.cell(setting, name, accumulation)["times_s"] for name in ("launcher DDP", plain))
            more_s = statistics.median(a - b for a, b in zip(own, other, strict=True))
            share = more_s / statistics.median(other)
            parts.append(f"{more_s * 1e3:+.1f} ms ({share:+.0%}) at accumulation {accumulation}")
        return (
            "Under DDP the engine adds a fixed cost to each window: it counts items and bytes, compares the ranks and "
            "estimates the noise scale. The windows are short here, so that it shows: in the setting "
            f"{setting}, the median difference from DDP by hand is {', '.join(parts)}."
        )


def table(head: Sequence[object], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(map(str, head)) + " |", "|---" * len(head) + "|"]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


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
        "the ratios of each round, and the middle half of these. In each round every contender takes one window.", "",
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
    for family, title in FAMILIES.items():
        names = got.family(family)
        rows = [[name, *(got.bytes_text(name, each) for each in got.accumulations)] for name in names]
        lines += table([title, *got.accumulations], rows) if names else []
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    measuring = verbs.add_parser("measure", help="run by `launch run` on the hosts to measure")
    measuring.add_argument("--setting", required=True, help="name of this machine or these links in the tables")
    measuring.add_argument("--out", type=Path, required=True, help="file to which rank 0 appends JSON lines")
    measuring.add_argument("--accumulation", type=int, nargs="*", default=list(ACCUMULATIONS))
    measuring.add_argument("--seconds", type=float, default=25, help="of the rounds at each accumulation")
    measuring.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    measuring.add_argument("--uneven", action="store_true", help="also compare on samples with unequal item counts")
    measuring.add_argument("--only", nargs="*", help="names of contenders; default: all of them")
    measuring.add_argument("--width", type=int, default=192)
    measuring.add_argument("--depth", type=int, default=4)
    reporting = verbs.add_parser("report", help="write tables and a plot")
    reporting.add_argument("--results", type=Path, required=True)
    reporting.add_argument("--to", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.verb == "measure":
        measure(arguments)
    else:
        report(arguments.results, arguments.to)


if __name__ == "__main__":
    main()
