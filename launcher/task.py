"""Task protocol, which users implement, and functions that load a task and build its model and data. The command line
imports this module, so it does not import torch at module level."""

# pyright: basic

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from launcher.errors import TaskError
from launcher.loss import loss_form
from launcher.quantities import first_names
from launcher.targets import find_target, require_arguments

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

    from launcher.loss import Loss


# names, beside those that end in "seed", that the code of a worker_init_fn uses if all it does is to seed generators
_SEEDS = {
    "torch", "random", "numpy", "np", "manual_seed_all", "cuda", "seed_everything", "seed_all", "get_state",
    "get_worker_info", "utils", "data", "id", "int", "args", "cfg", "config",
}  # fmt: skip
REQUIRED_METHODS = ("model", "train_data", "loss")
OPTIONAL_METHODS = (
    "eval_data", "collate", "order", "lengths", "length", "micro_batch_tokens", "items", "flops_per_sample",
    "tokens_per_sample", "shard_units", "compile_units", "optimizer", "schedule", "eval_metrics", "sample", "export",
    "export_config", "fixed_arguments", "state_dict", "load_state_dict",
)  # fmt: skip


class Task(Protocol):
    """Protocol of the class that `task._target_` names. No base class is needed.

    Optional methods:
        ``collate(samples: list) -> batch``: default, torch's default_collate.
        ``order(epoch, seed) -> indices``: the training samples of an epoch, in order; a sample may occur several times.
            All epochs have equally many. By default, train.shuffle decides.
        ``lengths(data) -> sequence``: a number for each sample of the training data, for batch.balance=length; or
            ``length(sample) -> float``, for which each sample is read once before training.
        ``micro_batch_tokens(lengths) -> float``: tokens of a micro-batch of samples of these lengths, longest first,
            for batch.micro_tokens; by default those of a ``collate`` that is a Packing, else padded to the longest.
        ``items(batch) -> list``: number of items of each term of a loss of several terms, as ``loss`` returns them; by
            default they are counted by forward passes.
        ``flops_per_sample() -> float``: model FLOPs of one sample, forward and backward, for throughput/flops_per_s
            and throughput/mfu; by default they are counted.
        ``tokens_per_sample() -> int``: tokens of each sample, if all have equally many, for batch.global_tokens.
        ``shard_units(model) -> list[nn.Module]``: modules that FSDP and HSDP gather together; by default, the repeated
            blocks of the model.
        ``compile_units(model) -> list[nn.Module]``: modules that train.compile compiles one by one; by default, the
            whole model under single and DDP, the shard units under FSDP and HSDP.
        ``optimizer(model)``: an optimizer of the model's trained parameters, or a list of several; by default, that of
            the optimizer group.
        ``schedule(optimizer, steps)``: a torch.optim.lr_scheduler.LRScheduler that is stepped after each of ``steps``
            optimizer steps (None: not known); by default, that of the schedule group.
        ``eval_metrics()``: torchmetrics objects, updated in the evaluation with the outputs of the loss.
        ``export(model, directory)``: writes further files of `launch export` into ``directory`` (pathlib.Path);
            ``model`` is on the CPU and has the exported values.
        ``export_config(model, directory, dtype)``: writes the configuration of a model that is not of transformers into
            ``directory``; ``model`` may have no values, ``dtype`` is the torch.dtype of the exported parameters.
        ``fixed_arguments() -> dict``: arguments that the plan stores with those of the config, so that all ranks and
            later attempts read what the plan has read, such as the commit of a name.
        ``state_dict()``, ``load_state_dict(state)``: state of the task in checkpoints, the same on all ranks: nested
            dicts of tensors and JSON values.
        ``outputs(model, batch)`` and ``window_loss(outputs) -> Loss``, in place of ``loss``: a tensor, or a tuple or
            dict of tensors, with one row for each sample; and the loss of the rows of all samples of a window.
    """

    def model(self) -> nn.Module: ...
    def train_data(self) -> Dataset[Any]: ...
    def eval_data(self) -> Dataset[Any] | dict[str, Dataset[Any]] | None: ...
    def loss(self, model: Callable[..., Any], batch: Any) -> Loss | Sequence[Loss] | Tensor: ...


