"""`launch keys`: every configuration key with its type, default and meaning, and a JSON schema for editors."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from launcher.cli.names import Parser
from launcher.config.foreign_keys import translation
from launcher.config.key_docs import Group, Key, class_keys, groups
from launcher.config.schema import known_keys
from launcher.errors import EXIT_DONE, UserError, did_you_mean

# group -> number of arguments that the launcher passes to its class before the keys
_CLASSES = {"task": 0, "optimizer": 1, "schedule": 1}


def launch_keys(arguments: list[str]) -> int:
    parser = Parser(prog="launch keys", description="Show configuration keys.")
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only keys that contain it, or whose meaning does; GROUP=OPTION or "
        "GROUP._target_=CLASS: the keys of a task, an optimizer or a schedule",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--schema", action="store_true", help="a JSON schema of files with # @package _global_, or of one WORD's group"
    )
    parser.add_argument("--config-dir", "-cd", type=Path, metavar="DIR", help="directory with your own options")
    options = parser.parse_args(arguments)
    if options.config_dir is not None and not options.config_dir.is_dir():
        raise UserError(f"--config-dir {options.config_dir}: there is no such directory.\n  Searched in {Path.cwd()}.")
    if options.schema:
        from launcher.config.key_docs import schema_of

        print(json.dumps(schema_of(_one_group(options.words)), indent=2))
        return EXIT_DONE
    found = list(_found(options.words, options.config_dir))
    if options.json:
        print(json.dumps([dataclasses.asdict(key) for key in found], indent=2))
    else:
        width = max(40, min(100, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else 100
        print("\n".join(_paragraph(key, width) for key in found))
    return EXIT_DONE


def _one_group(words: Sequence[str]) -> Group | None:
    """Return the group that the only word names; None without a word."""
    if not words:
        return None
    named = {group.name: group for group in groups() if group.options}
    if len(words) > 1 or words[0] not in named:
        raise UserError(f"--schema {' '.join(words)}: is not a group with options.\n  Groups: {', '.join(named)}.")
    return named[words[0]]


def _found(words: Sequence[str], own: Path | None) -> Iterable[Key]:
    """Yield the keys that the words ask for: of a class, or those that contain all other words.

    Raises:
        UserError: there are none.
    """
    chosen = [word for word in words if "=" in word]
    keys = [key for each in groups() for key in each.keys]
    if chosen:
        keys = [key for word in chosen for key in _keys_of_class(word, own)]
        if not keys:
            raise UserError(f"{' '.join(chosen)}: the class has no arguments.\n  `launch keys` lists all other keys.")
    rest = [word.lower().removesuffix(".kind") for word in words if "=" not in word]  # a group's choice
    named = [key for key in keys if all(word in key.name.lower() for word in rest)]
    found = named or [
        key for key in keys if all(word in f"{key.name} {key.type} {key.meaning}".lower() for word in rest)
    ]
    if not found:
        translated = translation(" ".join(rest))
        found = [key for key in keys if re.search(rf"\b{re.escape(key.name)}=", translated)]
    if not found:
        near = did_you_mean(" ".join(rest), [key.name for key in keys] if chosen else known_keys())
        raise UserError(
            f"{' '.join(rest)}: no key contains it, nor does its meaning.\n  {near}`launch keys` lists all."
        )
    return found


def _keys_of_class(word: str, own: Path | None) -> list[Key]:
    """Return the keys of the class that ``GROUP=OPTION`` or ``GROUP._target_=CLASS`` names.

    Args:
        own: directory with options of the user's, such as task/mine.yaml.
    """
    key, _, value = word.partition("=")
    if own is not None and key in _CLASSES and (file := own / key / f"{value}.yaml").is_file():
        import yaml

        content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
        target = content.get("_target_") if isinstance(content, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if not isinstance(target, str):
            raise UserError(f"{file}: has no _target_, the class whose arguments are the keys.\n  Write it there.")
        key, value = f"{key}._target_", target
    name, group = key.removesuffix("._target_"), next((each for each in groups() if each.name == key), None)
    if name not in _CLASSES or (group is not None and value not in group.options):
        options = ", ".join(f"{name}={option}" for option in group.options) if group and name in _CLASSES else ""
        raise UserError(
            f"{word}: names no class whose arguments are keys.\n  Write {options or 'task=OPTION'}, or "
            f"{name if name in _CLASSES else 'task'}._target_=MODULE.CLASS."
        )
    target = value if group is None else str(group.options[value].get("_target_", ""))
    if not target:  # an option of the schema's own, such as optimizer=adamw
        return [each for each in (group.keys if group else ()) if value in each.defaults or not each.defaults]
    sys.path.insert(0, str(Path.cwd()))  # where the user's own classes are
    return class_keys(name, target, _CLASSES[name])


def _paragraph(key: Key, width: int) -> str:
    """Return the key with its default, and its type and meaning below."""
    default = f" = {key.default_text}" if key.default_text else ""
    kind = f"{', '.join(key.options) or key.type}. " if key.options or key.type else ""
    body = textwrap.wrap(
        f"{kind}{key.meaning}", width, initial_indent="    ", subsequent_indent="    ", break_long_words=False
    )
    return "\n".join([f"{key.name}{default}", *body])
