"""Errors in a user's configuration file, reported with file, line and key."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from launcher.errors import ConfigError, did_you_mean

_DIR_FLAGS = ("--config-dir", "-cd")


def directories(arguments: Sequence[str]) -> list[Path]:
    """Return the configuration directories that the command line names."""
    found = [after for flag, after in itertools.pairwise(arguments) if flag in _DIR_FLAGS]
    found += [argument.partition("=")[2] for argument in arguments if argument.startswith("--config-dir=")]
    return [Path(place) for place in found]


def explain_composition(
    text: str, arguments: Sequence[str], known: Sequence[str], plain: Callable[[str], str]
) -> ConfigError | None:
    """Return the message for a Hydra error about the content of a file; None if it is not about one.

    Args:
        text: Hydra's message, such as "In 'experiment/bad': ConfigKeyError raised while composing config: ...".
        known: every key that may be set.
        plain: rewords OmegaConf's message about a value.
    """
    match = re.match(r"In '([^']+)': \w+ raised while composing config:\n(.*)", text)
    file = None if match is None else _file(f"{match[1]}.yaml", arguments)
    if match is None or file is None:
        return None
    key = (re.search(r"full_key: *(\S*)", text) or ["", ""])[1].partition("[")[0]
    group = match[1].rpartition("/")[0]
    if "is not a subclass of" in match[2]:  # a value in place of a group of keys; OmegaConf does not name the key
        key = next(
            (name for name, value in _content(file).items() if name in known and not isinstance(value, dict)), ""
        )
        return ConfigError(
            _where(file, key), None, "must have keys of its own.", f"Write {key or 'GROUP'}: {{KEY: VALUE}}."
        )
    if key == group or (key.startswith(f"{group.replace('/', '.')}.") and group.split("/")[0] not in known):
        return ConfigError(
            _where(file, ""), None, f"its keys became those of a group {group!r}, which does not exist.",
            "Make its first line `# @package _global_`, so that they are keys of the whole configuration.",
        )  # fmt: skip
    if re.match(r"Key '.*' not in", match[2]):
        parent = key.rpartition(".")[0]
        beside = [name for name in known if name.rpartition(".")[0] == parent]
        nearest = did_you_mean(key, beside).strip() or f"Allowed: {', '.join(beside)}."
        return ConfigError(_where(file, key), None, "there is no such key.", nearest)
    return ConfigError(_where(file, key), None, plain(match[2]))


def explain_yaml(error: Any) -> ConfigError:
    """Return the message for a file that is not YAML. ``error``: yaml.YAMLError."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return ConfigError("config", None, " ".join(str(error).split()))
    what = getattr(error, "problem", None) or "it cannot be read"
    return ConfigError(f"{_near(Path(mark.name))}, line {mark.line + 1}", None, f"is not valid YAML: {what}.")


def chosen_in(group: str, option: str, arguments: Sequence[str]) -> str | None:
    """Return the place where a configuration file, not the command line, chooses ``option`` of ``group``."""
    words = {argument.lstrip("+") for argument in arguments}
    if f"{group}={option}" in words:
        return None
    pattern = re.compile(
        rf"\s*-\s*(override\s+)?/?{re.escape(group)}(@\S*)?\s*:\s*['\"]?{re.escape(option)}['\"]?\s*(#.*)?"
    )
    for place in directories(arguments):
        for file in sorted(place.rglob("*.yaml")):
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if pattern.fullmatch(line):
                    return f"{_near(file)}, line {number}: {group}"
    return None


def _file(name: str, arguments: Sequence[str]) -> Path | None:
    return next((place / name for place in directories(arguments) if (place / name).is_file()), None)


def _near(file: Path) -> str:
    """Return the path relative to the working directory if it is below that, else unchanged."""
    try:
        return str(file.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(file)


def _where(file: Path, key: str) -> str:
    line = _line(file, key)
    return f"{_near(file)}{f', line {line}' if line else ''}{f': {key}' if key else ''}"


def _content(file: Path) -> dict[str, Any]:
    import yaml

    content: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _line(file: Path, key: str) -> int | None:
    """Return the line of ``key``, found by its full name or by the suffix that remains within the file's package."""
    import yaml

    root: Any = cast("Any", yaml).compose(file.read_text(encoding="utf-8"))
    names = key.split(".") if key else []
    for start in range(len(names)):
        line = _line_below(root, names[start:])
        if line is not None:
            return line
    return None


def _line_below(node: Any, names: Sequence[str]) -> int | None:
    pairs: list[tuple[Any, Any]] = node.value if getattr(node, "id", "") == "mapping" else []
    for label, value in pairs:
        if label.value == names[0]:
            return label.start_mark.line + 1 if len(names) == 1 else _line_below(value, names[1:])
    return None
