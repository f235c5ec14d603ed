"""Training loop of your own on the engine: exact windows, synchronisation only at the boundary, two ranks.

launch run -- jobs/own_loop.py
"""

import torch
from torch.nn import functional

from launcher import Engine, make_plan
from launcher.tasks.bytes_gpt import BytesGPT

torch.manual_seed(0)  # the same on all ranks, before data and model are built
task = BytesGPT(width=64, depth=2, heads=2, seq_len=64)  # any model and dataset of yours
model, data = task.model(), task.train_data()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

plan = make_plan(["batch.global_size=32", "batch.micro_size=4", "train.steps=40"], samples=len(data))
engine = Engine(model, optimizer, plan)

for window in engine.windows(data):  # one optimizer step each
    for batch in window:  # this rank's micro-batches
        tokens = batch.long()
        logits, targets = engine.model(tokens[:, :-1]), tokens[:, 1:]
        loss_sum = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
        engine.backward(loss_sum, items=targets.numel())
    result = engine.step()
    if engine.world.rank == 0 and result.step % 10 == 0:
        saved = result.comm.saved_fraction
        print(f"step {result.step}: loss {result.loss:.3f} over {result.items} bytes, {saved:.1%} of the wire saved")
