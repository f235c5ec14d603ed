"""Commands of `launch`: the core's, and those that installed packages add by the entry point ``launcher.commands``.

An entry point ``VERB = "package.module:function"`` names a function that takes the arguments and returns the exit
status. Help and completion read the module's text without importing it: the first line of its docstring is
"`launch VERB ARGUMENTS`: summary.", and its constant FLAGS is a tuple of flags.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import UserError, did_you_mean

GROUP = "launcher.commands"
# verb -> module of launcher.cli with its function launch_VERB; only that module is imported
_CORE = {
    **dict.fromkeys(("train", "run"), "train"),
    **{verb: verb for verb in ("plan", "keys", "completion")},
    **dict.fromkeys(("runs", "status", "logs", "cancel", "resume", "retry", "mirror"), "runs"),
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


def command_function(verb: str) -> Callable[[list[str]], int]:
    """Return the function of a command.

    Raises:
        UserError: there is no such command, or the package that adds it cannot be imported.
    """
    if verb in _CORE:
        return getattr(importlib.import_module(f"launcher.cli.{_CORE[verb]}"), f"launch_{verb}")
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
