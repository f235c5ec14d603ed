"""`launch eval RUN [key=value ...]`: evaluate a checkpoint of a run, on its held-out data or other data."""

from __future__ import annotations

import json
import os

from rich.table import Table
from rich.text import Text

from launcher.cli.names import command_parser, resolve
from launcher.cli.overrides import print_result
from launcher.errors import EXIT_DONE, RunError, UserError
from launcher.plan.run_plan import RunPlan
from launcher.plan.task_inspection import run_probe
from launcher.process import environment
from launcher.report.tables import near

FLAGS = ("--step", "--best", "--json", "--dir")


def launch_eval(arguments: list[str]) -> int:
    parser = command_parser("eval", "Evaluate a checkpoint of a run in one process, with the metrics of its training.")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="other data: task.NAME, train.eval_samples")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint of the best evaluation (checkpoint.best)")
    parser.add_argument("--json", action="store_true", help="one object")
    given = parser.parse_intermixed_args(arguments)
    paths = resolve(given.run, given.dir)
    plan = RunPlan.of_record(paths)
    defaults = {} if plan is None else plan.env.default  # threads and hashes of the run's workers
    request = {"run": str(paths.root), "overrides": given.overrides, "step": given.step, "best": given.best}
    with environment({**defaults, **os.environ}):
        answer = run_probe("launcher.extensions.evaluate.evaluator", json.dumps(request))
    if answer is None:
        raise RunError(f"{paths.root.name}: the process that evaluates ended early; its output is above.")
    if "error" in answer:
        raise (UserError if answer["user"] else RunError)(answer["error"])
    title = f"Evaluation of {paths.root.name}, step {answer['step']} ({near(answer['checkpoint'])})"
    print_result({"run": paths.root.name, **answer}, [Text(title), _table(answer)], as_json=given.json)
    return EXIT_DONE


def _table(answer: dict[str, dict[str, float | None]]) -> Table:
    """Return a table of the metrics, beside those that the run recorded at this step, if it evaluated then."""
    recorded = answer["recorded"]
    columns = [answer["metrics"], *([recorded] if recorded else [])]
    table = Table("metric", *["value", "recorded"][: len(columns)], box=None, padding=(0, 3, 0, 2))
    for name in answer["metrics"]:
        table.add_row(name, *(_text(column.get(name)) for column in columns))
    return table


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"
