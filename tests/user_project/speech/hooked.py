"""Tasks that ask for their context, and tasks whose loss is not finite in chosen windows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import nn

import launcher
from launcher import Loss
from speech.tasks import Tagger


class Watching(nn.Sequential):
    """Asks for the context in its forward pass, too."""

    def forward(self, inputs):
        self.seen = launcher.current()
        return super().forward(inputs)


class Contextual(Tagger):
    """Writes each context that it sees to ``seen-RANK.jsonl``, and logs scalars."""

    def model(self):
        return Watching(*super().model())

    def collate(self, samples):
        self.step_in_collate = launcher.current().step
        return super().collate(samples)

    def loss(self, model, batch):
        now, loss = launcher.current(), super().loss(model, batch)
        inside = next((part.seen for part in [*getattr(model, "modules", list)()] if hasattr(part, "seen")), now)
        now.log("lengths/longest", batch.shape[1])
        now.log("total", loss.total)
        seen = {"rank": now.rank, "size": now.world_size, "step": now.step, "epoch": now.epoch, "seed": now.seed}
        seen |= {"evaluating": now.evaluating, "device": str(now.device), "inside": inside.step == now.step}
        seen |= {"collate": self.step_in_collate, "longest": batch.shape[1]}
        if "RANK" in os.environ:  # not while the task is inspected
            with Path(f"seen-{now.rank}.jsonl").open("a") as file:
                file.write(json.dumps(seen) + "\n")
        return Loss(loss.total, loss.items)


class Poisoned(Tagger):
    """One sample in the data makes the loss of its micro-batch nan."""

    def train_data(self):
        data = super().train_data()
        for sample in data.data:
            sample[sample == 29] = 28
        data.data[13][0] = 29
        return data

    def loss(self, model, batch):
        loss, poison = super().loss(model, batch), (batch == 29).any().float()
        return Loss(loss.total / (1 - poison) - loss.total * poison, loss.items)


class Recorder:
    """Callback that writes each event and the parameters to ``events-RANK.jsonl``; has state of each kind."""

    def __init__(self, fails_in="", rank=1, label="recorder"):
        self.fails_in, self.rank, self.label = fails_in, rank, label
        self.steps, self.sums = 0, torch.zeros(3)

    def note(self, engine, event, **more):
        now = launcher.current()
        if event == self.fails_in and now.rank == self.rank:
            raise ValueError(f"no {event} today")
        torch.rand(1)
        whole = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().flatten().tolist()
            for name, value in engine.parallel.module.named_parameters()
        }
        line = {"event": event, "label": self.label, "step": now.step, "steps": self.steps, "parameters": whole, **more}
        with Path(f"events-{now.rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_setup(self, engine):
        self.note(engine, "setup")

    def on_start(self, engine):
        self.note(engine, "start")

    def on_window(self, engine):
        self.note(engine, "window")

    def on_step(self, engine, result):
        self.steps += 1
        self.sums += result.loss
        self.note(engine, "step", of=result.step)

    def on_evaluation(self, engine, metrics):
        self.note(engine, "evaluation", loss=metrics["eval/loss"])

    def on_save(self, engine, directory):
        self.note(engine, "save", directory=directory.name)

    def on_end(self, engine, verdict):
        self.note(engine, "end", verdict=verdict)

    def state_dict(self):
        return {"steps": self.steps, "deep": {"sums": self.sums}}

    def load_state_dict(self, state):
        self.steps, self.sums = state["steps"], state["deep"]["sums"]


class Talking(Tagger):
    """Generates a text and two images at each evaluation, by a forward pass that all ranks take part in."""

    def __init__(self, wrong=False, **others):
        super().__init__(**others)
        self.wrong = wrong

    def sample(self, model):
        assert not model.training
        assert not torch.is_grad_enabled()
        torch.rand(2)
        choice = model(torch.arange(1, 9)[None]).float().argmax(-1)
        grey = torch.linspace(0, 1, 12).reshape(3, 4)
        colour = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 4)
        return 7 if self.wrong else {"text": f"<b>{choice.tolist()}</b>", "grey": grey, "colour": colour}


class Reporting:
    """A callback of the user's own that acts on the outcome."""

    def on_outcome(self, outcome):
        (Path(outcome.dir) / "outcome.txt").write_text(f"{outcome.text}|{outcome.steps}|{outcome.error}")
