"""A stranger's package: variable-length sequences, and a task that misbehaves on request."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from launcher import Loss


class Utterances(torch.utils.data.Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(11)
        self.lengths = torch.randint(2, 40, (count,), generator=generator).tolist()
        self.data = [torch.randint(1, 30, (n + 1,), generator=generator) for n in self.lengths]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Tagger:
    """``trouble``: what goes wrong, on rank 1, in its eleventh micro-batch of training."""

    def __init__(self, width=16, samples=100, trouble=None, pause_s=2.8):
        self.width, self.samples, self.trouble, self.pause_s = width, samples, trouble, pause_s
        self.calls = 0

    def model(self):
        if self.trouble == "real tensors":
            [rate.item() for rate in torch.linspace(0, 1, 3)]
        model = nn.Sequential(nn.Embedding(30, self.width), nn.GELU(), nn.Linear(self.width, 30))
        if self.trouble == "unused":
            model.register_parameter("forgotten", nn.Parameter(torch.zeros(3)))
        return model

    def shard_units(self, model):
        if self.trouble == "shared unit":
            model.again = model[2]
        return [model[1] if self.trouble == "empty unit" else model[2]]

    def train_data(self):
        if self.trouble == "hang at the start" and os.environ.get("RANK") == "1":
            threading.Event().wait()
        while self.trouble == "held at the start" and "RANK" in os.environ and Path("hold").exists():
            time.sleep(0.05)
        return Utterances(self.samples)

    def eval_data(self):
        held_out = Utterances(20)
        if self.trouble == "held-out sample":
            held_out.data[0] = None
        return held_out

    def collate(self, samples):
        return nn.utils.rnn.pad_sequence(samples, batch_first=True)

    def loss(self, model, batch):
        self.misbehave()
        targets = batch[:, 1:]
        logits = model(batch[:, :-1]).flatten(0, 1).float()
        total = functional.cross_entropy(logits, targets.flatten(), ignore_index=0, reduction="sum")
        if self.trouble == "not finite" and self.calls == 11 and os.environ["RANK"] == "1":
            total = total * float("nan")
        if self.trouble == "bad gradient":
            total = total + model[2].bias.mul(0).square().sum().sqrt()
        if self.trouble == "detached":
            total = total.detach()
        if self.trouble == "remembers":  # how far it has come, which is in no checkpoint
            total = total * (1 + 0.01 * self.calls)
        if self.trouble == "wrong type":
            return {"loss": total}
        return Loss(total=total, items=(targets != 0).sum())

    def misbehave(self):
        if not torch.is_grad_enabled():  # an evaluation
            if self.trouble == "held-out loss":
                raise ValueError("this loss is for training only")
            return
        self.calls += 1
        if self.trouble == "thread" and self.calls == 1:
            threading.Thread(target=threading.Event().wait, name="uploader").start()
        if self.trouble == "chatter" and "RANK" in os.environ:
            print("\n".join(["x" * 99] * 2000), flush=True)
            time.sleep(0.05)
        if self.trouble == "leave":
            raise SystemExit(0)
        if self.trouble == "peer asleep" and self.calls == 11 and os.environ["RANK"] == "0":
            raise ValueError("rank 0 is the one")
        if self.trouble in ("slow", "remembers"):
            time.sleep(0.05)
        if self.trouble == "slow then hang once" and self.calls <= 4 and os.environ["RANK"] == "1":
            time.sleep(self.pause_s)  # the other rank waits for the sum of them
        if self.calls != 11 or os.environ["RANK"] != "1":
            return
        if self.trouble == "raise":
            raise ValueError("the eleventh utterance is cursed")
        if self.trouble == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.trouble == "crash":
            ctypes.string_at(0)
        if self.trouble == "peer asleep":
            time.sleep(10_000)
        if self.trouble == "hang":
            Path("hangs").touch()
            time.sleep(10_000)
        if self.trouble == "slow then hang once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            hold_the_interpreter()
        if self.trouble == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter():
    """Behave like C code that loops or waits without releasing the interpreter's lock."""
    while True:
        ctypes.PyDLL(None).sleep(10_000)


class OwnUpdates(Tagger):
    """Has its own update rule."""

    def optimizer(self, model):
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        return [torch.optim.Adagrad(matrices, lr=0.02), torch.optim.Adam(others, lr=0.01)]

    def schedule(self, optimizer, steps):  # noqa: ARG002
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class MeanTagger(Tagger):
    """Returns a bare mean, as many loss functions do."""

    def loss(self, model, batch):
        logits = model(batch[:, :-1]).flatten(0, 1)
        return functional.cross_entropy(logits, batch[:, 1:].flatten(), ignore_index=0)


class Streamed(Tagger):
    def train_data(self):
        return Stream(self.samples)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, count):
        self.data = Utterances(count)

    def __iter__(self):
        return iter(self.data.data)


class NoLoss:
    def model(self):
        return nn.Linear(2, 2)

    def train_data(self):
        return Utterances(3)
