"""Commands of `launch`: the core's, and those that installed packages add by the entry point ``launcher.commands``.

An entry point ``VERB = "package.module:function"`` names a function that takes the arguments and returns the exit
status. Help and completion read the module's text without importing it: the first line of its docstring is
"`launch VERB ARGUMENTS`: summary.", and its constant FLAGS is a tuple of flags.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import UserError, did_you_mean

GROUP = "launcher.commands"
_OVERRIDES = ("--help", "--cfg", "--config-dir", "--config-name")
_STARTS, _OF_RUNS = ("--quiet", "--wait"), ("--dir",)
# verb -> module of launcher.cli with its function launch_VERB, the only one that is imported; its flags
_CORE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "train": ("train", ("-m", "--yes", *_STARTS, *_OVERRIDES)),
    "plan": ("plan", ("-m", "--json", *_OVERRIDES)),
    "run": ("train", (*_STARTS, *_OVERRIDES)),
    "runs": ("runs", ("--all", "--json", *_OF_RUNS)),
    "status": ("runs", ("--json", "--watch", *_OF_RUNS)),
    "logs": ("runs", ("--rank", "--node", "--follow", *_OF_RUNS)),
    "cancel": ("runs", _OF_RUNS),
    "resume": ("runs", ("--force", *_STARTS, *_OF_RUNS)),
    "retry": ("runs", ("--failed", *_STARTS, *_OF_RUNS)),
    "mirror": ("runs", _OF_RUNS),
    "keys": ("keys", ("--json", "--schema", "--config-dir")),
}


@dataclass(frozen=True)
class AddedCommand:
    """Command of an installed package.

    Attributes:
        target: "package.module:function".
    """

    verb: str
    target: str

    @cached_property
    def _text(self) -> ast.Module:
        module = self.target.partition(":")[0]
        try:
            spec = find_spec(module)
            return ast.parse(Path((spec and spec.origin) or "").read_text(encoding="utf-8"))
        except (ImportError, OSError, SyntaxError, ValueError):  # it is named when the command is used
            return ast.Module(body=[], type_ignores=[])

    @property
    def help(self) -> tuple[str, str]:
        """Usage and summary."""
        first = (ast.get_docstring(self._text) or "").partition("\n")[0]
        usage, _, summary = first.removeprefix("`").partition("`: ")
        return (usage, summary.rstrip(".")) if summary else (f"launch {self.verb}", f"command of {self.target}")

    @property
    def flags(self) -> tuple[str, ...]:
        for node in self._text.body:
            if isinstance(node, ast.Assign) and [getattr(name, "id", "") for name in node.targets] == ["FLAGS"]:
                return tuple(ast.literal_eval(node.value))
        return ()


def added_commands() -> dict[str, AddedCommand]:
    """Return the commands of installed packages by their verbs; a verb of the core cannot be replaced."""
    points = sorted(metadata.entry_points(group=GROUP), key=lambda point: point.name)
    return {point.name: AddedCommand(point.name, point.value) for point in points if point.name not in _CORE}


def flags() -> dict[str, tuple[str, ...]]:
    """Return the flags of each command."""
    core = {verb: words for verb, (_, words) in _CORE.items()}
    return core | {verb: command.flags for verb, command in added_commands().items()}


def command_function(verb: str) -> Callable[[list[str]], int]:
    """Return the function of a command.

    Raises:
        UserError: there is no such command, or the package that adds it cannot be imported.
    """
    if verb in _CORE:
        return getattr(importlib.import_module(f"launcher.cli.{_CORE[verb][0]}"), f"launch_{verb}")
    added = added_commands()
    if verb not in added:
        verbs = [*_CORE, *added]
        raise UserError(
            f"launch {verb}: there is no such command.\n  {did_you_mean(verb, verbs)}Commands: {', '.join(verbs)}."
        )
    module, _, function = added[verb].target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(f"launch {verb}: {added[verb].target} cannot be imported: {error}.") from error
