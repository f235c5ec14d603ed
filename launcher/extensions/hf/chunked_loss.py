"""Output head and cross-entropy of a large vocabulary, of which logits exist for one chunk of positions at a time."""
# ruff: noqa: TID253 (imported only where torch is wanted)

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from launcher.train.data.packing import NO_TARGET

# elements of the logits that exist at once: 512 MiB in fp32
CHUNK_ELEMENTS = 2**27
# factor of the logits' gradient in fp16, which would round small probabilities to zero; the gradient is at most 1
FP16_SCALE = 2.0**10


class ChunkedHead(nn.Linear):
    """Linear output head without bias that returns logits; or, with targets, their summed cross-entropy.

    The head's own forward pass computes the loss, so that strategies which gather parameters for a forward pass, or
    hook into it, see an ordinary one; a weight that is tied to an embedding stays tied.
    """

    targets: Tensor | None = None

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)
        self.chunk_loss = ChunkLoss()

    @classmethod
    def replace_head_of(cls, model: Any) -> None:
        """Make a ChunkedHead of the head of a model of transformers, in place, if it is a linear layer without bias
        whose result the model returns unchanged as its logits."""
        head = model.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None and _returns_head(model, head):
            head.__class__ = cls
            head.chunk_loss = ChunkLoss()

    def loss_of(self, model: Any, targets: Tensor, **inputs: Any) -> Tensor:
        """Return the cross-entropy in nats, summed over ``targets``, of a model of transformers with this head.

        Args:
            model: called with ``inputs``.
            targets: int64 [rows, length]; -100 where nothing is predicted.
        """
        self.targets = targets
        try:
            return model(**inputs).logits
        finally:
            self.targets = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Return logits [..., vocabulary]; or, with ``targets``, the cross-entropy in nats, summed over them.

        Args:
            hidden: [..., width].
            targets: int64 [...]; -100 where nothing is predicted.
        """
        targets = self.targets if targets is None else targets
        if targets is None:
            return super().forward(hidden)
        return linear_cross_entropy(hidden.flatten(0, -2), self.weight, targets.flatten(), loss=self.chunk_loss)


def _returns_head(model: Any, head: nn.Linear) -> bool:
    """Return whether the logits of a model of transformers are the result of its head: others scale or cap it. The
    layers before the head do not run."""
    results: list[Any] = []
    hook = head.register_forward_hook(lambda _, __, result: results.append(result))
    body, weight = model.base_model, head.weight
    body.forward = lambda *_, **__: _HiddenStates(weight.new_zeros(1, 1, head.in_features))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=weight.device)).logits
        return len(results) == 1 and logits is results[0]
    except Exception:  # of a model's code, which expects more of its layers
        return False
    finally:
        del body.forward
        hook.remove()


class _HiddenStates:
    """Result of the layers before a head, in which everything else is None."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor:
        return self.last_hidden_state


class ChunkLoss(nn.Module):
    """Cross-entropy of a chunk of logits, with its gradient. A module, so that ``train.compile`` compiles it and fuses
    its passes over the logits."""

    def forward(self, logits: Tensor, targets: Tensor, scale: float | None) -> tuple[Tensor, Tensor | None]:
        """Return the loss summed over the targets, and ``scale`` times its gradient with respect to the logits, in
        their dtype.

        Args:
            logits: [items, vocabulary].
            targets: int64 [items]; -100 where nothing is predicted.
            scale: None: no gradient.
        """
        wide = torch.promote_types(logits.dtype, torch.float32)
        logs = torch.log_softmax(logits, -1, dtype=wide)
        ignored, chosen = (targets == NO_TARGET)[:, None], targets.clamp(min=0)[:, None]
        loss = -logs.gather(-1, chosen).masked_fill(ignored, 0).sum()
        if scale is None:
            return loss, None
        if torch.compiler.is_compiling():
            is_chosen = torch.arange(logits.shape[-1], device=logits.device) == chosen
            gradient = (logs.exp() - is_chosen.to(wide)).masked_fill(ignored, 0)
        else:
            gradient = logs.exp_().scatter_add_(-1, chosen, torch.full_like(chosen, -1, dtype=wide))
            gradient.masked_fill_(ignored, 0)
        return loss, (gradient if scale == 1 else gradient * scale).to(logits.dtype)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, chunk: int | None = None, loss: ChunkLoss | None = None
) -> Tensor:
    """Return the sum of the cross-entropy of ``x @ weight.T``, one chunk of rows at a time.

    The gradients are computed with the loss, in the same pass over the chunks, so that the backward pass needs no
    logits; products are in the dtype of autocast, their sums in fp32.

    Args:
        x: [items, width].
        weight: [vocabulary, width].
        targets: int64 [items]; -100 where nothing is predicted.
        chunk: rows at a time; default: as many as have CHUNK_ELEMENTS logits.
        loss: of a chunk; may be compiled.

    Returns:
        Scalar in fp32, in fp64 if ``x`` is.
    """
    chunk = chunk or max(128, CHUNK_ELEMENTS // weight.shape[0] // 128 * 128)  # whole tiles of a GPU's products
    total: Any = _LinearCrossEntropy.apply(x, weight, targets, chunk, loss or ChunkLoss(), torch.is_grad_enabled())
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, loss: ChunkLoss, with_gradient: bool
    ) -> Tensor:
        device, wide = x.device.type, torch.promote_types(x.dtype, torch.float32)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        # autocast's own cache would keep this copy, without a gradient, for other uses in the micro-batch
        with torch.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            total = x.new_zeros((), dtype=wide)
            needed = [with_gradient and each for each in ctx.needs_input_grad[:2]]
            scale = FP16_SCALE if dtype is torch.float16 else 1.0
            # unscaled below, which fp16 has no room for
            grad_x = torch.empty_like(x, dtype=x.dtype if scale == 1 else wide) if needed[0] else None
            grad_weight = torch.zeros_like(matrix, dtype=wide) if needed[1] else None
            for start in range(0, len(x), chunk):
                rows = slice(start, start + chunk)
                part = x[rows].to(dtype)
                chunk_loss, grad_logits = loss(
                    functional.linear(part, matrix), targets[rows], scale if any(needed) else None
                )
                total += chunk_loss
                if grad_x is not None:
                    grad_x[rows] = grad_logits @ matrix
                if grad_weight is not None:
                    _add_product(grad_weight, grad_logits.T, part)
                del grad_logits  # before the next chunk's are made
            for gradient in (grad_x, grad_weight):
                if gradient is not None and scale != 1:
                    gradient /= scale
        ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scaled = (None if each is None else each * gradients[0] for each in ctx.saved_tensors)
        return *scaled, None, None, None, None


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to ``total``, summed in its dtype although ``a`` and ``b`` may be narrower."""
    if a.is_cuda and a.dtype != total.dtype:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), out=total)
