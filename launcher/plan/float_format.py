"""Interface of a number format that an installed package adds to ``precision``; see launcher/config/numerics.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from launcher.config.numerics import added_value
from launcher.config.schema import Config, PrecisionConfig, PrecisionKind
from launcher.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from launcher.plan.launch_plan import ClusterPlan
    from launcher.plan.run_plan import PrecisionPlan


class FloatFormat(Protocol):
    """Format in which some layers of a model multiply. Everything else is computed, gathered and sent as with bf16.

    The command line uses these objects, so their module must not import torch at module level.

    Attributes:
        units: field of ``Gpu`` with the peak of the units that compute in it.
        roundoff: unit roundoff.
    """

    units: str
    roundoff: float

    def check(self, config: PrecisionConfig, cluster: ClusterPlan) -> None:
        """Raise ConfigError if an option is wrong, or the plan's device cannot compute in this format."""
        ...

    def check_machine(self, config: Config, cluster: ClusterPlan) -> None:
        """Raise ConfigError if this machine lacks a package, or the GPUs for a job that it is to run itself."""
        ...

    def no_units(self, device: str) -> ConfigError:
        """Return the error for a ``device`` that cannot compute in this format."""
        ...

    def computes(self, precision: PrecisionPlan, device: torch.device) -> bool:
        """Return whether a worker's device can compute in this format, in its units or emulated."""
        ...

    def text(self, precision: PrecisionPlan) -> str:
        """Return the format with its options, for the plan."""
        ...

    def notes(self, precision: PrecisionPlan, layers: tuple[int, ...] | None, *, compiles: bool) -> list[str]:
        """Return the notes of a plan.

        Args:
            layers: linear layers in this format, and all; None if the model was not inspected.
            compiles: train.compile.

        Raises:
            ConfigError: there is no layer for it.
        """
        ...

    def layers(self, model: nn.Module, precision: PrecisionPlan) -> Mapping[str, nn.Module]:
        """Return the layers that can be computed in this format, by name."""
        ...

    def convert(self, model: nn.Module, precision: PrecisionPlan) -> None:
        """Change the class of these layers to a subclass whose attribute ``class_before_format`` is the class before.

        Raises:
            ConfigError: there is no such layer, or a package cannot be imported.
        """
        ...


def float_format(kind: PrecisionKind) -> FloatFormat | None:
    """Return the format ``precision=kind`` of an installed package; None for one of the core."""
    return added_value("precision", kind)
