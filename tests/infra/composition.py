"""Composed configs from a cache: Hydra takes 85 ms for one, and the workers of a test need one a case and rank.

``install`` replaces ``hydra.compose``. A config is then composed once for each group option; that of several options
has the group of each. Values such as ``train.steps=5`` are set in a copy of it, by the function that Hydra sets them
with. Hydra itself composes whatever has other overrides or is refused, and all configs of tests/config.
"""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from launcher.config.added_groups import groups_with_options
from launcher.config.hydra import compose as from_overrides

by_hydra = hydra.compose
OPTION = re.compile(rf"({'|'.join(groups_with_options())})=\w+")
VALUE = re.compile(r"(\+\+)?(?!hydra)\w+(\.\w+)+=.*", re.DOTALL)

# by search path, name and options
_composed: dict[tuple[object, ...], Any] = {}


def install() -> None:
    hydra.compose = compose


def fill() -> None:
    """Compose the options that most tests choose, before processes that inherit the cache are forked."""
    for word in (
        "train.steps=1", "strategy=single", "strategy=ddp", "strategy=fsdp", "strategy=hsdp", "precision=fp32",
        "precision=bf16", "precision=fp16", "schedule=constant", "optimizer=sgd", "cluster=slurm", "cluster=hosts",
    ):  # fmt: skip
        from_overrides([word])


def compose(config_name: str | None = None, overrides: list[str] | None = None, **further: Any) -> Any:
    """Stand in for ``hydra.compose``."""
    words = overrides or []
    # others are stored under the same name again, with other content
    known = config_name == "config" and not further and all(OPTION.fullmatch(w) or VALUE.fullmatch(w) for w in words)
    try:
        if known:
            return _from_cache(config_name, words)
    except (HydraException, OmegaConfBaseException):  # Hydra words the error
        pass
    return by_hydra(config_name, words, **further)


def _from_cache(config_name: str | None, words: list[str]) -> Any:
    options = sorted(word for word in words if OPTION.fullmatch(word))
    values = [_parsed(word) for word in words if word not in options]
    groups = {option.partition("=")[0] for option in options}
    if len(groups) < len(options) or any(value.is_sweep_override() for value in values):
        return by_hydra(config_name, words)
    search_path = GlobalHydra.instance().config_loader().get_search_path().get_path()
    places = tuple((place.provider, place.path) for place in search_path)
    if "command-line" in {provider for provider, _ in places}:  # an option there may set what is in other groups
        return by_hydra(config_name, words)

    if (key := (*places, config_name, *options)) not in _composed:
        if len(options) < 2:
            _composed[key] = by_hydra(config_name, options)
        else:
            _composed[key] = config = copy.deepcopy(_from_cache(config_name, []))
            for option in options:
                group = option.partition("=")[0]
                config._content[group] = copy.deepcopy(_from_cache(config_name, [option])._content[group])
                config._content[group]._set_parent(config)
    config = copy.deepcopy(_composed[key])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


@functools.cache
def _parsed(word: str) -> Any:
    return OverridesParser.create().parse_override(word)
