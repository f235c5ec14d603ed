"""Weights that a run starts with: how they are found, what identifies them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from launcher.errors import ConfigError
from launcher.plan import initial_weights
from launcher.plan.initial_weights import InitialWeights, find_weights
from tests.infra.checkpoints import make_checkpoint
from tests.infra.made_runs import make_run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def found(word: str | Path, place: Path) -> InitialWeights:
    return find_weights(str(word), place / "runs", place)


def refused(word: str | Path, place: Path) -> str:
    with pytest.raises(ConfigError) as error:
        found(word, place)
    assert str(error.value).startswith("checkpoint.init_from=")
    return str(error.value)


def test_a_run_by_all_of_its_names(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "runs", "first-run")
    make_run(tmp_path / "runs", "second")
    make_run(tmp_path / "runs", "sect")
    assert "run first-run has no checkpoint yet" in refused("first-run", tmp_path)
    for step in (5, 20):
        make_checkpoint(paths.checkpoint(step), {"a": torch.ones(3)})
    newest = found("first-run", tmp_path)
    assert (newest.run, newest.step, newest.path) == ("first-run", 20, str(paths.checkpoint(20)))
    for word in ("first", "runs/first-run", paths.root, paths.checkpoint(20)):
        assert found(word, tmp_path) == newest
    earlier = found(paths.checkpoint(5), tmp_path)
    assert earlier.step == 5
    assert "did you mean 'second'?" in refused("secnod", tmp_path)
    assert "2 runs match: second, sect." in refused("sec", tmp_path)
    assert "is empty" in refused(" ", tmp_path)
    newest.require_unchanged()
    data = next(paths.checkpoint(20).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert "1 file missing or of another size" in refused("first-run", tmp_path)
    assert "Use another checkpoint: step_000005." in refused("first-run", tmp_path)


def test_safetensors_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {"a": torch.arange(1000.0), "b": torch.ones(2)}
    save_file(weights, tmp_path / "model.safetensors")
    one = found("model.safetensors", tmp_path)
    assert found(tmp_path, tmp_path / "nowhere").digest == one.digest
    assert found(tmp_path / "model.safetensors", Path("/")) == one
    save_file(weights | {"b": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="has changed since the run was planned"):
        one.require_unchanged()
    save_file({"a": torch.zeros(10**6)}, tmp_path / "large.safetensors")
    large = found("large.safetensors", tmp_path)
    monkeypatch.setattr(initial_weights, "_BLOCKS", 2)
    assert found("large.safetensors", tmp_path).digest == large.digest, "all of it"
    monkeypatch.setattr(initial_weights, "_WHOLE_BYTES", 10**6)
    assert found("large.safetensors", tmp_path).digest != large.digest, "sampled"
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-1])
    assert "It was copied in part" in refused("model.safetensors", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    assert "is not a safetensors file, or is damaged" in refused("model.safetensors", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="does not exist on this host"):
        one.require_unchanged()


def test_several_files_with_an_index(tmp_path: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    (place / "pytorch_model.bin").touch()
    assert "*.bin files, which can execute code" in refused(place, tmp_path)
    save_file({"a": torch.ones(2)}, place / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lists model-00002-of-00002.safetensors, which is not in that directory" in refused(place, tmp_path)
    save_file({"b": torch.ones(2)}, place / "model-00002-of-00002.safetensors")
    found(place, tmp_path).require_unchanged()
    (place / "model.safetensors.index.json").write_text("{")
    assert "index.json is damaged" in refused(place, tmp_path)
    (tmp_path / "notes.txt").touch()
    assert "notes.txt is not a .safetensors file" in refused("notes.txt", tmp_path)