def load_task(target: str, params: dict[str, Any], search_path: Sequence[str], seed: int | None = None) -> Task:
    """Import the class named ``target`` and construct it with ``params``.

    Args:
        target: dotted path, "package.module.Class".
        params: keyword arguments of its constructor.
        search_path: directories that are searched before Python's own.
        seed: the job's seed (train.seed), so that the constructor's random numbers are the same on every rank and in
            every attempt. None: the generators are not seeded.

    Raises:
        ConfigError: there is no such module, class or argument, or a value of another type than the class declares.
        TaskError: a required method is missing.
    """
    if seed is not None:
        seed_everything(seed_for(seed, "task"))
    cls = find_class(target, search_path)
    params = require_arguments("task", target, cls, params)
    if seed is not None:
        seed_everything(seed_for(seed, "task"))  # again after the import, which may have imported NumPy
    task = cls(**params)
    form = loss_form(task)
    required = [name for name in REQUIRED_METHODS if name != "loss" or form is None]
    missing = [name for name in required if not callable(getattr(task, name, None))]
    if missing:
        raise TaskError(
            f"task._target_={target}: the class has no method {' and no method '.join(missing)}.\n"
            "  A task has model(), train_data(), loss(model, batch), and eval_data() if there is held-out data; in "
            "place of loss it may have both outputs(model, batch) and window_loss(outputs)."
        )
    if callable(getattr(task, "state_dict", None)) != callable(getattr(task, "load_state_dict", None)):
        raise TaskError(
            f"task._target_={target}: the class has one of the methods state_dict() and load_state_dict(state).\n"
            "  A task whose state is in checkpoints has both."
        )
    return cast("Task", task)


def find_class(target: str, search_path: Sequence[str]) -> Callable[..., Any]:
    """Import the class named ``target``, see ``load_task``."""
    for directory in reversed(search_path):
        if directory not in sys.path:
            sys.path.insert(0, directory)
    return find_target("task._target_", target, search_path)


def file_of(task: Task) -> Path | None:
    """Return the file that defines the task's class, if it has one."""
    file = getattr(sys.modules.get(type(task).__module__), "__file__", None)
    return None if file is None else Path(file)


def build_model(task: Task, seed: int) -> nn.Module:
    """Return the task's model, built under the job's seed: the same on every rank and in every attempt."""
    seed_everything(seed)
    return task.model()


def train_data(task: Task, seed: int, notes: list[str] | None = None) -> Any:
    """Return the task's training data, built under the job's seed: the same on every rank and in every attempt.

    The seed is the same as for ``eval_data``, so that a random split made in both methods is the same split. It differs
    from the model's, so that a teacher model built here does not have the student's initial values.

    Args:
        notes: list to which the task's ``notes`` are appended, and one if a DataLoader or ReadyBatches were returned.

    Raises:
        TaskError: it is several data sets.
    """
    seed_everything(seed_for(seed, "data"))
    data: Any = task.train_data()
    if notes is not None:
        notes += getattr(task, "notes", ())
    if _are_several(data) or (isinstance(data, dict) and data and 0 not in data):
        raise TaskError(
            f"train_data() returned a {type(data).__name__} of {_kinds(data)}: it must be one data set, whose elements "
            "are samples.\n  Return the data set itself; torch.utils.data.ConcatDataset joins several."
        )
    return _dataset_of(task, data, "train_data()", notes)


def eval_sets(task: Task, seed: int, notes: list[str] | None = None) -> dict[str, Any]:
    """Return the task's held-out data sets by name, built under the same seed as ``train_data``.

    A single set has the name "". Without held-out data the result is empty.

    Raises:
        TaskError: ``eval_data`` returned something else than a data set, or a dict of them by name; one is empty.
    """
    if not callable(getattr(task, "eval_data", None)):
        return {}
    seed_everything(seed_for(seed, "data"))
    data: Any = task.eval_data()
    if data is None:
        return {}
    if _are_several(data):
        raise TaskError(
            f"eval_data() returned a {type(data).__name__} of {_kinds(data)}.\n"
            "  Return one data set, or a dict of several by their names, which become part of the metrics' names."
        )
    if isinstance(data, dict):
        _require_names(data)
    sets = data if isinstance(data, dict) else {"": data}
    sets = {name: _dataset_of(task, each, eval_set_text(name), notes) for name, each in sets.items()}
    for name, each in sets.items():
        if is_mapped(each) and not len(each):
            raise empty_eval_set(name, each)
    return sets


