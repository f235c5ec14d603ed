"""Messages about wrong values, in the words of the configuration."""

from __future__ import annotations

import re

import pytest
from omegaconf.errors import ValidationError

from launcher.config import foreign_keys
from launcher.config.config_errors import in_plain_words
from launcher.config.hydra import compose
from launcher.config.schema import facts_by_key, known_keys
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


def test_the_answers_to_other_trainers_names_are_keys_and_options_that_exist() -> None:
    known = known_keys()
    for remedy, names in foreign_keys._NAMES.items():
        for key, value in re.findall(r"\b([a-z_]+(?:\.[a-z_]+)*)=([\w\[\],]*[\w\]])", remedy):
            assert key in known or key.startswith(("task", "cluster.sbatch.", "optimizer._", "schedule._")), key
            if value.islower() and key not in ("task", "trackers"):
                compose([f"{key}={value}"])
        assert not {name for name in names.split() if name in known}, "a key of the launcher"
    counts = [name for names in foreign_keys._NAMES.values() for name in names.split()]
    assert len(counts) == len(set(counts)), "a name with two answers"


def test_a_former_name_of_a_key_is_refused_with_its_new_name() -> None:
    renamed = {facts.was: name for name, facts in facts_by_key().items() if facts.was}
    assert renamed
    for was, name in renamed.items():
        with pytest.raises(ConfigError, match=rf"^{was}=1: there is no such key\.\n  Write {name}\.$"):
            compose((f"{was}=1",))


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("schedule.decay", "did you mean 'schedule.decay_share'? Otherwise: Write optimizer.weight_decay=X."),
        ("cluster.gpus", "Write cluster.workers_per_node=N"),
        ("train.save_steps", "Write checkpoint.every=N, in optimizer steps, or checkpoint.every=epoch."),
        ("train.deepspeed", "Write strategy=fsdp"),
    ],
)
def test_a_key_of_the_same_group_comes_before_another_trainers_name(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"there is no such key\.\n  {re.escape(words)}"):
        compose((f"{key}=0.2",))
