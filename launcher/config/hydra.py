"""Hydra interface: command line or overrides -> Config."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import sys
import tempfile
import typing
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.config import config_errors
from launcher.config.added_groups import CONF, chosen_by_default, conf_dirs, groups_with_options, option_files
from launcher.config.key_facts import facts_of, key_of
from launcher.config.schema import WITH_TARGET, Config, group_kinds
from launcher.errors import ConfigError, SiteError
from launcher.process import environment

if TYPE_CHECKING:
    from launcher.config.multirun import Begin, RequestedCell, Result


_PRIMARY = "config"
_SCHEMA = "launcher_schema"
_ADDED = "launcher_added"
_RESUMED = "launcher_resumed"
_CELL_LAUNCHER = "hydra_plugins.launcher_cells.CellLauncher"
_OPEN_KEYS = r"(task|cluster\.sbatch)\.[^=]+="


def compose(overrides: Sequence[str] = ()) -> Config:
    """Return the config of ``launch train OVERRIDES``.

    Raises:
        ConfigError: an unknown key or option, or a value of the wrong type.
    """
    return _composed(overrides, _typed)


def compose_with_yaml(overrides: Sequence[str] = ()) -> tuple[Config, str]:
    """Return the config of ``compose``, and the YAML that is stored with the run."""
    return _composed(overrides, _to_config)


def _composed(overrides: Sequence[str], convert: Callable[[Any], Any]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    _register_schema()
    overrides = _open_free_keys(overrides)
    with config_errors.in_plain_words(overrides), initialize_config_dir(str(CONF), version_base="1.3"):
        return convert(hydra_compose(_PRIMARY, overrides=list(overrides)))


def recompose(kept: str, overrides: Sequence[str]) -> tuple[Config, str]:
    """Return a run's config from its stored YAML with ``overrides`` applied, and the new YAML.

    If an override chooses another option of a group (strategy=fsdp), the group starts with that option's values,
    because the run's values belonged to the old option.

    Raises:
        ConfigError: as ``compose``.
        SiteError: the run uses a group of a package that is no longer installed.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    _register_schema()
    saved: Any = OmegaConf.to_container(OmegaConf.create(kept))
    for group in [name for name in saved if name not in group_kinds()]:
        values = saved.pop(group)
        if values.get("kind", "none") != "none" or ("kind" not in values and any(values.values())):
            raise SiteError(
                f"{group}: the run's config has values of this group, which no installed package adds.\n"
                "  Install the package that added it."
            )
    overrides = _open_free_keys(overrides)
    defaults: list[Any] = [_SCHEMA]
    added = chosen_by_default()
    for group in groups_with_options():
        if group not in added and group != "task" and "kind" not in saved.get(group, ()):
            continue  # a package's folder conf/ has a file in a folder of another name
        # an added group is missing if its package was installed later
        had = _option(group, saved[group]) if group in saved else added[group]
        chosen = [word.partition("=")[2] for word in overrides if word.partition("=")[0] == group]
        if chosen and chosen[-1] != had:
            before = saved.pop(group, {})
            if group == "optimizer" and chosen[-1] == "custom":  # which has no learning rate of its own
                saved[group] = {"lr": before["lr"]}
        defaults.append({group: had})
    ConfigStore.instance().store(name=_RESUMED, node={"defaults": [*defaults, "_self_"], **saved})
    with config_errors.in_plain_words(overrides), initialize_config_dir(str(CONF), version_base="1.3"):
        return _to_config(hydra_compose(_RESUMED, overrides=list(overrides)))


def amended(yaml: str, group: str, values: dict[str, Any]) -> str:
    """Return the config ``yaml`` with ``values`` set in ``group``."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(yaml)
    OmegaConf.update(config, group, values)
    return OmegaConf.to_yaml(config)


def _option(group: str, values: dict[str, Any]) -> str | None:
    """Return the option of a group that ``values`` were made from; None for a user's own task."""
    from omegaconf import OmegaConf

    if group != "task" and not values.get("groups"):
        return str(values["kind"])
    options: dict[str, Any] = {name: OmegaConf.load(file) for name, file in option_files(group).items()}
    if group != "task":  # two optimizers of one kind, such as adamw and muon, differ in their groups
        alike = [name for name, each in options.items() if each.get("groups") == values["groups"]]
        return next((name for name in alike if options[name].get("kind") == values["kind"]), str(values["kind"]))
    return next((name for name, each in options.items() if each.get("_target_") == values.get("_target_")), None)


