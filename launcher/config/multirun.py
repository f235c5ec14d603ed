"""Interface between Hydra's sweepers and the launcher: requested cells and their results.

Used only by the plugin in hydra_plugins/, within `launcher.config.hydra.run_with_config`.
"""

# pyright: basic

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from launcher.config.schema import Config
from launcher.errors import UserError

# above this number, the user must confirm
MANY_CELLS = 500
_COUNTED_TO = 1_000_000


# a cell's result; None if the sweeper does not use results; an exception if there is no result
Result = float | None | Exception


@dataclass(frozen=True)
class RequestedCell:
    """Cell requested by a sweeper.

    Attributes:
        overrides: those that vary.
        yaml: the whole config.
    """

    overrides: tuple[str, ...]
    config: Config
    yaml: str


@dataclass(frozen=True)
class Begin:
    """Handling of cells by a command.

    Attributes:
        cells: called with the cells, and whether their results are needed.
        confirmed: whether the user allowed very many cells.
    """

    cells: Callable[[Sequence[RequestedCell], bool], Sequence[Result]]
    to_config: Callable[[Any], tuple[Config, str]]
    confirmed: bool


BEGIN: ContextVar[Begin] = ContextVar("BEGIN")


def start_cells(master: Any, overrides: Sequence[Sequence[str]], composed: Sequence[Any]) -> Sequence[Result]:
    """Start cells.

    Args:
        master: config from which they derive, including Hydra's own part.
        composed: the cells' configs, without that part.
    """
    from hydra.core.hydra_config import HydraConfig

    HydraConfig.instance().set_config(master)  # needed by interpolations such as ${hydra:...}
    # of a repeated key the last value is used
    newest = {override_key(word): word for word in master.hydra.overrides.task}
    fixed = {key for key, word in newest.items() if not _sweeps(word)}
    requested: list[RequestedCell] = []
    for words, config in zip(overrides, composed, strict=True):
        varied = tuple(word.removeprefix("++") for word in words if override_key(word) not in fixed)
        requested.append(RequestedCell(varied, *BEGIN.get().to_config(config)))
    return BEGIN.get().cells(requested, not _takes_no_results(master))


def _takes_no_results(master: Any) -> bool:
    return str(master.hydra.sweeper["_target_"]).endswith(".BasicSweeper")


def confirm_size(loader: Any, master: Any) -> None:
    """Ask before starting very many cells, which is usually a mistake.

    Raises:
        UserError: there is no terminal to ask on, or the answer is no.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if BEGIN.get().confirmed or not _takes_no_results(master):
        return
    words = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
    words += master.hydra.overrides.task
    cells = 1
    for override in OverridesParser.create(config_loader=loader).parse_overrides(words):
        if override.is_sweep_override() and override.is_discrete_sweep():
            cells *= sum(1 for _ in itertools.islice(override.sweep_iterator(), _COUNTED_TO))
    if cells <= MANY_CELLS:
        return
    size = f"{cells:,} cells"
    if not sys.stdin.isatty():
        raise UserError(f"This sweep has {size}.\n  Add --yes to start them all; `launch plan -m ...` only plans them.")
    if input(f"This sweep has {size}. Start all of them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("Nothing was started.")


class CellLoader:
    """Cache around Hydra's config loader, which takes 50 ms per cell, and as much for the sweeper's check beforehand.

    Cells that choose the same groups differ only in values, which are inserted into a copy of the first one's config.
    Hydra's own part is omitted, because nothing reads it.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._by_groups: dict[tuple[str, ...], Any] = {}
        self._known: dict[tuple[str, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: Any, sweep_overrides: Sequence[str]) -> Any:
        key = tuple(sweep_overrides)
        # requested twice: by the sweeper, which only checks it, and by the plugin, which uses it
        if key not in self._known:
            self._known[key] = self._compose(master_config, key)
        return self._known[key]

    def _compose(self, master: Any, words: tuple[str, ...]) -> Any:
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from omegaconf import OmegaConf

        parsed = OverridesParser.create(config_loader=self._loader).parse_overrides(list(words))
        values = [override for override in parsed if self._is_value(override)]
        groups = tuple(word for word, override in zip(words, parsed, strict=True) if override not in values)
        if groups not in self._by_groups:
            self._by_groups[groups] = self._load(master, groups)
        config = copy.deepcopy(self._by_groups[groups])
        try:
            for override in values:
                key, value = override.key_or_group, override.value()
                OmegaConf.update(config, key, value, merge=True, force_add=override.is_force_add())
        except Exception:
            return self._load(master, words)  # raises an error that describes the problem
        return config

    def _load(self, master: Any, words: tuple[str, ...]) -> Any:
        from omegaconf import open_dict

        config = self._loader.load_sweep_config(master, list(words))
        with open_dict(config):
            del config["hydra"]
        return config

    def _is_value(self, override: Any) -> bool:
        special = override.is_delete() or override.is_add() or override.package is not None
        return not special and not self._loader.repository.group_exists(override.key_or_group)


def _sweeps(word: str) -> bool:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_override(word).is_sweep_override()


def override_key(word: str) -> str:
    """Return the key of ``+key=value``."""
    return word.lstrip("+~").partition("=")[0]


def cell_label(overrides: Sequence[str]) -> str:
    """Return the overrides without the groups of their keys: ``accumulation=4 workers_per_node=2``."""
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    text = " ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs)
    return text.replace("\\:", ":")  # Hydra escapes the colon in a range of nodes
