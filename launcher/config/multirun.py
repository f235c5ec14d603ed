"""What Hydra's sweepers and the launcher say to each other: the cells that are wanted, and what came of them.

Used by the plugin in hydra_plugins/ alone, inside of `launcher.config.hydra.run_with_config`.
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

# more than that is asked for on purpose
MANY_CELLS = 500
_COUNTED_TO = 1_000_000

# a cell's result, for sweepers that learn from it; None for those that do not; or why there is none
Result = float | None | Exception


@dataclass(frozen=True)
class AskedCell:
    """A cell as a sweeper asks for it. ``overrides``: those that vary; ``yaml``: of the whole config."""

    overrides: tuple[str, ...]
    config: Config
    yaml: str


@dataclass(frozen=True)
class Begin:
    """What a verb does with cells. ``cells``: called with them, and whether their results are waited for.
    ``confirmed``: whether the user has said that there may be many."""

    cells: Callable[[Sequence[AskedCell], bool], Sequence[Result]]
    to_config: Callable[[Any], tuple[Config, str]]
    confirmed: bool


BEGIN: ContextVar[Begin] = ContextVar("BEGIN")


def begin(master: Any, overrides: Sequence[Sequence[str]], composed: Sequence[Any]) -> Sequence[Result]:
    """Begin cells. ``master``: the config that they come from, with Hydra's own part; ``composed``: theirs, without."""
    from hydra.core.hydra_config import HydraConfig

    HydraConfig.instance().set_config(master)  # for what a config takes from it: ${hydra:...}
    typed = {
        override_key(word): word for word in master.hydra.overrides.task
    }  # of a key that comes twice, the last one holds
    fixed = {key for key, word in typed.items() if not _sweeps(word)}
    asked: list[AskedCell] = []
    for words, config in zip(overrides, composed, strict=True):
        asked.append(
            AskedCell(
                tuple(word.removeprefix("++") for word in words if override_key(word) not in fixed),
                *BEGIN.get().to_config(config),
            )
        )
    return BEGIN.get().cells(asked, not _takes_no_results(master))


def _takes_no_results(master: Any) -> bool:
    return str(master.hydra.sweeper["_target_"]).endswith(".BasicSweeper")


def confirm_size(loader: Any, master: Any) -> None:
    """Ask before a sweep of very many cells, which is more often a slip than meant.

    Raises:
        UserError: there is nobody to ask, or the answer is no.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    if BEGIN.get().confirmed or not _takes_no_results(master):
        return
    words = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
    cells = 1
    for override in OverridesParser.create(config_loader=loader).parse_overrides(
        [*words, *master.hydra.overrides.task]
    ):
        if override.is_sweep_override() and override.is_discrete_sweep():
            cells *= sum(1 for _ in itertools.islice(override.sweep_iterator(), _COUNTED_TO))
    if cells <= MANY_CELLS:
        return
    size = f"{cells:,} cells"
    if not sys.stdin.isatty():
        raise UserError(f"This sweep has {size}.\n  If that is meant, add --yes; `launch plan -m ...` begins none.")
    if input(f"This sweep has {size}. Begin all of them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise UserError("Nothing was begun.")


class CellLoader:
    """Hydra's config loader, which takes 50 ms for each of a sweep's cells, and as much to check it beforehand. Cells
    that choose the same groups differ in values only: those are put into a copy of the first one's config. Hydra's own
    part, which nobody reads, is left out."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._by_groups: dict[tuple[str, ...], Any] = {}
        self._known: dict[tuple[str, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load_sweep_config(self, master_config: Any, sweep_overrides: Sequence[str]) -> Any:
        key = tuple(sweep_overrides)
        # asked for twice: by the sweeper, which only checks it, and by the plugin, which gets it for its own
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
                OmegaConf.update(
                    config, override.key_or_group, override.value(), merge=True, force_add=override.is_force_add()
                )
        except Exception:
            return self._load(master, words)  # which finds the words for what is wrong
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
    """Of ``+key=value``."""
    return word.lstrip("+~").partition("=")[0]
