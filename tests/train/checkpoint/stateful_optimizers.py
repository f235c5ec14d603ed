"""Optimizers whose state a checkpoint must give back: containers, late entries, other formats, two sets of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Remembers(Optimizer):
    """With all kinds of state: nested, late, in other formats than the parameters, and entries of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.seen, self.trace = 0, torch.zeros(3, dtype=torch.float64)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        self.seen += 1
        self.trace.mul_(0.5)[self.seen % 3] += self.seen
        for group in self.param_groups:
            group["levels"] = {0: group.get("levels", {}).get(0, 0) + 1, "mean": float(self.trace.mean())}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"count": torch.zeros((), dtype=torch.int64), "history": [], "by number": {}, "mode": "a"}
                    state["signs"] = torch.zeros_like(parameter, dtype=torch.int8)
                    state["wide"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["count"] += 1
                state["signs"] += parameter.grad.sign().to(torch.int8)
                state["wide"].mul_(0.9).add_(parameter.grad / 3)
                state["history"] = [*state["history"], parameter.grad.clone()][-3:]
                state["by number"][self.seen % 2] = (self.seen, parameter.grad * 2)
                if self.seen >= 2:
                    state["late"] = 0.5 * state.get("late", 0) + parameter.grad
                    state["mode"] = "b"
                assert (state["signs"].dtype, state["wide"].dtype) == (torch.int8, torch.float64)
                change = state["wide"].to(parameter.dtype) + sum(state["history"]) / 7 + 0.01 * state["signs"]
                change += sum(number * past for number, past in state["by number"].values()) / 50
                change += state.get("late", 0) * (2 if state["mode"] == "b" else 1) / state["count"]
                scale = 1 + group["levels"][0] / 9 + group["levels"]["mean"] / 9 + float(self.trace.sum()) / 100
                parameter.sub_(group["lr"] * scale * change)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": self.seen, "traces": [{7: self.trace}]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.trace = state_dict["seen"], state_dict["traces"][0][7]
        super().load_state_dict({name: state_dict[name] for name in ("state", "param_groups")})


class TwoPoints(Optimizer):
    """Optimizer with another point for evaluation, and a step in training mode only, like a schedule-free one."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "train_mode": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        for group in self.param_groups:
            assert group["train_mode"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    z = state.setdefault("z", parameter.clone())
                    for name, power in (("second", 2), ("third", 3)):
                        state[name] = state.get(name, 0) + parameter.grad**power
                    z.sub_(parameter.grad, alpha=group["lr"])
                    parameter.lerp_(z, 0.3)

    def train(self) -> None:
        self._exchange(True, 0.2)

    def eval(self) -> None:
        self._exchange(False, -0.25)

    @torch.no_grad()
    def _exchange(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] is not training else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = training


class EachParameter(Optimizer):
    """Optimizer that changes each parameter with a gradient in the same way. Subclasses say how."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.change(parameter, parameter.grad, group["lr"])

    def change(self, parameter: Tensor, gradient: Tensor, lr: float) -> None: ...


class ReadsNumbers(EachParameter):
    """Divides by the norm of the whole gradient, read as a number."""

    def change(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        parameter.sub_(gradient, alpha=lr / (1 + gradient.norm().item()))


class KeepsGradient(EachParameter):
    """Extrapolates from the gradient before, which it keeps without a copy."""

    def change(self, parameter: Tensor, gradient: Tensor, lr: float) -> None:
        parameter.sub_(2 * gradient - self.state[parameter].get("before", gradient), alpha=lr)
        self.state[parameter]["before"] = gradient
