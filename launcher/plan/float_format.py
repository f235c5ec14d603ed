"""Interface of a number format that an installed package adds to ``precision``; see launcher/config/choices.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from launcher.config.choices import added_value
from launcher.config.schema import PrecisionConfig, PrecisionKind
from launcher.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from launcher.plan.launch_plan import ClusterPlan

Kind = TypeVar("Kind")


class Settings(Protocol):
    """Configuration, or a plan."""

    @property
    def precision(self) -> PrecisionConfig: ...

    def extension(self, kind: type[Kind]) -> Kind:
        """Return the keys of the added config group with the dataclass ``kind``."""
        ...


class FloatFormat(Protocol):
    """Format in which some layers of a model multiply. Everything else is computed, gathered and sent as with bf16.

    The command line uses these classes, so their module must not import torch at module level.

    Attributes:
        units: field of ``Gpu`` with the peak of the units that compute in it.
        roundoff: unit roundoff.
    """

    units: str
    roundoff: float

    def __init__(self, settings: Settings) -> None: ...

    def check(self, cluster: ClusterPlan) -> None:
        """Raise ConfigError if an option is wrong, or the plan's device cannot compute in this format."""
        ...

    def check_machine(self, cluster: ClusterPlan) -> None:
        """Raise ConfigError if this machine lacks a package, or the GPUs for a job that it is to run itself."""
        ...

    def no_units(self, device: str) -> ConfigError:
        """Return the error for a ``device`` that cannot compute in this format."""
        ...

    def computes(self, device: torch.device) -> bool:
        """Return whether a worker's device can compute in this format, in its units or emulated."""
        ...

    def text(self) -> str:
        """Return the format with its options, for the plan."""
        ...

    def notes(self, layers: tuple[int, ...] | None, *, compiles: bool) -> list[str]:
        """Return the notes of a plan.

        Args:
            layers: linear layers in this format, and all; None if the model was not inspected.
            compiles: train.compile.

        Raises:
            ConfigError: there is no layer for it.
        """
        ...

    def layers(self, model: nn.Module) -> Mapping[str, nn.Module]:
        """Return the layers that can be computed in this format, by name."""
        ...

    def convert(self, model: nn.Module) -> None:
        """Change the class of these layers to a subclass whose attribute ``class_before_format`` is the class before.

        Raises:
            ConfigError: there is no such layer, or a package cannot be imported.
        """
        ...


def format_class(kind: PrecisionKind) -> type[FloatFormat] | None:
    """Return the class of the format ``precision=kind`` of an installed package; None for one of the core."""
    return added_value("precision", kind)


def float_format(settings: Settings) -> FloatFormat | None:
    """Return the format of an installed package that a configuration or plan has; None for one of the core."""
    made = format_class(settings.precision.kind)
    return None if made is None else made(settings)
