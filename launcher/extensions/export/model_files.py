"""Model of an export without its values: which of its tensors are written under which names, and the files that
`from_pretrained` needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import UserError
from launcher.extensions.export.adapters import Adapters
from launcher.quantities import first_names
from launcher.task import Task
from launcher.train.checkpoint.initial import ModelState, misfits, model_state, plain_name
from launcher.train.checkpoint.weights import StoredTensor


@dataclass(frozen=True)
class ExportNames:
    """Names of an export.

    Attributes:
        sources: names in the checkpoint, by the names that are written.
        tied: names that are left out, with the written name of the same tensor.
        aliases: further names in the checkpoint of a written tensor.
        stem: name of the file; empty for that of a whole model.
    """

    sources: dict[str, str]
    tied: dict[str, str] = field(default_factory=dict[str, str])
    aliases: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    stem: str = ""


class ExportedModel:
    """A model whose values are in a checkpoint.

    Args:
        model: as the task builds it, possibly on the meta device.
        merge_lora: adapters are merged into the parameters.

    Raises:
        UserError: ``merge_lora``, and the model has no adapter, or one that cannot be merged.
    """

    def __init__(self, model: nn.Module, *, merge_lora: bool) -> None:
        state = model_state(model)
        named = [(names, tensor.to("meta")) for names, tensor in state.named]
        self._state = ModelState(named, state.extra, state.others)
        if any(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            model.to("meta")  # a model that could only be built with values: free their memory
        self._adapters, self._merges = Adapters.of(model), merge_lora
        if merge_lora and self._adapters is None:
            raise UserError("--merge-lora: the model has no adapters of peft.\n  Leave it out.")
        self._model: Any = model if self._adapters is None else self._adapters.adapted
        transformers = sys.modules.get("transformers")
        self._is_transformers = transformers is not None and isinstance(model, transformers.PreTrainedModel)
        if self._adapters is not None and transformers is not None:
            self._is_transformers = isinstance(self._model, transformers.PreTrainedModel)

    @property
    def _writes_adapter(self) -> bool:
        return self._adapters is not None and not self._merges

    def misfits(self, tensors: Mapping[str, StoredTensor], others: Iterable[str]) -> list[str]:
        """Return a line for each of the first names and shapes in a checkpoint that are not the model's.

        Args:
            others: names of values that are no tensors.
        """
        return misfits(self._state, tensors, others)

    def layout(self, names: Iterable[str]) -> ExportNames:
        """Return what is written under which names.

        Args:
            names: of the tensors in the checkpoint.
        """
        stored = list(names)
        if self._adapters is not None and not self._merges:
            own = self._adapters.own_sources()
            self._report_left_out({plain_name(source) for source in own.values()})
            return ExportNames({name: source for name, source in own.items() if source in stored}, stem="adapter_model")
        sources = {plain_name(name): name for name in stored}
        if self._adapters is not None:
            sources = self._adapters.merged_sources(stored)
        written = {plain_name(source): name for name, source in sources.items()}
        ignored = getattr(self._model, "_keys_to_ignore_on_save", None) if self._is_transformers else None
        # tied names that `save_pretrained` leaves out, and `from_pretrained` ties again
        dropped: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        tied, aliases = dict[str, str](), dict[str, list[str]]()
        for group, _ in self._state.named:
            own = [written[name] for name in group if name in written]
            if len(own) > 1:  # that stays which transformers keeps, or the first one of another model
                kept, *others = sorted(own, key=lambda name: name in dropped)
                self._require_alike(kept, others)
                tied |= dict.fromkeys(others, kept)
                aliases[kept] = [sources[name] for name in others]
        left_out = {*tied, *(ignored or ())}
        return ExportNames({name: source for name, source in sources.items() if name not in left_out}, tied, aliases)

    def _report_left_out(self, written: set[str]) -> None:
        """Print the trained parameters that the files of peft do not hold, such as norms that the task has unfrozen."""
        trained = [names for names, tensor in self._state.named if tensor.requires_grad]
        if left_out := [names[0] for names in trained if written.isdisjoint(names)]:
            print(
                f"Not exported, because they are trained and not of the adapter: {first_names(left_out)}.\n"
                "  --merge-lora writes them; peft's modules_to_save makes them a part of the adapter.",
                file=sys.stderr,
            )

    def _require_alike(self, kept: str, others: list[str]) -> None:
        changed = self._adapters.changed if self._adapters is not None else set[str]()
        if others and not changed.isdisjoint((kept, *others)):
            raise UserError(
                f"--merge-lora: {kept} and {first_names(others)} are one parameter, and an adapter changes only one of "
                "its uses.\n  Leave --merge-lora out."
            )

    def complete(self, name: str, value: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Return the value that is written under ``name``: with the change by an adapter that is merged.

        Args:
            value: from the checkpoint; may be changed in place.
            read: returns a tensor of the checkpoint.
        """
        if self._adapters is None or not self._merges:
            return value
        return self._adapters.merge_into(name, value, read)

    def write_files(self, directory: Path, task: Task, dtype: torch.dtype) -> None:
        """Write the configuration of a model or of an adapter, and the tokenizer of the task. A model that is not of
        transformers has one if the task has a method ``export_config``.

        Args:
            dtype: of the exported parameters.
        """
        if self._writes_adapter and self._adapters is not None:
            self._adapters.write_config(directory)
            if self._is_transformers and "ForSequenceClassification" in type(self._model).__name__:
                self._model.config.save_pretrained(directory)  # peft's own does not have the classes
        elif self._is_transformers:
            config = self._model.config
            config.architectures = [type(self._model).__name__]
            config.dtype = str(dtype).removeprefix("torch.")
            config.save_pretrained(directory)
            generation = getattr(self._model, "generation_config", None)
            if generation is not None and self._model.can_generate():
                generation.save_pretrained(directory)
        elif callable(export_config := getattr(task, "export_config", None)):
            export_config(self._model, directory, dtype)
        tokenizer = getattr(task, "tokenizer", None)
        if callable(save := getattr(tokenizer, "save_pretrained", None)):
            save(directory)
