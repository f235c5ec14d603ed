"""Adapters: nothing that was trained is left out of an export without a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from launcher.errors import UserError
from launcher.extensions.export.adapters import Adapters
from launcher.extensions.export.model_files import ExportedModel


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.weight = nn.Parameter(torch.ones(2, 8, 8)), nn.Parameter(torch.ones(8))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.experts, self.out = nn.MultiheadAttention(8, 2), Experts(), nn.Linear(8, 8)


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize(
    "targets", [{"target_modules": ["attention"]}, {"target_modules": ["out"], "target_parameters": ["experts.up"]}]
)
def test_an_adapter_of_another_parameter_than_weight_is_refused(targets: dict[str, Any]) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(Parts(), LoraConfig(r=2, **targets))
    path = "experts" if "target_parameters" in targets else "attention"
    with pytest.raises(UserError, match=f"--merge-lora: base_model.model.{path}.* does not adapt the weight"):
        Adapters(model).merged_sources(model.state_dict())


@pytest.mark.filterwarnings("ignore")  # of peft
def test_the_adapter_of_a_layer_is_merged() -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(Parts(), LoraConfig(r=2, target_modules=["out"]))
    adapters = Adapters(model)
    assert adapters.merged_sources(model.state_dict()).keys() == Parts().state_dict().keys()
    assert adapters.changed == {"out.weight"}


@pytest.mark.filterwarnings("ignore")  # of peft
def test_trained_parameters_beside_the_adapter_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(Parts(), LoraConfig(r=2, target_modules=["out"], modules_to_save=["experts"]))
    ExportedModel(model, merge_lora=False).layout(model.state_dict())
    assert capsys.readouterr().err == ""
    model.base_model.model.attention.in_proj_bias.requires_grad_(True)
    layout = ExportedModel(model, merge_lora=False).layout(model.state_dict())
    assert len(layout.sources) == 4
    assert "not of the adapter: base_model.model.attention.in_proj_bias.\n" in capsys.readouterr().err