def run_with_config(
    verb: str,
    arguments: Sequence[str],
    act: Callable[[Config, str], int],
    cells: Callable[[Sequence[RequestedCell], bool], Sequence[Result]] | None = None,
    *,
    confirmed: bool = False,
    keep: Callable[[Path], None] = lambda _: None,
) -> int:
    """Let Hydra parse a command's arguments and its own flags (--help, --cfg, --config-dir, -m), then call ``act``.

    Args:
        act: called with the config and its YAML; returns an exit status. The highest one is returned here.
        cells: called for -m with the cells that a sweeper requests, and whether it needs their results. Default:
            ``act``.
        confirmed: whether very many cells are allowed.
        keep: called with the directory of the sweeper's own files before it is deleted.

    Raises:
        ConfigError: as ``compose``.
    """
    config_errors.require_directories(arguments)
    if {"--help", "-h"} & set(arguments):
        print(_help(verb, arguments), end="")
        return 0
    _register_schema()
    config_errors.require_known_keys(arguments)
    if not any(argument.startswith("-") or "hydra" in argument for argument in arguments):
        try:  # faster than Hydra's application, which composes twice
            composed = compose_with_yaml(arguments)
        except ConfigError:  # an interpolation may need the application; otherwise it reports the same error
            pass
        else:
            return act(*composed)
    from launcher.config.multirun import Begin

    statuses = [0]

    def begin(requested: Sequence[RequestedCell], with_results: bool) -> Sequence[Result]:
        if cells is not None:
            return cells(requested, with_results)
        statuses.extend(act(cell.config, cell.yaml) for cell in requested)
        return [None] * len(requested)

    # no limit on the number of cells if they are only displayed
    composed_by_hydra = _run_application(verb, arguments, Begin(begin, _to_config, confirmed or cells is None), keep)
    statuses.extend(act(*composed) for composed in composed_by_hydra)
    return max(statuses)


def _run_application(
    verb: str, arguments: Sequence[str], begin: Begin, keep: Callable[[Path], None]
) -> list[tuple[Config, str]]:
    """Run Hydra's application with a command's arguments.

    Args:
        begin: receives the cells of -m.
        keep: called with the directory of the sweeper's own files before it is deleted.

    Returns:
        The config of a single job; none with -m, and if Hydra only prints something.

    Raises:
        ConfigError: in place of Hydra's errors. Exceptions of ``begin`` are raised as they are.
    """
    from hydra import main as hydra_main

    from launcher.config.multirun import BEGIN

    arguments = _open_free_keys(arguments)
    configs: list[tuple[Config, str]] = []
    wrong: list[Exception] = []
    of_begin: list[Exception] = []

    def job(composed: Any) -> None:
        try:
            configs.append(_to_config(composed))
        except Exception as error:  # raised below: Hydra prints lines of its own about an exception from a job
            wrong.append(error)

    def cells(requested: Sequence[RequestedCell], with_results: bool) -> Sequence[Result]:
        try:
            return begin.cells(requested, with_results)
        except Exception as error:
            of_begin.append(error)
            raise

    application = hydra_main(version_base="1.3", config_path=str(CONF), config_name=_PRIMARY)(job)
    argv, token = sys.argv, BEGIN.set(dataclasses.replace(begin, cells=cells))
    try:
        sys.argv = [f"launch {verb}", *arguments]
        with tempfile.TemporaryDirectory() as sweep_dir:
            # the first makes Hydra raise instead of printing and exiting with status 1
            variables = {"HYDRA_FULL_ERROR": "1", "LAUNCHER_SWEEP_DIR": sweep_dir}
            try:
                with environment(os.environ | variables), config_errors.in_plain_words(arguments):
                    application()
                    if wrong:
                        raise wrong[0]
            except Exception:
                if of_begin:  # raised here, because Hydra's errors are reworded
                    raise of_begin[0] from None
                raise
            finally:
                keep(Path(sweep_dir))
    finally:
        BEGIN.reset(token)
        sys.argv = argv
    return configs


def _help(verb: str, arguments: Sequence[str]) -> str:
    """Return the groups with their options, and every key with the value that ``arguments`` give it."""
    places = config_errors.directories(arguments)
    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    if places:
        overrides.append(f"hydra.searchpath=[{','.join(f'file://{place.resolve()}' for place in places)}]")
    groups: dict[str, set[str]] = {}
    for file in itertools.chain(*(place.glob("*/*.yaml") for place in (*conf_dirs(), *places))):
        groups.setdefault(file.parent.name, set()).add(file.stem)
    width = max(map(len, groups))
    options = "".join(f"  {group:{width}}  {', '.join(sorted(groups[group]))}\n" for group in sorted(groups))
    return (
        f"launch {verb} [key=value ...]        all verbs and flags: launch --help\n\n"
        f"Groups, chosen by group=option:\n{options}\n"
        "Keys, set by key=value; types, units and meanings are in launcher/config/schema.py:\n"
        + "".join(f"  {line}\n" for line in compose_with_yaml(overrides)[1].splitlines())
    )