def empty_eval_set(name: str, data: Any) -> TaskError:
    """Return the error for a held-out data set without samples."""
    if isinstance(data, Iterator):
        return TaskError(
            f"{eval_set_text(name)} has no sample left: it is an iterator, which can be read only once, and each "
            "evaluation reads it.\n  Return an object whose __iter__ starts from the first sample each time, or a list."
        )
    hint = "Leave it out." if name else "Return None to have no evaluation."
    return TaskError(f"{eval_set_text(name)} has no sample: there is nothing to evaluate on.\n  {hint}")


def _are_several(data: Any) -> bool:
    """Return whether ``data`` is a tuple or list of data sets, instead of one whose elements are samples."""
    from torch.utils.data import Dataset

    return isinstance(data, tuple | list) and bool(data) and all(isinstance(each, Dataset) for each in data)


def _kinds(data: Any) -> str:
    """Return the types of the values in ``data``, for a message."""
    values = data.values() if isinstance(data, dict) else data
    return first_names([f"{type(each).__name__}" for each in values])


def eval_metrics(task: Task, seed: int) -> Any:
    """Return what the task's ``eval_metrics`` returns, called under the job's seed; None without that method."""
    if not callable(method := getattr(task, "eval_metrics", None)):
        return None
    seed_everything(seed_for(seed, "metrics"))
    return method()


def eval_set_text(name: str) -> str:
    """Return the expression of a held-out data set in messages."""
    return f"eval_data()[{name!r}]" if name else "eval_data()"


def _require_names(sets: dict[Any, Any]) -> None:
    """Raise TaskError unless ``sets`` is a dict of data sets whose names can be part of a metric's name."""
    if not sets:
        raise TaskError("eval_data() returned an empty dict.\n  Return None to have no evaluation.")
    for name, data in sets.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            raise TaskError(
                f"eval_data() returned a dict with the key {name!r}: a dict must contain data sets by their names, of "
                "letters, digits and _ . -, starting with a letter or digit.\n"
                "  The name is part of the metrics' names: eval/NAME/loss."
            )
        if not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            raise TaskError(
                f"{eval_set_text(name)} is a {type(data).__name__}: it must be a data set.\n"
                "  Leave out a set that has no data."
            )


class ReadyBatches:
    """Batches that are used as micro-batches, dealt to the ranks in turn: training data of a task, or of
    ``engine.windows``. A DataLoader needs no such wrapper, unless its batches have no known size or are a rank's own.

    Args:
        batches: a DataLoader, or an iterable that yields the same batches on every rank.
        size: number of samples of a batch, which must be batch.micro_size; the last batch of an epoch may have fewer.
            None: that of the DataLoader; where it has none, the plan counts batch.micro_size samples for each batch.
        sharded: each rank's ``batches`` are its own, as with a DistributedSampler, and it uses all of them. A window
            then depends on the number of ranks.
    """

    def __init__(self, batches: Any, size: int | None = None, *, sharded: bool = False) -> None:
        self.batches, self.sharded = batches, sharded
        sampler = getattr(batches, "batch_sampler", None)
        sizes = (size, getattr(batches, "batch_size", None), getattr(sampler, "batch_size", None))
        self.size = next((each for each in sizes if isinstance(each, int)), None)

    @property
    def samples(self) -> int | None:
        """Samples of an epoch; None if that is not known."""
        loader = self.batches
        known = is_loader(loader) and not self.sharded and isinstance(loader.batch_size, int)
        if not known or not is_mapped(loader.dataset) or not isinstance(loader.sampler, Sized):
            return None
        samples = len(loader.sampler)
        return samples - samples % loader.batch_size if loader.drop_last else samples


def is_ready(data: Any) -> bool:
    """Return whether the elements of ``data`` are batches: it is a DataLoader, or ReadyBatches."""
    return isinstance(data, ReadyBatches) or is_loader(data)


def as_ready(data: Any) -> ReadyBatches:
    """Return ``data`` as ReadyBatches, if it is a DataLoader."""
    return data if isinstance(data, ReadyBatches) else ReadyBatches(data)


def dataset_of(data: Any) -> Any:
    """Return the dataset of a DataLoader, whose samples ranks compare; None if each rank has its own; any other
    ``data`` itself."""
    if isinstance(data, ReadyBatches) and data.sharded:
        return None
    loader = data.batches if isinstance(data, ReadyBatches) else data
    return loader.dataset if is_loader(loader) else loader


