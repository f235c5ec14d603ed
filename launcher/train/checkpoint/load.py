"""Loading of a run's newest intact checkpoint into a fresh engine, with the same or another number of ranks, if the
plan allows it.

With the same world size, every rank's state is restored bit by bit. With another one:

- Random state: a rank whose number existed gets its own state back; a new rank gets a stream seeded by seed, rank and
  step.
- The residue of a compression: the sum over the ranks is preserved. The gradients of W ranks are averaged and then
  multiplied by W (launcher/train/engine/engine.py), so each of W' ranks takes ``sum over the old ranks / W'``. The
  factors are the same on all ranks.
- To a strategy without one: the residue is dropped, with a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from launcher.errors import NoGoodCheckpoint, WrongCheckpoint
from launcher.quantities import count
from launcher.rundir import history
from launcher.rundir.fencing import Fence
from launcher.rundir.files import read_json
from launcher.rundir.paths import STATE, RunPaths
from launcher.task import seed_everything, seed_for
from launcher.train.callback_set import load_tensors
from launcher.train.checkpoint import contents, file_format
from launcher.train.checkpoint.file_format import (
    RANDOM_KEY,
    STRATEGY_KEY,
    STREAM_KEY,
    Reader,
    empty_values,
    entries_under,
    read_values,
)
from launcher.train.checkpoint.optimizer_parts import OptimizerOptions, load_optimizers, state_to_load
from launcher.train.checkpoint.origin import Origin, origin_of, require_same_model, require_same_run
from launcher.train.data.randomness import restore_random_state
from launcher.train.data.stream import is_sharded
from launcher.train.engine.engine import Engine


@dataclass(frozen=True)
class Restored:
    """Result of loading a checkpoint.

    Args:
        directory: the checkpoint.
        run: the caller's data that was passed to ``take_snapshot``.
        origin: description of the plan under which it was saved, see ``origin_of``.
        ranks: number of ranks that saved it.
        comparable: measurements taken then (step time, bytes sent) are still valid under this plan, on this hardware.
        hardware_before, hardware: number of ranks on each model of device, when it was saved and now.
    """

    directory: Path
    run: dict[str, Any]
    origin: Origin
    ranks: int
    comparable: bool
    hardware_before: dict[str, int]
    hardware: dict[str, int]

    def other_commit(self, commit: str | None) -> str | None:
        """Return the commit whose code saved the checkpoint; None if it is ``commit``, or if one is not known."""
        saved_by = self.run.get("account", {}).get("commit")
        return saved_by if commit and saved_by != commit else None


def load_newest(
    engine: Engine, paths: RunPaths, fence: Fence, commit: str | None = None, parts: Mapping[str, Engine] | None = None
) -> Restored | None:
    """Load the newest checkpoint whose files match its manifest, and return it; None if the run has no checkpoint. All
    ranks call it, with a fresh engine.

    Damaged checkpoints are reported, and moved aside once an older one was loaded instead.

    Args:
        commit: commit of the task's present code, if known.
        parts: further engines that the checkpoint has, by name.

    Raises:
        NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
        WrongCheckpoint: the newest intact one does not fit this plan, or has another format, or this user may not read
            it.
        Superseded: a newer attempt has started.
    """
    world = engine.world
    candidates: list[Path] = world.of_rank_0(paths.committed_checkpoints() if world.rank == 0 else [])
    if engine.sites.count > 1:
        candidates = _of_all_sites(engine, paths, candidates)
    damaged: list[Path] = []
    for directory in candidates:
        problems = [p for each in (directory, *parts_of(directory)) for p in file_format.damages(world, each)]
        if any(engine.sites.of_all(bool(problems))):
            damaged += [directory] * bool(problems)
            if world.rank == 0 and problems:
                print(f"Checkpoint {directory} is damaged and not used: {'; '.join(problems)}.", flush=True)
            continue
        _require_parts(directory, parts or {})
        for name, part in (parts or {}).items():
            load(part, directory / name)
        engine.sites.joined = directory.parent != paths.checkpoints
        restored = load(engine, directory)
        if world.rank == 0:
            _move_aside(paths, fence, damaged if engine.sites.count == 1 else _after(paths, engine.steps))
            _note_resume(engine, paths, "resumed", damaged, from_step=engine.steps)
            print(f"Resuming from {directory}: {_describe(engine, restored)}", flush=True)
            if (saved_by := restored.other_commit(commit)) is not None:
                print(f"The code has changed: it is {commit}; the checkpoint was saved by {saved_by}.", flush=True)
        return restored
    if damaged:
        if world.rank == 0:
            _note_resume(engine, paths, "not resumed", damaged)
        raise NoGoodCheckpoint(
            f"None of the {len(damaged)} checkpoints in {paths.checkpoints} can be used: all are damaged.\n"
            "  The log of rank 0 says how. Restore one from a copy; or start a new run, from step 0."
        )
    if world.rank == 0 and paths.metrics.exists() and paths.metrics.stat().st_size:
        print(f"{paths.checkpoints} has no checkpoint: the run and its record restart at step 0.", flush=True)
    return None


def _note_resume(engine: Engine, paths: RunPaths, event: str, damaged: Sequence[Path], **fields: int) -> None:
    """Note from which step the run resumes, and which checkpoints are damaged; of several sites the first one does."""
    if engine.sites.site == 0:
        why = f"damaged: {', '.join(path.name for path in damaged)}" if damaged else None
        history.note_event(paths, event, **fields, why=why)


def _of_all_sites(engine: Engine, paths: RunPaths, candidates: list[Path]) -> list[Path]:
    """Return those of ``candidates`` whose step all sites have, the newest first. A site that the job did not have when
    the first site's newest was saved uses the first site's.

    Raises:
        WrongCheckpoint: sites have checkpoints, and no step is among those of all.
    """
    world, site = engine.world, engine.sites.site
    if world.rank == 0 and site and (of_first := paths.run.committed_checkpoints()):
        saved = (read_json(of_first[0] / STATE) or {}).get("origin", {}).get("sites", 1)
        candidates = of_first if site >= saved else candidates
    candidates = world.of_rank_0(candidates)
    everyone = engine.sites.of_all([path.name for path in candidates])
    common = set(everyone[0]).intersection(*everyone[1:])
    if any(everyone) and not common:
        newest = ", ".join(f"site {site}: {names[0] if names else 'none'}" for site, names in enumerate(everyone))
        raise WrongCheckpoint(
            f"The sites have no checkpoint of the same step ({newest}).\n  Restore one in {paths.checkpoints} from a "
            "copy; or start a new run."
        )
    return [path for path in candidates if path.name in common]


def _after(paths: RunPaths, step: int) -> list[Path]:
    """Return the checkpoints of steps that the run will reach again: another site lacks them, or they are damaged; and
    those that the site has from a time when the job had other sites."""
    return [path for path in paths.committed_checkpoints() if int(path.name.removeprefix("step_")) > step]


def parts_of(directory: Path) -> list[Path]:
    """Return the directories of further engines inside a checkpoint, in one order on all ranks."""
    return sorted(path for path in directory.iterdir() if path.is_dir())


def _require_parts(directory: Path, parts: Mapping[str, Engine]) -> None:
    """Raise WrongCheckpoint unless the checkpoint has exactly these further engines."""
    saved = [path.name for path in parts_of(directory)]
    if saved != sorted(parts):
        raise WrongCheckpoint(
            f"{directory} was saved with the further engines {', '.join(saved) or 'none'}, and engine.resume was given "
            f"{', '.join(sorted(parts)) or 'none'}.\n  Give the same: engine.resume(parts={{name: engine}})."
        )


def _move_aside(paths: RunPaths, fence: Fence, damaged: list[Path]) -> None:
    """Rename checkpoints that are not used: the run will reach their steps again, and save under their names."""
    if damaged:
        fence.check()
    for directory in damaged:
        directory.rename(paths.refused_checkpoint(directory))


def _describe(engine: Engine, restored: Restored) -> str:
    """Return the step that was reached, and what has changed since."""
    before, now = restored.origin, origin_of(engine.plan)
    text = f"{count(engine.steps, 'step')} done"
    if restored.ranks != engine.world.size:
        text += f", at {count(engine.world.size, 'rank')} instead of {restored.ranks}"
    strategy, accumulation, micro_size = "strategy.kind", "batch.accumulation", "batch.micro_size"
    if before["time"][strategy] != now["time"][strategy]:
        text += f", with strategy={now['time'][strategy]} instead of {before['time'][strategy]}"
    if any(before["time"][key] != now["time"][key] for key in (accumulation, micro_size)) or "," in text:
        text += f": accumulation {now['time'][accumulation]}, micro-batch {now['time'][micro_size]}"
    if before["global_size"] != now["global_size"]:
        text += f"; global batch {now['global_size']} instead of {before['global_size']}"
    elif ":" in text:
        text += f"; global batch {now['global_size']} as before"
    if restored.hardware.keys() != restored.hardware_before.keys():
        text += f".\n  Times are measured again on other hardware: {', '.join(restored.hardware)} instead of "
        text += ", ".join(restored.hardware_before)
    return f"{text}."


def require_same_shards(engine: Engine, restored: Restored, dataset: Any) -> None:
    """Check that a stream that shards itself has the same number of ranks as before, if an epoch is in progress. With
    another number, its shares change: some samples would be lost, and others read twice.

    Raises:
        WrongCheckpoint: the number of ranks differs.
    """
    before, ranks = restored.ranks, engine.world.size
    if ranks != before and engine.position.window and is_sharded(dataset):
        raise WrongCheckpoint(
            f"{restored.directory} was saved within an epoch of a stream that shards itself for {before} ranks; its "
            f"shares for {ranks} are different.\n  Resume with {before} ranks; or leave `sharded` out, so that every "
            "rank reads the stream and takes its part."
        )


def load(engine: Engine, directory: Path) -> Restored:
    """Restore the state that the engine had at ``save.take_snapshot``, saved by the same or another number of ranks,
    under the same or another strategy. All ranks call it, with a fresh engine.

    Raises:
        WrongCheckpoint: it is of another model, or of a plan whose training result would differ.
    """
    state, stored = _read_state(directory), Reader(directory).read_metadata()
    origin, saved, plan = state["origin"], state["engine"], engine.plan
    require_same_run(directory, origin, saved["place"]["index"], plan)
    tensors_of = partial(contents.checkpoint_tensors, create_optimizer_state=True)
    tensors = _tensors_to_read(engine, directory, saved, stored, tensors_of)
    ranks = _ranks_in(stored)
    same_ranks = ranks == engine.world.size
    compresses = plan.strategy.compress.keeps_residue and engine.world.size > 1
    random_key, strategy_key, stream_key = (
        f"{key}{engine.world.rank}" for key in (RANDOM_KEY, STRATEGY_KEY, STREAM_KEY)
    )
    tensors[random_key] = empty_values(stored, random_key, engine.device)
    tensors.pop(stream_key)
    stream_keys = [f"{STREAM_KEY}{rank}" for rank in range(ranks)]
    tensors |= {key: empty_values(stored, key, engine.device) for key in stream_keys}
    tensors[strategy_key] = empty_values(stored, strategy_key, engine.device) if same_ranks and compresses else {}
    training = {name: value.clone() for name, value in tensors.get("training", {}).items()}
    tensors["training"] = {
        name: value for name, value in training.items() if f"training.{name}" in stored.state_dict_metadata
    }
    options = OptimizerOptions(engine, directory, tensors["optimizer"]["param_groups"], stored)
    tensors["optimizer"] = state_to_load(engine, directory, stored, state["optimizers"])
    read_values(tensors, directory)
    options.require_same_groups(tensors["optimizer"]["param_groups"])
    contents.load_model(engine.parallel.module, tensors["model"])
    load_optimizers(engine, tensors["optimizer"])
    contents.take_training_values(engine, tensors["training"])
    measured_before, measured_as = saved["measured_as"], engine.measured_as()
    hardware_before, hardware = measured_before["hardware"], measured_as["hardware"]
    comparable = measured_before == measured_as
    engine.load_state_dict(saved, alike=comparable, same_order=same_ranks)
    options.restore(scheduled=saved["follows_plan"])

    not_matching = engine.callbacks.load_state_dict(tensors["callbacks"], state["callbacks"])
    if not_matching and engine.world.rank == 0:
        print(not_matching, flush=True)

    strategy_state = tensors[strategy_key]
    if not same_ranks or not compresses:
        strategy_state = _combined_strategy_state(engine, directory, stored, ranks)
    if strategy_state and compresses:
        engine.parallel.load_state_dict(strategy_state)
    elif strategy_state.get("residue") and engine.world.rank == 0:
        print(_explain_dropped(strategy_state["residue"]), flush=True)
    engine.stream.load_state_dict(tensors[key] for key in stream_keys)
    random = {} if engine.sites.joined else tensors[random_key]
    if not random or (engine.device.type == "cuda" and "cuda" not in random):  # a new rank, or one saved on a CPU
        seed_everything(seed_for(plan.train.seed, f"{engine.world.rank_in_job}/{engine.steps}"))
    if random:
        restore_random_state(random, engine.device)
    return Restored(directory, state["run"], origin, ranks, comparable, hardware_before, hardware)


def load_for_evaluation(engine: Engine, directory: Path) -> dict[str, Any]:
    """Restore what an evaluation needs: the model, the callbacks and the task, and the position in the run. All ranks
    call it, with a fresh engine, which may have another optimizer and fewer callbacks than the run.

    Returns:
        The checkpoint's values that are not tensors.

    Raises:
        WrongCheckpoint: it is of another model.
    """
    state, stored = _read_state(directory), Reader(directory).read_metadata()
    tensors = _tensors_to_read(engine, directory, state["engine"], stored, contents.evaluated_tensors)
    read_values(tensors, directory)
    contents.load_model(engine.parallel.module, tensors["model"])
    engine.load_progress(state["engine"])
    engine.callbacks.load_state_dict(tensors["callbacks"], state["callbacks"])
    return state


def _read_state(directory: Path) -> dict[str, Any]:
    """Return the values of a checkpoint that are not tensors."""
    state = read_json(directory / STATE)
    assert state is not None
    return state


def _tensors_to_read(
    engine: Engine,
    directory: Path,
    saved: Mapping[str, Any],
    stored: Metadata,
    tensors_of: Callable[[Engine, list[str]], dict[str, Any]],
) -> dict[str, Any]:
    """Return the engine's tensors by ``tensors_of``, with the changing buffers and callbacks' state that the checkpoint
    has.

    Raises:
        WrongCheckpoint: it is of another model.
    """
    _fit_buffers(engine, saved, stored)
    buffers = dict(engine.parallel.module.named_buffers())
    tensors = tensors_of(engine, [name for name in saved["changing_buffers"] if name in buffers])
    unknown = [name for name in saved["changing_buffers"] if name not in buffers]
    require_same_model(directory, tensors["model"], stored, unknown)
    tensors["callbacks"] = load_tensors(
        engine.callbacks,
        {path[0]: (entry.size, entry.properties.dtype) for path, entry in entries_under(stored, "callbacks")},
    )
    return tensors


def _fit_buffers(engine: Engine, saved: Mapping[str, Any], stored: Metadata) -> None:
    """Give the buffers whose shape training has changed the shape in the checkpoint, and those that were None or not
    registered at first a tensor; remove those that training has removed.

    Args:
        saved: state of the engine, with names of buffers.
    """
    modules = dict(engine.parallel.module.named_modules())
    late: list[str] = saved["late_buffers"]
    for name in [*saved["changing_buffers"], *saved["gone_buffers"]]:
        entries = [stored.state_dict_metadata.get(f"{part}.{name}") for part in ("model", "buffers")]
        owner, _, last = name.rpartition(".")
        buffers = modules[owner]._buffers if owner in modules else {}
        if name in late and owner in modules and not hasattr(modules[owner], last):
            modules[owner].register_buffer(last, None, persistent=entries[0] is not None)
        if entries == [None, None] and last in buffers:
            buffers[last] = None
        for entry in entries:
            if not isinstance(entry, TensorStorageMetadata) or last not in buffers:
                continue
            buffer = buffers[last]
            if buffer is None:
                buffers[last] = torch.empty(entry.size, dtype=entry.properties.dtype, device=engine.device)
            elif entry.size != buffer.shape:
                buffers[last] = buffer.new_empty(entry.size)


def _ranks_in(stored: Metadata) -> int:
    """Return how many ranks saved the checkpoint, which is the number of random states in it."""
    names = {name.partition(".")[0] for name in stored.state_dict_metadata}
    return sum(name.startswith(RANDOM_KEY) for name in names)


def _combined_strategy_state(engine: Engine, directory: Path, stored: Metadata, ranks: int) -> dict[str, Any]:
    """Return the strategy's state for this rank, combined from that of the ``ranks`` ranks that saved; empty if they
    had none. All ranks call it; each reads the state of all ranks, one at a time."""
    combined: dict[str, Any] = {}
    for rank in range(ranks):
        key = f"{STRATEGY_KEY}{rank}"
        one = {key: empty_values(stored, key, engine.device)}
        if not one[key]:
            return {}
        read_values(one, directory)
        if not rank:
            combined = one[key]
            continue
        for name, residue in one[key].get("residue", {}).items():
            combined["residue"][name] += residue
    for residue in combined.get("residue", {}).values():
        residue /= engine.world.size
    return combined


def _explain_dropped(residue: dict[str, Tensor]) -> str:
    """Return the message that the residue of a compression is lost. ``residue``: its sum over all ranks, divided by
    the number of ranks."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.float()) for part in residue.values()]))
    return (
        f"The residue of strategy.compress, the part of earlier gradients that it had not sent yet (norm "
        f"{norm.item():.3g} per rank, {len(residue)} parameters), is lost: only the same strategy.compress on two or "
        "more ranks can use it."
    )
