"""Messages about wrong values, in the words of the configuration."""

from __future__ import annotations

import pytest
from omegaconf.errors import ValidationError

from launcher.config.config_errors import in_plain_words
from launcher.errors import ConfigError


@pytest.mark.parametrize("union", ["int, str", "str, int"])
def test_a_key_of_two_types_has_one_message(union: str) -> None:
    """typing keeps one of two equal unions, in the order of whoever made the first, and OmegaConf prints that one."""
    error = ValidationError()
    error.full_key = "cluster.nodes"
    error.msg = f"Value '2.5' of type 'float' is incompatible with type hint 'Optional[Union[{union}]]'"
    with pytest.raises(ConfigError) as caught, in_plain_words(("cluster.nodes=2.5",)):
        raise error
    assert str(caught.value) == "cluster.nodes: must be a whole number, not '2.5'."