def is_mapped(data: Any) -> bool:
    """Return whether ``data`` is map-style: its samples are read by index."""
    from torch.utils.data import IterableDataset

    return isinstance(data, Sized) and not isinstance(data, IterableDataset) and not is_loader(data)


def first_samples(data: Any, count: int) -> list[Any]:
    """Return the first ``count`` samples, or all if there are fewer."""
    return [data[n] for n in range(min(count, len(data)))] if is_mapped(data) else [*itertools.islice(data, count)]


def first_batch(task: Task, data: Any, count: int) -> tuple[Any, int]:
    """Return the first ``count`` samples as one batch, collated as in training, and their number."""
    from torch.utils.data import default_collate

    if is_ready(data):
        loader = as_ready(data).batches
        if not is_loader(loader) or (loader.batch_size is None and loader.batch_sampler is None):
            return next(iter(loader)), as_ready(data).size or count
        samples = first_samples(loader.dataset, count)
        return loader.collate_fn(samples), len(samples)
    samples = first_samples(data, count)
    return getattr(task, "collate", default_collate)(samples), len(samples)


def column_of_lengths(data: Any) -> Any:
    """Return the column ``length`` of a Hugging Face dataset; None if there is none."""
    return data["length"] if "length" in (getattr(data, "column_names", None) or ()) else None


def is_loader(data: Any) -> bool:
    """Return whether ``data`` is a DataLoader, or has its attributes (torchdata's StatefulDataLoader)."""
    return all(hasattr(data, name) for name in ("dataset", "sampler", "batch_sampler", "collate_fn"))


def _dataset_of(task: Task, data: Any, where: str, notes: list[str] | None) -> Any:
    """Return ``data``; of a DataLoader its dataset, unless its batches are used as they are.

    The collate_fn of a DataLoader becomes the task's if it has none.
    """
    trained_on, own_order = where == "train_data()", callable(getattr(task, "order", None))
    if trained_on and not own_order and is_ready(data):
        if notes is not None:
            notes.append(_note_on_batches(data))
        loader, own = as_ready(data).batches, getattr(task, "collate", None)
        if is_loader(loader) and own is None and (function := _collate_of(loader)):
            task.collate = _Collate(function)  # pyright: ignore[reportAttributeAccessIssue]
        collates = is_loader(loader) and loader.batch_sampler is not None
        if collates and own and not (isinstance(own, _Collate) or _same_function(own, loader.collate_fn)):
            raise TaskError(
                f"train_data() returned a {type(loader).__name__}, whose collate_fn makes the training batches, and "
                "the task has another collate().\n"
                "  Use DataLoader(..., collate_fn=self.collate), or return the dataset itself."
            )
        return data
    if not is_loader(data):
        return data
    _require_samples_of_dataset(data, where, own_order=trained_on and own_order)
    function, collate = _collate_of(data), getattr(task, "collate", None)
    owned = collate is not None and not isinstance(collate, _Collate)
    if not owned and trained_on:
        if function is not None:
            task.collate = _Collate(function)  # pyright: ignore[reportAttributeAccessIssue]
    elif not owned and not (function is None if collate is None else collate.does(function)):
        raise TaskError(
            f"{where} returned a {type(data).__name__} with another collate_fn than train_data().\n"
            "  Give the task a method collate(samples), which is used for both."
        )
    if notes is not None:
        used = "its dataset is used, and the task's own collate()" if owned else "its dataset and collate_fn are used"
        notes.append(
            f"{where} returned a {type(data).__name__}: {used}. Its sampler, shuffle, batch_size, drop_last and worker "
            "settings are not: batch.* and train.* decide."
        )
    return data.dataset


def _note_on_batches(data: Any) -> str:
    ready = as_ready(data)
    kind, resume = type(ready.batches).__name__, "reads the epoch's batches up to its position again"
    if callable(getattr(ready.batches, "load_state_dict", None)):
        resume = f"continues from the state that the {kind} had"
    if ready.sharded:
        reads = "each rank uses those of its own, so a window depends on the number of ranks"
    else:
        reads = "ranks use theirs in turn, so a window has the same ones on any number of ranks"
        if not (getattr(ready.batches, "num_workers", 0) and is_mapped(dataset_of(ready))):
            reads += ", and each rank reads all (with num_workers and a sampler, only its own)"
    return (
        f"train_data() returned a {kind}: its batches are the micro-batches, in its order; {reads}. A resume {resume}."
    )


