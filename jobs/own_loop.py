"""Training loop of your own on the engine: exact windows, checkpoints, evaluation and record, as under `launch train`.

    launch run [cluster=slurm ...] -- jobs/own_loop.py

Stopped, preempted or killed, it continues bit by bit from its newest checkpoint: on Slurm by itself, anywhere by
`launch resume NAME`.
"""

import sys

import torch
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.tasks.bytes_gpt import BytesGPT

torch.manual_seed(0)  # the same on all ranks, before data and model are built
task = BytesGPT(width=64, depth=2, heads=2, seq_len=64)  # any model and dataset of yours
model, data, held_out = task.model(), task.train_data(), task.eval_data()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def loss(model, batch):
    tokens = batch.long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel()


plan = make_plan(
    ["batch.global_size=32", "batch.micro_size=4", "train.steps=40", "checkpoint.every=10", *sys.argv[1:]],
    samples=len(data),
)
engine = Engine(model, optimizer, plan)
engine.resume(eval_data=held_out, loss=loss)  # from the newest checkpoint of this run, if it has one

for window in engine.windows(data):  # one optimizer step each
    for batch in window:  # this rank's micro-batches
        engine.backward(*loss(engine.model, batch))
    result = engine.step()
    engine.finish_step(result)  # saves, evaluates and records what is due
    if engine.world.rank == 0 and result.step % 10 == 0:
        saved = result.comm.saved_fraction
        print(f"step {result.step}: loss {result.loss:.3f} over {result.items} bytes, {saved:.1%} of the wire saved")
