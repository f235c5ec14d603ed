"""Config groups and options that installed packages add by the entry point ``launcher.config``.

NAME = "package.module:Dataclass" adds the group NAME, whose keys are the fields of the dataclass, declared as in
``launcher.config.schema``; NAME = "package.module" adds only options. The options are the files GROUP/OPTION.yaml in
the folder conf/ beside that module, for groups of the core or its own. The module is read by every command that reads a
configuration, so it imports nothing but ``launcher.config`` and ``launcher.errors``.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

from launcher.config.key_facts import default_of
from launcher.errors import SiteError
from launcher.targets import load_entry_point, module_file, present_entry_points

GROUP = "launcher.config"
_PACKAGE = Path(__file__).resolve().parent.parent
# conf/ is inside the package in a wheel, beside it in a checkout
CONF = _PACKAGE / "conf" if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent / "conf"


@cache
def _points() -> dict[str, EntryPoint]:
    return present_entry_points(GROUP)


@cache
def added_groups() -> dict[str, type[Any]]:
    """Return the dataclass of each added group by its name.

    Raises:
        SiteError: one cannot be imported.
    """
    named = {name: point for name, point in _points().items() if point.attr}
    return {name: load_entry_point(point, f"The config group {name}") for name, point in named.items()}


def group_name(kind: type[Any]) -> str:
    """Return the name of the added group with the dataclass ``kind``; empty if it is not installed."""
    return next((name for name, each in added_groups().items() if each is kind), "")


def chosen_by_default() -> dict[str, str]:
    """Return the default option of each added group that has options.

    Raises:
        SiteError: a group has no key ``kind`` whose default is one of its options.
    """
    chosen: dict[str, str] = {}
    for name, kind in added_groups().items():
        if options := option_files(name):
            field = cast("Any", kind).__dataclass_fields__.get("kind")
            default = default_of(field) if field else None
            chosen[name] = str(getattr(default, "value", default))
            if chosen[name] not in options:
                wanted = f"{_points()[name].value} needs a key kind with one of its options as the default"
                raise SiteError(f"The config group {name}: {wanted}: {', '.join(options)}.")
    return chosen


def conf_dirs() -> tuple[Path, ...]:
    """Return the directories with the files of options, the core's first."""
    places = [file.parent / "conf" for point in _points().values() if (file := module_file(point.module))]
    return (CONF, *(place for place in dict.fromkeys(places) if place.is_dir()))


def option_files(group: str) -> dict[str, Path]:
    """Return the file of each option of a group by its name; the core's options cannot be replaced."""
    files = [file for place in reversed(conf_dirs()) for file in place.glob(f"{group}/*.yaml")]
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def groups_with_options() -> list[str]:
    """Return the names of the groups that have options."""
    return sorted({file.parent.name for place in conf_dirs() for file in place.glob("*/*.yaml")})