class _Collate:
    """The collate_fn of the training data's DataLoader, set on a task that has no method ``collate``."""

    def __init__(self, function: Callable[[list[Any]], Any]) -> None:
        self._function = function

    def __call__(self, samples: list[Any]) -> Any:
        return self._function(samples)

    def does(self, other: Any) -> bool:
        """Return whether ``other`` is the same function, or one made by the same code with equal settings."""
        return _same_function(self._function, other)


def _same_function(one: Any, other: Any) -> bool:
    try:
        if one == other:
            return True
        if type(one) is not type(other):
            return False
        if isinstance(one, functools.partial):
            settings = [(each.args, each.keywords) for each in (one, other)]
            return settings[0] == settings[1] and _same_function(one.func, other.func)
        if inspect.isfunction(one):
            closures = [[cell.cell_contents for cell in each.__closure__ or ()] for each in (one, other)]
            defaults = [(each.__defaults__, each.__kwdefaults__) for each in (one, other)]
            return one.__code__ is other.__code__ and closures[0] == closures[1] and defaults[0] == defaults[1]
        return bool(vars(one) == vars(other))
    except (TypeError, ValueError, RuntimeError):  # settings that cannot be compared
        return False


def _collate_of(loader: Any) -> Callable[[list[Any]], Any] | None:
    from torch.utils.data import default_collate

    return None if loader.collate_fn is default_collate else loader.collate_fn


def _require_samples_of_dataset(loader: Any, where: str, *, own_order: bool) -> None:
    """Raise TaskError unless the loader's samples are the elements of its dataset, each once per epoch.

    ``own_order``: the task has a method that decides which ones they are instead of the sampler.
    """
    from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, WeightedRandomSampler
    from torch.utils.data.distributed import DistributedSampler

    name, instead = f"{where} returned a {type(loader).__name__}", "  Return the dataset itself"
    if loader.batch_sampler is None and loader.batch_size is None:
        raise TaskError(
            f"{name} with batch_size=None: its dataset may hold batches, and the launcher makes up batches itself.\n"
            f"{instead}, one sample for each element."
        )
    set_up = getattr(loader, "worker_init_fn", None)
    if set_up is not None and loader.num_workers and not _only_seeds(set_up):
        raise TaskError(
            f"{name} with worker_init_fn={getattr(set_up, '__qualname__', type(set_up).__name__)}, which would not be "
            "called: the launcher starts loader processes of its own (train.loader_workers), or none.\n  Set up what "
            "the samples need in the dataset, when it reads its first one, and leave worker_init_fn out. Samples have "
            "random numbers of their own, and a stream is divided by the launcher."
        )
    if isinstance(loader.dataset, IterableDataset) or own_order:
        return
    if loader.batch_size is None:
        raise TaskError(
            f"{name} with a batch_sampler of its own ({type(loader.batch_sampler).__name__}): which samples go into a "
            f"micro-batch is the launcher's to decide.\n{instead}, or a Subset of it."
        )
    sampler, samples = loader.sampler, len(loader.dataset)
    drawn = f"{len(sampler) if hasattr(sampler, '__len__') else 'an unknown number'} of {samples} samples"
    if isinstance(sampler, WeightedRandomSampler) or (isinstance(sampler, RandomSampler) and sampler.replacement):
        drawn = "with replacement"
    elif isinstance(sampler, SequentialSampler | DistributedSampler) or drawn == f"{samples} of {samples} samples":
        return
    raise TaskError(
        f"{name} whose {type(sampler).__name__} draws {drawn}: each sample of the dataset is to be read once.\n"
        f"{instead}, or a Subset of those that belong to it."
    )


def _only_seeds(function: Any) -> bool:
    """Return whether a worker_init_fn does nothing but seed generators, which the launcher does for each sample."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code is not None and all(name in _SEEDS or name.lower().endswith("seed") for name in code.co_names)


def seed_for(seed: int, part: str) -> int:
    """Return the seed of ``part``: parts with separate seeds do not depend on how many numbers the others draw."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{part}".encode(), digest_size=7).digest(), "little")


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch, Python and, if it has been imported, NumPy."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
