"""Config group of another package: its keys are as those of the core, with options, bounds and resume rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from launcher import targets
from launcher.config import added_groups
from launcher.errors import SiteError
from launcher.targets import module_file
from tests.conftest import Launch
from tests.helpers import patience
from tests.infra.installed_package import install
from tests.infra.warm import COLD

MODULE = '''\
"""Keys of an example."""

from dataclasses import dataclass
from enum import StrEnum

from launcher.config.key_facts import above, forced, key

Kind = StrEnum("Kind", {"none": "none", "some": "some"})


@dataclass(frozen=True, kw_only=True)
class ExampleConfig:
    """Group of an example."""

    kind: Kind = key(Kind.none, affects="", nullable=False)
    """some: a choice."""
    size: float | None = key(None, above(0), only="example=some", resume=forced("sizes differ"), affects="learning")
    """Size in metres."""
'''
PROGRAM = r"""
import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout

from example_keys import ExampleConfig
from launcher import cli
from launcher.config.choices import PrecisionKind
from launcher.config.hydra import compose_with_yaml, recompose
from launcher.config.key_docs import schema_of
from launcher.plan.float_format import format_class
from launcher.plan.resumable import as_typed, changes, forced_by
from launcher.plan.run_plan import RunPlan, part
from tests.helpers import make_plan

assert format_class(PrecisionKind.bf16) is None, "no package replaces a value of the core"
plan = make_plan("example=some")
again = RunPlan.from_json(plan.to_json())
config, yaml = compose_with_yaml(["example=some", "task=own_digits"])
later, _ = recompose(yaml, ["example.size=4"])
before_it_was_installed = re.sub(r"(?m)^example:\n(  .*\n)*", "", yaml)
assert before_it_was_installed != yaml
old, _ = recompose(before_it_was_installed, [])
before, after = (json.loads(json.dumps(as_typed(each))) for each in (config, later))
said = {}
for words in (
    "plan example.siz=3", "plan example.size=3", "plan example=some example.size=-1", "plan example=som",
    "plan task=nothing", "plan gone.a=1", "plan cluster.kind=gone", "--help", "broken",
    "keys example", "keys task=digits",
):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(out):
        status = cli.run(words.split())
    said[words] = [status, out.getvalue()]
