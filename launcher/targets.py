"""Classes that a config names by their dotted path: found, and their arguments checked before they are called.

The command line imports this module, so it does not import torch.
"""

# pyright: basic

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

from launcher.errors import ConfigError, SiteError, did_you_mean
from launcher.quantities import first_names

_entry_points = cache(metadata.entry_points)


def entry_point_names(group: str) -> set[str]:
    """Return the names of a group's entry points in all installed packages."""
    return {point.name for point in _entry_points().select(group=group)}


def entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return a group's entry points in all installed packages, by name; they are read once.

    Raises:
        SiteError: two packages have one of the same name.
    """
    points: dict[str, metadata.EntryPoint] = {}
    for point in sorted(_entry_points().select(group=group), key=lambda point: point.name):
        if point.name in points:
            packages = " and ".join(getattr(each.dist, "name", "?") for each in (points[point.name], point))
            raise SiteError(
                f"Entry point {group}: the installed packages {packages} both add {point.name}.\n  Uninstall one of "
                "them, or rename its entry point."
            )
        points[point.name] = point
    return points


def present_entry_points(group: str) -> dict[str, metadata.EntryPoint]:
    """Return a group's entry points by name, except those whose files are gone; raises like ``entry_points``."""
    return {name: point for name, point in entry_points(group).items() if module_file(point.module) is not None}


def module_file(module: str) -> Path | None:
    """Return the file of a module that an entry point names; None if it is gone.

    Raises:
        SiteError: the package that has it cannot be imported.
    """
    try:
        spec = find_spec(module)
    except Exception as error:  # any code of another package is possible
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        raise SiteError(f"{module} cannot be imported: {error!r}.") from error
    return None if spec is None or spec.origin is None else Path(spec.origin)


def load_entry_point(point: metadata.EntryPoint, what: str) -> Any:
    """Return what an entry point names.

    Raises:
        SiteError: it cannot be imported. The message starts with ``what``.
    """
    try:
        return point.load()
    except Exception as error:  # any code of another package is possible
        raise SiteError(f"{what}: {point.value} cannot be imported: {error!r}.") from error


def load_named(value: str, what: str) -> Any:
    """Return "package.module:name"; raises like ``load_entry_point``."""
    return load_entry_point(metadata.EntryPoint(value, value, ""), what)


def find_target(
    key: str, target: str, search_path: Sequence[str] = (), kind: Literal["class", "function"] = "class"
) -> Callable[..., Any]:
    """Return the class or function with the dotted path ``target``.

    Args:
        key: the config key that names it.
        search_path: directories of the user's code, for the message.
        kind: which of the two it usually is, for the message.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, class_name = target.rpartition(".")
    if not module_name:
        raise ConfigError(key, target, "must be a dotted path, such as my_module.MyClass.")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            searched = f"{', '.join(search_path or sys.path[:1])}, and the packages installed for {sys.executable}"
            near = _nearest_module(error.name, search_path or sys.path[:1])
            raise ConfigError(key, target, f"no module {error.name!r}.", f"{near}Searched: {searched}.") from None
        raise
    cls = getattr(module, class_name, None)
    if cls is None and module_name == "__main__":
        raise ConfigError(
            key, target, "is in the program or notebook that was started, which no worker imports.",
            f"Move it into a module, a file such as my_module.py beside the program, and write {key}=my_module."
            f"{class_name}.",
        )  # fmt: skip
    if cls is None:
        is_kind = inspect.isclass if kind == "class" else inspect.isfunction
        public = [
            name for name, value in vars(module).items()
            if is_kind(value) and value.__module__.startswith(module_name) and not name.startswith("_")
        ]  # fmt: skip
        public += [name for name in getattr(module, "__all__", ()) if name not in vars(module)]  # imported on first use
        modules = _module_names(getattr(module, "__path__", ()))
        near = did_you_mean(class_name, [*public, *modules])
        plural = "classes" if kind == "class" else "functions"
        inner = f" Its modules: {first_names(modules, 8)}." if modules else ""
        raise ConfigError(
            key, target, f"{module.__file__} has no {class_name!r}.",
            f"{near}Its {plural}: {first_names(public, 8) or 'none'}.{inner}",
        )  # fmt: skip
    if not callable(cls):
        raise ConfigError(key, target, f"this is a {type(cls).__name__}, not a class.")
    return cast("Callable[..., Any]", cls)


def _nearest_module(name: str, search_path: Sequence[str]) -> str:
    """Return ``"did you mean 'x'? "`` for a module that does not exist, if another one has its name, or nearly: of the
    same package, else of the user's code, else any that is installed."""
    package, _, last = name.rpartition(".")
    if not package:
        return did_you_mean(last, _module_names(search_path)) or did_you_mean(last, _module_names(sys.path))
    top = package.partition(".")[0]
    for place in map(Path, getattr(sys.modules[top], "__path__", ())):  # it may have moved within the package
        found = [".".join((top, *file.relative_to(place).with_suffix("").parts)) for file in place.rglob(f"{last}.py")]
        if others := sorted({*found} - {name}):
            return f"did you mean '{others[0]}'? "
    places = getattr(sys.modules[package], "__path__", None)
    if places is None:  # a module, perhaps in place of a package
        return _nearest_module(package, search_path)
    return did_you_mean(last, [each for each in _module_names(places) if each != last], f"{package}.")


