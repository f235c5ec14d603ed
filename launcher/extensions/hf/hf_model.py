"""Base of the tasks with models of the transformers package: model, tokenizer, adapters, and the data's two parts.

The module does not import torch or transformers at module level.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import TaskError, did_you_mean
from launcher.extensions.hf.hf_data import Encode, read_examples, split_examples, tokenized
from launcher.process import quiet_torchao
from launcher.quantities import first_names

if TYPE_CHECKING:
    from torch import nn

_HUB_WITHIN_S = 10
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
DEFAULT_LENGTH = 1024
# arguments of a LoRA adapter: key of the task -> argument of peft's LoraConfig
_LORA = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}


class HfTask(ABC):
    """Model, tokenizer and examples of a task; the arguments are the keys of the tasks, and ``examples``: whether the
    data are examples for the tokenizer."""

    _dtype: str | None = None  # of random parameters; None: fp32, with the weights of the model if it has some

    def __init__(
        self,
        name: str,
        model: str,
        data: str,
        *,
        tokenizer: str | None,
        seq_len: int | None,
        eval_data: str | None,
        held_out: float,
        lora: dict[str, Any] | None,
        revision: str | None = None,
        examples: bool = True,
    ) -> None:
        packages = ["transformers", *(["datasets"] if examples else []), *(["peft"] if lora is not None else [])]
        if missing := [each for each in packages if find_spec(each) is None]:
            raise TaskError(f"task={name}: {', '.join(missing)} must be installed.\n  pip install samebatch[hf]")
        quiet_torchao()
        _require_lora({} if lora is None else lora)
        self._model, self._tokenizer, self._lora = model, tokenizer, lora
        self._data, self._eval_data, self._held_out = data, eval_data, held_out
        if not 0 <= held_out < 1:
            raise TaskError(f"task.held_out={held_out}: must be at least 0 and below 1.")
        self.notes: list[str] = []  # which the plan shows
        self._config: Any = self._load_config(revision)
        # the commit that a name on the hub stands for now; None for a directory or a file
        self._revision: str | None = None if not model or Path(model).exists() else _cached_commit(model, revision)
        longest, why = _longest(self._config.get_text_config())
        self._seq_len: int = min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH) if seq_len is None else seq_len
        if self._seq_len < 2 or (longest is not None and self._seq_len > longest):
            most = "" if longest is None else f" and at most {longest}, {why}"
            raise TaskError(f"task.seq_len={seq_len}: must be at least 2{most}.")

    def _load_config(self, revision: str | None) -> Any:
        """Return the configuration of the model. ``revision``: commit, branch or tag of a name on the hub."""
        return load_config(self._model, revision)

    @cached_property
    def tokenizer(self) -> Any:
        return _load_tokenizer(*self._tokenizer_source, self._revision if self._tokenizer is None else None)

    def fixed_arguments(self) -> dict[str, Any]:
        """Return the commit of a model on the hub, which another rank or a later attempt would not find otherwise."""
        return {} if self._revision is None else {"revision": self._revision}

    @property
    def _tokenizer_source(self) -> tuple[str, str]:
        """Return the config key that names the tokenizer, and its value."""
        return ("task.model", self._model) if self._tokenizer is None else ("task.tokenizer", self._tokenizer)

    @cached_property
    def _all_examples(self) -> Any:
        return read_examples("task.data", self._data)

    @cached_property
    def _examples(self) -> tuple[Any, Any]:
        """Return (training, held-out) examples."""
        if self._eval_data is not None:
            return self._all_examples, read_examples("task.eval_data", self._eval_data)
        return split_examples(self._all_examples, self._held_out)

    def train_data(self) -> Any:
        return self._rows(self._data, self._examples[0])

    def eval_data(self) -> Any:
        data = self._examples[1]
        return None if data is None else self._rows(self._eval_data or self._data, data)

    def _rows(self, path: str, data: Any) -> Any:
        encode, settings = self._encoding(path, data)
        rows = tokenized(data, path, self.tokenizer, settings, encode)
        if unused := len(data) - len(rows.unique("example")):
            self.notes.append(f"{path}: {unused} of {len(data)} examples cannot be used, and are left out.")
        return rows

    @abstractmethod
    def _encoding(self, path: str, data: Any) -> tuple[Encode, dict[str, Any]]:
        """Return the function that makes rows of an example of ``data``, and what else it depends on."""

    def _build(self, auto: Any, *, new_head: bool) -> Any:
        """Return the model, ready to train. ``auto``, ``new_head``: see ``_build_pretrained``."""
        model, self._new_modules = _build_pretrained(
            self._model, self._revision, auto, deepcopy(self._config), new_head=new_head, dtype=self._dtype
        )
        size, words = model.get_input_embeddings().num_embeddings, len(self.tokenizer or ())
        if words > size:
            key, path = self._tokenizer_source
            raise TaskError(f"{key}={path}: the tokenizer has {words} tokens, and the model only {size}.")
        return model.train()

    def _adapted(self, model: Any, kind: str) -> Any:
        """Return ``model`` with adapters if ``task.lora`` is set. ``kind``: task type of peft."""
        return model if self._lora is None else _with_lora(model, self._lora, kind, self._new_modules)

    def shard_units(self, model: Any) -> list[nn.Module]:
        """Return the blocks that transformers does not divide between devices."""
        from launcher.train.parallel.shard_units import find_units

        plain: Callable[[], Any] | None = getattr(model, "get_base_model", None)  # of peft's
        classes = set(getattr(plain() if plain is not None else model, "_no_split_modules", None) or ())
        return [module for module in model.modules() if type(module).__name__ in classes] or find_units(model)


def _longest(config: Any) -> tuple[int | None, str]:
    """Return the most tokens of a sequence, and why; None if there is no limit.

    Some rotary embeddings take other frequencies for all texts of a forward pass if one of them is long: the gradient
    would depend on how samples are divided into micro-batches.
    """
    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else None
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for each in [rotary, *rotary.values()]:  # of each kind of layer, or of all
        kind = (each.get("rope_type") or each.get("type")) if isinstance(each, dict) else None
        if kind in ("dynamic", "longrope"):
            own = each.get("original_max_position_embeddings")
            limit = own or getattr(config, "original_max_position_embeddings", None) or longest
            if limit is not None and (longest is None or limit < longest):
                return limit, f"because with rope_type={kind} a longer text changes what the model computes of others"
    return longest, "the length of the model's sequences"


def _is_config_file(model: str) -> bool:
    """Return whether ``model`` names a configuration, of which a model with random values is made."""
    return Path(model).is_file() and Path(model).suffix == ".json"


def load_config(model: str, revision: str | None) -> Any:
    """Return the configuration of ``model``. ``revision``: commit, branch or tag of a name on the hub.

    Raises:
        TaskError: it has none, or one of an architecture that transformers does not know.
    """
    from transformers import AutoConfig

    path = Path(model)
    if path.exists() and revision is not None:
        raise TaskError(f"task.revision={revision}: task.model={model} is not on the hub, but here.\n  Leave it out.")
    if not path.exists():
        _require_on_hub("task.model", model, ("config.json",), revision)
    if path.is_dir() and not (path / "config.json").exists():
        raise TaskError(f"task.model={model}: it has no config.json.\n  Name a directory that save_pretrained wrote.")
    if path.is_dir() and not any(next(path.glob(pattern), None) for pattern in _WEIGHTS):
        raise TaskError(
            f"task.model={model}: the directory has no weights (model.safetensors).\n"
            f"  task.model={path / 'config.json'} trains from random values."
        )
    if path.is_file() and not _is_config_file(model):
        raise TaskError(f"task.model={model}: a file must be a configuration, such as config.json.")
    try:
        return AutoConfig.from_pretrained(model, revision=revision or "main")
    except (OSError, ValueError, KeyError) as error:
        hub = "" if path.exists() else "as a name on the hub: "
        raise TaskError(f"task.model={model}: {hub}{_first_line(error)}") from None


def _build_pretrained(
    model: str, revision: str | None, auto: Any, config: Any, *, new_head: bool, dtype: str | None
) -> tuple[Any, list[str]]:
    """Return the model in fp32, with its weights, or with random values if ``model`` is a configuration or ``dtype`` is
    set; and the names of modules that have no weights yet.

    Args:
        auto: class of transformers that finds the architecture, such as AutoModelForCausalLM.
        new_head: the head may have no weights yet, and those of another head are not used.
        dtype: of random values, such as float32.
    """
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of tensors without weights: what is wrong among these is an error below
    try:
        if dtype is not None or _is_config_file(model):
            return auto.from_config(config, dtype=getattr(torch, dtype or "float32")), []
        made, loaded = auto.from_pretrained(
            model, revision=revision or "main", config=config, dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise TaskError(f"task.model={model}: {_first_line(error)}") from None
    finally:
        logging.set_verbosity(verbosity)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, loaded.get(kind) or ()))
        if new_head:
            names = [name for name in names if name.startswith(f"{made.base_model_prefix}.") and ".pooler." not in name]
        if names:
            raise TaskError(
                f"task.model={model}: its weights are not those of a {type(made).__name__}: "
                f"{kind.removesuffix('_keys')}: {first_names(names)}.\n  Name a model of this architecture."
            )
    return made, sorted({name.rpartition(".")[0] for name in map(str, loaded["missing_keys"])})


def _load_tokenizer(key: str, path: str, revision: str | None) -> Any:
    """Return the tokenizer at ``path``, which the key ``key`` names. ``revision``: commit of a name on the hub."""
    from transformers import AutoTokenizer

    if not Path(path).is_dir():
        files = ("tokenizer_config.json", "tokenizer.json", "config.json")
        _require_on_hub(key, path, files, revision, missing="no tokenizer: ", other_key="task.tokenizer")
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(f"{key}={path}: no tokenizer: {_first_line(error)}\n  Name one with task.tokenizer=.") from None


def _with_lora(model: Any, lora: dict[str, Any], kind: str, new: list[str]) -> Any:
    """Return ``model`` with LoRA adapters of peft; every other parameter is frozen, except for the modules ``new``.

    Args:
        lora: ``r``, ``alpha``, ``dropout``, ``targets`` (names of modules, or "all-linear"); missing ones have the
            defaults of peft.
        kind: peft's task type.
    """
    from peft import LoraConfig, get_peft_model

    targets = lora.get("targets")
    if isinstance(targets, str) and targets != "all-linear":
        targets = [targets]
    names = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "weight")})
    unknown = [name for name in targets or () if targets != "all-linear" and not _matches(model, name)]
    if unknown:
        raise TaskError(
            f"task.lora.targets={unknown[0]}: no module of the model has this name.\n"
            f"  {did_you_mean(unknown[0], names)}Its modules with weights: {first_names(names)}."
        )
    try:
        with warnings.catch_warnings():
            # peft asks for an attribute that transformers has renamed
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
            settings: dict[str, Any] = {_LORA[name]: value for name, value in (lora | {"targets": targets}).items()}
            return get_peft_model(model, LoraConfig(task_type=kind, modules_to_save=new or None, **settings))
    except (ValueError, TypeError) as error:
        raise TaskError(f"task.lora: {_first_line(error)}") from None


def _matches(model: Any, target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name, _ in model.named_modules())


def _require_lora(lora: dict[str, Any]) -> None:
    """Raise TaskError if ``lora`` is no dict, or has a key or a value that no adapter has."""
    if not isinstance(lora, dict):
        raise TaskError(f"task.lora={lora}: must be a dict, such as {{r: 16, alpha: 32}}.")
    for name in lora:
        if name not in _LORA:
            raise TaskError(
                f"task.lora.{name}: no such argument.\n  {did_you_mean(name, _LORA)}Known: {', '.join(_LORA)}."
            )
    targets = lora.get("targets")
    names = targets if isinstance(targets, list) else [] if targets is None else [targets]
    if not all(isinstance(name, str) for name in names):
        raise TaskError(f"task.lora.targets={targets}: must be a list of names of modules, or all-linear.")
    for name in ("r", "alpha", "dropout"):
        if not isinstance(value := lora.get(name, 0), int | float):
            raise TaskError(f"task.lora.{name}={value}: must be a number.")


def _require_on_hub(
    key: str, name: str, files: Sequence[str], revision: str | None, *, missing: str = "", other_key: str | None = None
) -> None:
    """Raise TaskError unless the hub has a repository ``name``, or the local cache has one of its ``files``.

    The hub is asked once: transformers asks for each of several files and repeats it for about a minute.

    Args:
        key: config key that has the value ``name``.
        revision: commit, branch or tag; None: main.
        missing: start of the message.
        other_key: key that may name another place; default: ``key``.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    path = Path(name)
    hint = f"Name a directory that save_pretrained wrote, or a name on the hub, with {other_key or key}=."
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise TaskError(f"{key}={name}: {missing}no such directory.\n  {hint}") from None
    if "/" in name and path.parent.is_dir():
        raise TaskError(f"{key}={name}: {missing}{path.parent} has no directory {path.name}.\n  {hint}")
    if any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files):
        return
    try:
        HfApi().model_info(name, revision=revision, timeout=_HUB_WITHIN_S)
    except Exception as error:  # of the network, the hub, and HF_HUB_OFFLINE, which have no common type
        raise TaskError(
            f"{key}={name}: {missing}there is no such file or directory, nor is it in the cache; as a name on the hub: "
            f"{_first_line(error)}\n  {hint}"
        ) from None


def _cached_commit(name: str, revision: str | None) -> str | None:
    """Return the commit of the configuration that was read last for a name on the hub; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(file).parent.name if isinstance(file, str) else None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