@cache
def _register_schema() -> None:
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    schema = OmegaConf.structured(_schema())
    for group in WITH_TARGET:
        schema[group]._set_flag("struct", False)
    store = ConfigStore.instance()
    store.store(name=_SCHEMA, node=schema)
    store.store(name=_ADDED, node={"defaults": [{group: option} for group, option in chosen_by_default().items()]})
    store.store(group="hydra/launcher", name="cells", node={"_target_": _CELL_LAUNCHER})


def _schema() -> type[Any]:
    """Return a dataclass of all groups, in which every key that may be null accepts null."""
    own = {field.name: field for field in dataclasses.fields(Config)}
    fields: list[Any] = []
    for name, hint in group_kinds().items():
        kind = _nullable(hint) if dataclasses.is_dataclass(hint) else hint
        factory: Any = own[name].default_factory if kind is hint else kind
        fields.append((name, kind, dataclasses.field(default_factory=factory)))
    return dataclasses.make_dataclass("Config", fields, kw_only=True)


def _nullable(kind: Any) -> type[Any]:
    hints = _hints(kind)
    fields: list[Any] = []
    for field in dataclasses.fields(kind):
        name, hint, facts = key_of(field), hints[field.name], facts_of(field)
        if name != "*":
            default, factory = field.default, field.default_factory
            copy: Any = dataclasses.field(default=default, default_factory=factory)  # pyright: ignore
            fields.append((name, hint | None if facts.nullable else hint, copy))
    return dataclasses.make_dataclass(kind.__name__, fields, kw_only=True)


def _to_config(composed: Any) -> tuple[Config, str]:
    from omegaconf import OmegaConf

    config = _typed(composed)  # which replaces nulls in ``composed`` too
    return config, OmegaConf.to_yaml(composed)


def _typed(composed: Any) -> Config:
    """Return the typed config. A null is replaced by the default, unless None is a value of that field."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True, enum_to_str=False)
    config = Config()
    for group, kind in group_kinds().items():
        if not dataclasses.is_dataclass(kind):
            setattr(config, group, values[group])
            continue
        default, hints = config.groups()[group], _hints(kind)
        if group == "optimizer" and values[group]["lr"] is None:
            raise _error_of("optimizer.lr", "null has no meaning here: give the learning rate")
        for name, value in values[group].items():
            if name in hints and value is None and type(None) not in typing.get_args(hints[name]):
                values[group][name] = getattr(default, name)
                OmegaConf.update(composed, f"{group}.{name}", values[group][name])
        if group in WITH_TARGET:
            values[group] = _with_arguments(group, values[group])
        where = vars(config) if group in vars(config) else config.added
        where[group] = dataclasses.replace(default, **values[group])
    return config


_hints = cache(typing.get_type_hints)


def _with_arguments(group: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` with the keys that have no field in ``arguments``."""
    fields = {key_of(field) for field in dataclasses.fields(group_kinds()[group])}
    arguments = {name: value for name, value in values.items() if name not in fields}
    if arguments and values["kind"].value != "custom" and values["_target_"] is None:
        raise _error_of(f"{group}.{next(iter(arguments))}", "there is no such key")
    own = {name: value for name, value in values.items() if name in fields - {"_target_"}}
    return {**own, "target": values["_target_"], "arguments": arguments}


def _error_of(key: str, problem: str) -> Exception:
    """Return an error like OmegaConf's own, for config_errors to find where ``key`` is set."""
    from omegaconf.errors import ConfigKeyError

    error = ConfigKeyError(problem)
    error.full_key, error.msg = key, problem
    return error


def _open_free_keys(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``++`` before keys of the task (defined by its class) and of sbatch (by Slurm), and
    GROUP=custom added if GROUP._target_ is given and no option of the group."""
    given = {argument.lstrip("+").partition("=")[0] for argument in arguments}
    words: list[str] = []
    for argument in arguments:
        group, _, value = argument.lstrip("+").partition("._target_=")
        if group in WITH_TARGET and group not in given and value != "null":
            words.append(f"{group}=custom")
        words.append(f"++{argument}" if re.match(_OPEN_KEYS, argument) else argument)
    return words
