"""A task whose loss has two terms with denominators of their own, and metrics."""

from __future__ import annotations

import torch
from torch.nn import functional

from launcher import Loss
from speech.tasks import Tagger

LONG = 20


class Scored(Tagger):
    """Tokens, weighted by class, and a penalty over the long utterances of a micro-batch, of which it may have none."""

    def loss(self, model, batch):
        targets = batch[:, 1:]
        logits = model(batch[:, :-1])
        weights = torch.arange(30, device=batch.device) / 10
        total = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), weight=weights, reduction="sum"
        )
        valid = targets != 0
        right = ((logits.argmax(2) == targets) & valid).sum()
        long = valid.sum(1) > LONG
        energy = (logits.float().square().mean(2) * valid).sum(1) / valid.sum(1)  # padding does not count
        penalty = energy[long].sum()
        return [
            Loss(total, weights[targets].sum(), {"accuracy": (right, valid.sum())}, "tokens"),
            Loss(penalty, int(long.sum()), name="long"),
        ]


class Counted(Scored):
    """Counts its items without a forward pass."""

    def items(self, batch):
        targets = batch[:, 1:]
        weights = torch.arange(30, device=batch.device) / 10
        return [weights[targets].sum(), int(((targets != 0).sum(1) > LONG).sum())]
