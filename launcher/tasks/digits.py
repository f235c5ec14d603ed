"""Small convolutional net with BatchNorm on the handwritten digits (8 x 8 pixels) in scikit-learn's package.

The module does not import torch at module level, so that a plan can be made from ``facts`` in a tenth of a second.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from launcher.errors import TaskError
from launcher.loss import Loss

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset


IMAGES, SIDE, CLASSES = 1797, 8, 10  # as in sklearn.datasets.load_digits (UCI, Alpaydin & Kaynak 1998)
HELD_OUT_EVERY = 5  # images 4, 9, 14, ... are held out


class Digits:
    """Task of digit classification. An item is an image. The model has two BatchNorm layers, on which ``batch.norm``
    has an effect.

    Args:
        width: channels of the first convolution; the second has twice as many.
        momentum: momentum of BatchNorm's running statistics.
    """

    def __init__(self, width: int = 16, momentum: float = 0.1) -> None:
        if width < 1:
            raise TaskError(f"task.width={width}: must be at least 1.")
        if not 0 < momentum <= 1:
            raise TaskError(f"task.momentum={momentum}: must be above 0 and at most 1.")
        if find_spec("sklearn") is None:
            raise TaskError("task=digits: the images come with scikit-learn, which is not installed.\n"
                            "  pip install scikit-learn (or samebatch[digits])")  # fmt: skip
        self.width, self.momentum = width, momentum

    def facts(self) -> dict[str, int]:
        """Return numbers of samples and parameters by arithmetic; a test compares them to ``model`` and
        ``train_data``."""
        w = self.width
        convolutions = 9 * w + 9 * w * 2 * w
        norms = 2 * w + 4 * w
        head = 2 * w * (SIDE // 2) ** 2 * CLASSES + CLASSES
        return {
            "samples": IMAGES - IMAGES // HELD_OUT_EVERY,
            "parameters": convolutions + norms + head,
            "unit_parameters": convolutions + norms,
            "vector_parameters": norms + CLASSES,
            "batch_norms": 2,
            "matmul_parameters": convolutions + head,
            "unit_matmul_parameters": convolutions,
        }

    def flops_per_sample(self) -> float:
        """Return 6 FLOPs per product of a weight and a pixel; 4 in the first convolution, whose input needs no
        gradient."""
        w = self.width
        first, second, head = SIDE**2 * 9 * w, SIDE**2 * 9 * w * 2 * w, 2 * w * (SIDE // 2) ** 2 * CLASSES
        return 4.0 * first + 6.0 * (second + head)

    def model(self) -> nn.Module:
        from torch import nn

        def block(channels: int, wider: int) -> nn.Module:
            norm = nn.BatchNorm2d(wider, momentum=self.momentum)
            return nn.Sequential(nn.Conv2d(channels, wider, 3, padding=1, bias=False), norm, nn.ReLU())

        w = self.width
        head = nn.Linear(2 * w * (SIDE // 2) ** 2, CLASSES)
        return nn.Sequential(block(1, w), block(w, 2 * w), nn.MaxPool2d(2), nn.Flatten(), head)

    def train_data(self) -> TensorDataset:
        return self._images(held_out=False)

    def eval_data(self) -> TensorDataset:
        return self._images(held_out=True)

    def _images(self, *, held_out: bool) -> TensorDataset:
        """Return the images, float [samples, 1, 8, 8] from 0 to 1, and the digits."""
        import torch
        from sklearn.datasets import load_digits
        from torch.utils.data import TensorDataset

        data: Any = load_digits()
        pixels = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        chosen = (torch.arange(len(pixels)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1) == held_out
        return TensorDataset(pixels[chosen], torch.as_tensor(data.target)[chosen])

    def loss(self, model: Any, batch: tuple[Tensor, Tensor]) -> Loss:
        """Return the cross-entropy in nats, and the accuracy. ``batch``: images and digits."""
        from torch.nn import functional

        pixels, digits = batch
        scores = model(pixels).float()
        right = (scores.argmax(1) == digits).sum()
        total = functional.cross_entropy(scores, digits, reduction="sum")
        return Loss(total, items=len(digits), metrics={"accuracy": (right, len(digits))})
