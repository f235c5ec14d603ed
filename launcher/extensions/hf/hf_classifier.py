"""Task of text classification with any sequence classifier of the transformers package."""

from __future__ import annotations

import functools
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import TaskError
from launcher.extensions.hf.hf_data import Encode, UnusableExample, require_columns
from launcher.extensions.hf.hf_model import HfTask
from launcher.loss import Loss
from launcher.quantities import first_names

if TYPE_CHECKING:
    from torch import nn


class HfClassifier(HfTask):
    """Fine-tuning of a sequence classifier, with an accuracy. An item is an example.

    Args:
        model: directory of a model, name on the hub, or path of a configuration (random initial values).
        data: file or directory of examples: json, parquet, csv, or what ``save_to_disk`` of datasets wrote.
        text: column of the text.
        label: column of the class: a name or a number.
        tokenizer: directory or hub name; default: the model's.
        seq_len: tokens of an example at most; default: 1,024, or the length of the model's sequences if that is less.
        eval_data: examples of the evaluation; default: a part of ``data``.
        held_out: share of ``data`` for the evaluation, the same in every run; 0: none.
        unusable: examples that are empty or longer than ``seq_len``: ``error``; ``skip``; or ``cut``, which cuts the
            end off longer ones, and skips empty ones.
        lora: train LoRA adapters and the head only: ``{r, alpha, dropout, targets}``.
        revision: commit, branch or tag of a ``model`` on the hub; the plan stores the commit.
    """

    def __init__(
        self,
        model: str,
        data: str,
        text: str = "text",
        label: str = "label",
        tokenizer: str | None = None,
        seq_len: int | None = None,
        eval_data: str | None = None,
        held_out: float = 0.05,
        unusable: Literal["error", "skip", "cut"] = "error",
        lora: dict[str, Any] | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__(
            "hf_classifier", model, data, tokenizer=tokenizer, seq_len=seq_len, eval_data=eval_data, held_out=held_out,
            lora=lora, revision=revision,
        )  # fmt: skip
        self._text, self._label, self._unusable = text, label, unusable

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = super().tokenizer
        if tokenizer.pad_token_id is None:
            key, path = self._tokenizer_source
            raise TaskError(
                f"{key}={path}: the tokenizer has no pad token, and a classifier needs it to find a text's end.\n"
                "  Set it with tokenizer.pad_token = ..., save the tokenizer, and name its directory in task.tokenizer."
            )
        return tokenizer

    @cached_property
    def _classes(self) -> list[Any]:
        """Return the classes in the order of the model's outputs: all that the examples of ``task.data`` have."""
        data = self._all_examples
        require_columns("task.label", self._data, data, [self._label])
        if names := _names_of(data, self._label):
            return self._in_order_of_head(names)
        values = set(data.unique(self._label))
        kinds = {type(value) for value in values}
        if kinds not in ({int}, {str}):
            raise TaskError(
                f"task.label={self._label}: its values are {first_names(sorted(kind.__name__ for kind in kinds))}; "
                "a class is a number or a name."
            )
        if len(values) < 2:
            raise TaskError(f"task.label={self._label}: only one class, {values.pop()!r}; there must be two at least.")
        if kinds == {int}:
            if min(values) < 0:
                raise TaskError(
                    f"task.label={self._label}: {min(values)} is no class: numbers of classes start at 0.\n"
                    "  Leave out examples without a label, or write names."
                )
            if max(values) >= 100 * len(values):
                raise TaskError(f"task.label={self._label}: {max(values)} is too large for the number of a class.")
            return self._in_order_of_head(list(range(max(values) + 1)))
        return self._in_order_of_head(sorted(values))

    def _in_order_of_head(self, classes: list[Any]) -> list[Any]:
        """Return ``classes`` in the order of the head that the model has."""
        trained = any("ForSequenceClassification" in name for name in self._config.architectures or ())
        if not trained or Path(self._model).is_file():
            return classes
        own = [self._config.id2label[number] for number in range(self._config.num_labels)]
        numbered = isinstance(classes[0], int) or all(str(name).startswith("LABEL_") for name in own)
        if numbered and len(own) == len(classes):
            return classes
        if set(own) == set(classes):
            return own
        raise TaskError(
            f"task.model={self._model}: it has a trained classifier of {first_names(list(map(str, own)))}, and the "
            f"examples have {first_names(list(map(str, classes)))}.\n  Name a model without a trained classifier."
        )

    def model(self) -> nn.Module:
        from transformers import AutoModelForSequenceClassification

        self._config.num_labels = len(self._classes)
        self._config.pad_token_id = self.tokenizer.pad_token_id
        if isinstance(self._classes[0], str):
            self._config.id2label = dict(enumerate(self._classes))
            self._config.label2id = {name: number for number, name in enumerate(self._classes)}
        return self._adapted(self._build(AutoModelForSequenceClassification, new_head=True), "SEQ_CLS")

    def _encoding(self, path: str, data: Any) -> tuple[Encode, dict[str, Any]]:
        require_columns("task.text", path, data, [self._text])
        require_columns("task.label", path, data, [self._label])
        names = _names_of(data, self._label)
        settings = {
            "kind": "classifier",
            "columns": [self._text, self._label],
            "names": names,
            "classes": self._classes,
            "seq_len": self._seq_len,
            "unusable": self._unusable,
        }
        return functools.partial(self._encode, names), settings

    def _encode(self, names: list[str] | None, example: dict[str, Any]) -> list[dict[str, Any]]:
        text, label = example[self._text], example[self._label]
        if names and label in range(len(names)):  # datasets write -1 or null for an example without a label
            label = names[label]
        if label not in self._classes:
            raise TaskError(f"task.label={self._label}: {label!r} is no class of {self._data}.")
        if not isinstance(text, str) or not text:
            raise UnusableExample("has no text")
        cut = {"truncation": True, "max_length": self._seq_len} if self._unusable == "cut" else {}
        tokens = self.tokenizer(text, **cut).input_ids
        if len(tokens) > self._seq_len:
            raise UnusableExample(f"has {len(tokens)} tokens, more than task.seq_len={self._seq_len}")
        return [{"input_ids": tokens, "label": self._classes.index(label), "length": len(tokens)}]

    def collate(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        # models with absolute positions expect a text at the start of its row; an XLNet reads the end of the row
        side = "left" if self._config.model_type == "xlnet" else "right"
        texts = [{"input_ids": sample["input_ids"]} for sample in samples]
        batch = self.tokenizer.pad(texts, padding_side=side, return_tensors="pt")
        return {**batch, "labels": torch.tensor([sample["label"] for sample in samples])}

    def loss(self, model: Any, batch: dict[str, Any]) -> Loss:
        """Return the cross-entropy in nats, summed over the examples, and the accuracy."""
        from torch.nn import functional

        labels = batch["labels"]
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        right = (logits.argmax(1) == labels).sum()
        total = functional.cross_entropy(logits, labels, reduction="sum")
        return Loss(total, items=len(labels), metrics={"accuracy": (right, len(labels))})


def _names_of(data: Any, column: str) -> list[str] | None:
    """Return the names of a ClassLabel column, whose values are their numbers; None of any other column."""
    return getattr(data.features[column], "names", None)