print(json.dumps({
    "said": said,
    "plan": again.extension(ExampleConfig).size,
    "part": part(plan, "learning")["example.size"],
    "time": "example.size" in part(plan, "time"),
    "none": old.extension(ExampleConfig).kind,
    "forced": forced_by(changes(before, after)),
    "schema": [*schema_of(None)["properties"]["example"]["properties"]],
    "task": later.task["_target_"],
}))
"""


EXPECTED = {
    "plan example.siz=3": (2, "did you mean 'example.size'?"),
    "plan example.size=3": (2, "has no effect with example=none"),
    "plan example=some example.size=-1": (2, "must be above 0"),
    "plan example=som": (2, "Allowed: none, some"),
    "plan task=nothing": (2, "own_digits"),
    "plan gone.a=1": (2, "there is no such key"),
    "plan cluster.kind=gone": (2, "Installed: local, slurm, elsewhere, hosts."),
    "--help": (0, "command of broken_package.command:launch_broken"),
    "broken": (2, "launch broken: broken_package.command:launch_broken cannot be imported: ZeroDivisionError"),
    "keys example": (0, "example.size = 3 (some)"),
    "keys task=digits": (0, "task.momentum = 0.1"),
}


def test_keys_and_options_of_another_package(tmp_path: Path) -> None:
    place = tmp_path / "site"
    points = {
        "launcher.config": {"example": "example_keys:ExampleConfig", "gone": "no_such.module:Kind"},
        "launcher.commands": {"broken": "broken_package.command:launch_broken"},
        "launcher.clusters": {"gone": "no_such.module:Cluster"},
        "launcher.numerics": {"precision.bf16": "no_such.module:FORMAT"},
    }
    env = install(place, "example", points)
    (place / "example_keys.py").write_text(MODULE)
    (place / "broken_package").mkdir()
    (place / "broken_package/__init__.py").write_text("1 / 0")
    for option, text in (
        ("example/none", "kind: none\n"), ("example/some", "kind: some\nsize: 3\n"),
        ("task/own_digits", "_target_: launcher.tasks.digits.Digits\n"), ("task/digits", "_target_: replaced\n"),
        ("tasks/misplaced", "_target_: of.no.Group\n"), ("callbacks/misplaced", "{}\n"),
    ):  # fmt: skip
        file = place / "conf" / f"{option}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | env, capture_output=True, text=True,
        check=False, timeout=patience(120),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for words, (status, text) in found.pop("said").items():
        assert (status, EXPECTED[words][1] in text) == (EXPECTED[words][0], True), text
    assert found == {
        "plan": 3, "part": 3, "time": False, "none": "none", "forced": ["example.size"], "schema": ["kind", "size"],
        "task": "launcher.tasks.digits.Digits",
    }  # fmt: skip


@pytest.mark.slow
def test_a_group_that_cannot_be_imported_is_one_message(launch: Launch, tmp_path: Path) -> None:
    env = install(tmp_path / "site", "example", {"launcher.config": {"example": "example_keys:Keys"}}) | {COLD: "1"}
    (tmp_path / "site/example_keys.py").write_text("from launcher.config.key_facts import key\nkey(1, affects='x')\n")
    for command in ("plan", "keys"):
        done = launch(command, env=env, status=SiteError.exit_status)
        assert "Traceback" not in done.stderr, done.stderr
        text = " ".join(done.stderr.split())
        assert "The config group example: example_keys:Keys cannot be imported: " in text
        assert "affects='x': allowed words are learning, time, memory, record" in text
    assert launch("runs", env=env, status=0).stderr == "", "no configuration is read"


def test_two_packages_that_add_the_same_name_are_an_error_with_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("one", "other"):
        install(tmp_path, package, {"launcher.trackers": {"mine": f"{package}:Tracker", package: f"{package}:Tracker"}})
    points = [point for each in metadata.distributions(path=[str(tmp_path)]) for point in each.entry_points]
    monkeypatch.setattr(targets, "_entry_points", lambda: EntryPoints(points))
    assert targets.entry_point_names("launcher.trackers") == {"mine", "one", "other"}
    assert targets.entry_points("launcher.commands") == {}
    with pytest.raises(SiteError, match=r"launcher.trackers: .* (one and other|other and one) both add mine"):
        targets.entry_points("launcher.trackers")


def test_a_module_is_gone_or_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in (("broken_package", "1 / 0"), ("lacking_package", "import no_such_module")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
        with pytest.raises(SiteError, match=rf"{name}.keys cannot be imported: (ZeroDivision|ModuleNotFound)Error"):
            module_file(f"{name}.keys")
    assert module_file("no_such_module") is module_file("no_such_module.keys") is module_file("json.gone") is None
    assert module_file("launcher.targets") == Path(targets.__file__)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("kind: str = 'some'", None), ("size: int = 1", "needs a key kind"), ("kind: str = 'other'", "needs a key kind")],
)
def test_the_default_option_is_that_of_the_key_kind(
    kind: str, words: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kind_keys.py").write_text(f"from dataclasses import dataclass\n@dataclass\nclass Keys:\n    {kind}\n")
    (tmp_path / "conf/own").mkdir(parents=True)
    (tmp_path / "conf/own/some.yaml").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kind_keys", raising=False)
    points = {"own": EntryPoint("own", "kind_keys:Keys", added_groups.GROUP)}
    monkeypatch.setattr(added_groups, "_points", lambda: points)
    monkeypatch.setattr(added_groups, "added_groups", added_groups.added_groups.__wrapped__)
    if words is None:
        assert added_groups.chosen_by_default() == {"own": "some"}
        return
    with pytest.raises(SiteError, match=f"own: kind_keys:Keys {words} with one of its options as the default: some"):
        added_groups.chosen_by_default()