def _module_names(places: Iterable[str]) -> list[str]:
    places = [*places]
    names = {module.name for module in pkgutil.iter_modules(places)}
    names |= {file.parent.name for place in places for file in Path(place).glob("*/*.py")}  # without __init__.py
    return sorted(name for name in names if name.isidentifier() and not name.startswith("_"))


def require_arguments(
    group: str, target: str, function: Callable[..., Any], arguments: Mapping[str, Any], positional: int = 0
) -> dict[str, Any]:
    """Return the arguments for ``function``, with lists as tuples where it wants those.

    Args:
        group: config group that the arguments are keys of.
        target: dotted path of ``function``.
        positional: number of arguments that the launcher passes before these.

    Raises:
        ConfigError: it has no parameter of that name, lacks one, or takes no such value.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # built in C
        return dict(arguments)
    if len(parameters) < positional:
        raise ConfigError(
            f"{group}._target_", target, f"takes {len(parameters)} arguments, and the launcher passes {positional}."
        )
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    own = {name: each for name, each in list(parameters.items())[positional:] if each.kind not in variable}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name, value in arguments.items():
        if name not in own and not takes_any:
            raise ConfigError(
                f"{group}.{name}", value, f"{target} has no such argument.",
                f"{did_you_mean(name, own, f'{group}.')}Its arguments: {', '.join(own) or 'none'}.",
            )  # fmt: skip
    for name, parameter in own.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"{group}.{name}", None, f"{target} needs this argument.", f"Set {group}.{name}.")
    hints = hints_of(function)
    for name, value in arguments.items():
        is_default = name in own and own[name].default == value
        if name in hints and not is_default and not _fits(value, hints[name]):
            raise ConfigError(f"{group}.{name}", value, f"{target} takes {_type_text(hints[name])} here.")
    return {name: _fitted(value, hints.get(name)) for name, value in arguments.items()}


def hints_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of the arguments of a function, or of a class's constructor; empty if they cannot be
    resolved."""
    try:
        return typing.get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except Exception:  # names that exist only for type checkers
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Return False if ``value``, from a config, is certainly not of the type ``hint``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal:
        return value in args
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if hint is type(None):
        return value is None
    if origin in (tuple, list):
        fixed = origin is tuple and Ellipsis not in args
        inner = args if fixed else args[:1] * (len(value) if isinstance(value, list) else 0)
        return isinstance(value, list) and len(value) == len(inner) and all(map(_fits, value, inner))
    torch = sys.modules.get("torch")
    return torch is None or hint is not torch.Tensor or isinstance(value, int | float)


def _fitted(value: Any, hint: Any) -> Any:
    """Return a list from a config as a tuple if the class wants one."""
    options = [hint, *typing.get_args(hint)]
    wants_tuple = any(option is tuple or typing.get_origin(option) is tuple for option in options)
    return tuple(cast("list[Any]", value)) if isinstance(value, list) and wants_tuple else value


def _type_text(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(str, typing.get_args(hint)))
    return hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint).replace("typing.", "")
