"""Adapters of peft in a model without values: their own files, or merged into the parameters that they adapt."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launcher.errors import UserError
from launcher.quantities import first_names

# names of the adapted model's parameters inside a PeftModel
PREFIX = "base_model.model."


class Adapters:
    """The active adapter of a model.

    Args:
        model: a PeftModel, or a transformers model with an adapter added; on the meta device.

    Raises:
        UserError: several adapters are active.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        active: Any = getattr(model, "active_adapters", None)
        listed: Any = active() if callable(active) else active
        names: list[str] = list(listed or model.peft_config)
        if len(names) != 1:
            raise UserError(f"The model has {len(names)} active adapters: {first_names(names)}.\n  Let it have one.")
        self.name = names[0]
        self._layers: dict[str, Any] = {}

    @classmethod
    def of(cls, model: nn.Module) -> Adapters | None:
        """Return the adapters of a model; None if it has none."""
        tuners = sys.modules.get("peft.tuners.tuners_utils")
        if tuners is None or not isinstance(getattr(model, "peft_config", None), dict):
            return None
        return cls(model) if any(isinstance(part, tuners.BaseTunerLayer) for part in model.modules()) else None

    @property
    def adapted(self) -> nn.Module:
        """The model without its wrapper."""
        base: Any = getattr(self._model, "get_base_model", None)
        return self._model if base is None else base()

    def own_sources(self) -> dict[str, str]:
        """Return the names that the model has for the adapter's tensors, by the names in peft's files."""
        state = {name: value.detach() for name, value in self._model.state_dict(keep_vars=True).items()}
        names = {id(value): name for name, value in state.items()}
        own: dict[str, Tensor] = _peft("peft").get_peft_model_state_dict(
            self._model, state_dict=state, adapter_name=self.name, save_embedding_layers=False
        )
        prefix = "" if hasattr(self._model, "get_base_model") else PREFIX
        return {f"{prefix}{name}": names[id(value)] for name, value in own.items()}

    def write_config(self, directory: Path) -> None:
        """Write adapter_config.json."""
        config = self._model.peft_config[self.name]
        training, config.inference_mode = config.inference_mode, True  # as peft's save_pretrained does
        config.save_pretrained(directory)
        config.inference_mode = training

    def merged_sources(self, names: Iterable[str]) -> dict[str, str]:
        """Return the names that the model has for the tensors of the merged model, by the names of that.

        Args:
            names: of the model's tensors.

        Raises:
            UserError: a part of the adapter is not of the ordinary LoRA, or adapts another parameter than ``weight``.
        """
        lora, base = _peft("peft.tuners.lora").LoraLayer, _peft("peft.tuners.tuners_utils").BaseTunerLayer
        wrapper = _peft("peft.utils").ModulesToSaveWrapper
        replaced: dict[str, str] = {}  # start of a name -> start of its name in the merged model; "": left out
        for path, part in self._model.named_modules():
            if isinstance(part, lora):
                self._require_ordinary(path, part)
                merged = path.removeprefix(PREFIX)
                self._layers[f"{merged}.weight"] = (path, part)
                replaced |= {f"{path}.base_layer.": f"{merged}.", f"{path}.lora_": ""}
            elif isinstance(part, base):
                raise UserError(f"--merge-lora: {path} is a {type(part).__name__}, which is not LoRA.\n  Leave it out.")
            elif isinstance(part, wrapper):
                merged = path.removeprefix(PREFIX)
                saved = f"{path}.modules_to_save."
                replaced |= {f"{saved}{self.name}.": f"{merged}.", saved: "", f"{path}.original_module.": ""}
        starts = sorted(replaced, key=len, reverse=True)
        sources: dict[str, str] = {}
        for name in names:
            start = next((start for start in starts if name.startswith(start)), None)
            if start is None:
                sources[name.removeprefix(PREFIX)] = name
            elif replaced[start]:
                sources[replaced[start] + name.removeprefix(start)] = name
        self._require_all_merged(sources)
        return sources

    def _require_ordinary(self, path: str, layer: Any) -> None:
        special = [
            name
            for name in ("use_dora", "lora_variant", "lora_bias")
            if (getattr(layer, name, None) or {}).get(self.name)
        ]
        if special:
            raise UserError(
                f"--merge-lora: {path} has {special[0]}, and only ordinary LoRA is merged.\n"
                "  Leave it out, and merge with peft: PeftModel.from_pretrained(...).merge_and_unload()."
            )

    def _require_all_merged(self, sources: Iterable[str]) -> None:
        """Raise UserError if an adapter changes another parameter than ``weight``, such as those of experts (peft's
        target_parameters) or of torch's attention: its change would be left out.

        Args:
            sources: names of the tensors of the merged model.
        """
        merged = set(sources)
        for name, (path, layer) in self._layers.items():
            # a layer of peft names its parameter if that can be another one
            if name not in merged or getattr(layer, "parameter_name", "weight") != "weight":
                raise UserError(
                    f"--merge-lora: {path} does not adapt the weight of a layer, and only that is merged.\n"
                    "  Leave it out, and merge with peft: PeftModel.from_pretrained(...).merge_and_unload()."
                )

    @property
    def changed(self) -> set[str]:
        """Names in the merged model of the parameters that the adapter changes."""
        return {*self._layers}

    @torch.no_grad()
    def merge_into(self, name: str, value: Tensor, read: Callable[[str], Tensor]) -> Tensor:
        """Return ``value`` with the adapter's change, computed by peft.

        Args:
            name: of the parameter in the merged model.
            read: returns a tensor of the model by its name there.
        """
        if name not in self._layers:
            return value
        path, layer = self._layers[name]
        own = {key: part for key, part in layer.named_parameters() if key.startswith("lora_")}
        own = {key: part for key, part in own.items() if self.name in key.split(".")}
        for key in own:
            _replace(layer, key, read(f"{path}.{key}"))
        change = layer.get_delta_weight(self.name)
        for key, part in own.items():
            _replace(layer, key, part)
        return value.add_(change) if value.dtype.is_floating_point else value


def _peft(module: str) -> Any:
    """Return a module of peft, which the user's code has imported; the launcher does not depend on it."""
    return sys.modules[module]


def _replace(module: nn.Module, key: str, value: Tensor) -> None:
    parent, _, name = key.rpartition(".")
    module.get_submodule(parent)._parameters[name] = nn.Parameter(value, requires_grad=False)
