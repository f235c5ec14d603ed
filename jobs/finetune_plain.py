"""Script before the move: trains a text classifier in plain PyTorch, one process, one big batch a step.

python jobs/finetune_plain.py

Which module of the standard library is a function from? Parameter groups without decay, warm-up, clipping, an average
of the weights (EMA), accuracy on held-out functions, early stopping, the best model on disk, texts of uneven length.
jobs/finetune.py is the same job for `launch train`; tests/system/test_finetune.py compares the two.
"""

import ast
import copy
import importlib
import inspect
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Subset, random_split

MODULES = ("argparse", "ast", "datetime", "decimal", "inspect", "mailbox", "tarfile", "typing")
LONGEST, EPOCHS, BATCH, EVALUATE_EVERY, PATIENCE = 256, 4, 64, 10, 3
RATE, DECAY, WARM_UP, CLIP, EMA = 3e-3, 0.1, 10, 1.0, 0.9
Sample = tuple[Tensor, int]


def functions() -> list[Sample]:
    """Return the source of each function as bytes, and the number of its module."""
    samples: list[Sample] = []
    for label, name in enumerate(MODULES):
        source = Path(str(inspect.getsourcefile(importlib.import_module(f"_py{name}" if name == "decimal" else name))))
        lines = source.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.FunctionDef):
                code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                samples.append((torch.tensor(list(code.encode()[:LONGEST])) + 1, label))
    return samples


def split(samples: list[Sample]) -> list[Subset[Sample]]:
    return random_split(samples, [0.8, 0.2])  # pyright: ignore[reportArgumentType]


def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Return the texts, padded with zeros to the longest, and their labels."""
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, width, padding_idx=0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, len(MODULES))

    def forward(self, texts: Tensor) -> Tensor:
        padding, x = texts == 0, self.embed(texts)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return self.head(x.masked_fill(padding[..., None], 0).sum(1) / (~padding).sum(1, keepdim=True))


def groups(model: nn.Module) -> list[dict[str, object]]:
    named = list(model.parameters())
    return [
        {"params": [p for p in named if p.ndim >= 2]},
        {"params": [p for p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Subset[Sample]) -> tuple[float, float]:
    """Return loss and accuracy."""
    texts, labels = collate([held_out[i] for i in range(len(held_out))])
    logits = model.eval()(texts)
    model.train()
    return functional.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()


def train(model: nn.Module, data: Subset[Sample], held_out: Subset[Sample], batches: Iterable[list[int]]) -> nn.Module:
    """Train ``model`` on these batches of indices, and return the average of its weights."""
    optimizer = AdamW(groups(model), RATE, betas=(0.9, 0.95), weight_decay=DECAY)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    average, best, worse = copy.deepcopy(model), -1.0, 0
    for step, indices in enumerate(batches, 1):
        texts, labels = collate([data[i] for i in indices])
        loss = functional.cross_entropy(model(texts), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.data.lerp_(value.data, 1 - EMA)
        if step % EVALUATE_EVERY == 0:
            held_out_loss, accuracy = evaluate(average, held_out)
            print(f"step {step}: loss {loss.item():.4f}, held out {held_out_loss:.4f}, accuracy {accuracy:.3f}")
            worse = 0 if accuracy > best else worse + 1
            if accuracy > best:
                best = accuracy
                torch.save(average.state_dict(), "best.pt")
            if worse == PATIENCE:
                break
    return average


if __name__ == "__main__":
    torch.manual_seed(0)
    data, held_out = split(functions())
    orders = (torch.randperm(len(data)) for _ in range(EPOCHS))
    train(Classifier(), data, held_out, (batch.tolist() for order in orders for batch in order.split(BATCH)))
