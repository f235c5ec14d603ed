"""The job of jobs/finetune_plain.py for `launch train`: any strategy, any number of ranks, resumed bit by bit.

launch train --config-dir jobs --config-name finetune
"""

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset

from jobs.finetune_plain import Classifier, Sample, collate, functions, split
from launcher import Loss


class Finetune:
    """Task of the text classifier: an item is a function of the standard library."""

    collate = staticmethod(collate)

    def __init__(self, width: int = 32, depth: int = 2) -> None:
        self.width, self.depth = width, depth

    def model(self) -> nn.Module:
        return Classifier(self.width, self.depth)

    def train_data(self) -> Subset[Sample]:
        return split(functions())[0]

    def eval_data(self) -> Subset[Sample]:
        return split(functions())[1]

    def length(self, sample: Sample) -> int:
        return len(sample[0])

    def loss(self, model: Classifier, batch: tuple[Tensor, Tensor]) -> Loss:
        texts, labels = batch
        logits = model(texts).float()
        right = (logits.argmax(1) == labels).sum()
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return Loss(total, items=len(labels), metrics={"accuracy": (right, len(labels))})
