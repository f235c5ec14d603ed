"""Class of linear layers that multiply in float8. Importing this module needs torchao."""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchao.float8.config import Float8LinearConfig, ScalingType
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig


class Float8Layer(nn.Linear):
    """Linear layer that multiplies in float8 where autocast would multiply in a narrow format.

    torchao's own layer does not know autocast of a CPU, and rounds a weight in fp32 without the step over bf16 that
    FSDP's gathers and autocast take: strategies would then compute different functions.

    Attributes:
        class_before_format: class of the layer before the change.
        float8_config: settings of torchao. Not ``config``, which layers of the user's may have themselves.
        float8_products: settings of the three products.
    """

    class_before_format: type[nn.Linear]
    float8_config: Float8LinearConfig
    float8_products: LinearMMConfig

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        device = input.device.type
        if not torch.is_autocast_enabled(device) or input.numel() == 0:
            return functional.linear(input, self.weight, self.bias)
        dtype = torch.get_autocast_dtype(device)
        rows, weight = input.to(dtype).reshape(-1, input.shape[-1]), self.weight.to(dtype)
        product: Any = matmul_with_hp_or_float8_args.apply(rows, weight.t(), self.float8_products, self.float8_config)
        product = product.reshape(*input.shape[:-1], product.shape[-1])
        return product if self.bias is None else product + self.bias.to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Float8Layer:
        twin = memo[id(self)] = type(self).__new__(type(self))
        object.__setattr__(twin, "__dict__", copy.deepcopy(self.__dict__, memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the class before the change: a saved model needs neither torchao nor the launcher."""
        return copyreg._reconstructor, (self.class_before_format, object, None), self.__dict__  # pyright: ignore


@functools.cache
def float8_class(plain: type[nn.Linear], recipe: str, emulate: bool) -> type[Float8Layer]:
    """Return the subclass of ``plain`` whose layers multiply in float8.

    Args:
        recipe: torchao's name of it.
        emulate: round to float8, and multiply in fp32.
    """
    made = Float8LinearConfig.from_recipe_name(recipe)
    # a product in float8 that sums over tokens needs a multiple of 16 of them
    of_inputs: Any = made.cast_config_input_for_grad_weight
    sums_tokens = of_inputs.scaling_type is not ScalingType.DISABLED
    config = dataclasses.replace(made, emulate=emulate, pad_inner_dim=sums_tokens)
    products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    settings = {
        "class_before_format": plain,
        "float8_config": config,
        "float8_products": LinearMMConfig(
            *(ScaledMMConfig(emulate, each.use_fast_accum, False, config.pad_inner_dim) for each in products)
        ),
    }
    return type(f"Float8{plain.__name__}", (Float8Layer, plain), settings)
