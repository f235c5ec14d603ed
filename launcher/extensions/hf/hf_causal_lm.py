"""Task of next-token prediction with any causal language model of the transformers package."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from launcher.errors import TaskError
from launcher.extensions.hf.hf_data import Encode, UnusableExample, require_columns
from launcher.extensions.hf.hf_model import HfTask
from launcher.loss import Loss

if TYPE_CHECKING:
    from torch import nn

# label of a token that is not predicted, as in transformers
IGNORED = -100
# kinds of models with a class for causal language models that are not causal: CPM-Ant's prompt sees all of itself, and
# ProphetNet's loss depends on what else is in the micro-batch
_LOOK_AHEAD = ("cpmant", "prophetnet")
_Chat = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]  # messages, tools


class CausalLM(HfTask):
    """Causal language model of transformers, and examples as rows of tokens.

    Args:
        name: name of the task, for messages.
        model: as for HfTask.
        data: file or directory of examples.
        text: column of the text; None: ``text``, unless the columns are those of another kind of examples.
        pack: examples share rows.
        unusable: error or skip.
        arguments: those of HfTask.
    """

    def __init__(
        self, name: str, model: str, data: str, *, text: str | None, pack: bool, unusable: str, **arguments: Any
    ) -> None:
        super().__init__(name, model, data, **arguments)
        self._text, self._pack, self._unusable = text, pack, unusable

    def _encoding(self, path: str, data: Any) -> tuple[Encode, dict[str, Any]]:
        columns, text = set(data.column_names), self._text or "text"
        if self._text is None and "messages" in columns:
            encode = self._chat
        elif self._text is None and {"prompt", "completion"} <= columns:
            encode = self._completion
        else:
            require_columns("task.text", path, data, [text])
            encode = functools.partial(self._plain, text)
        kind = getattr(encode, "__name__", f"text in {text}")
        return encode, {"kind": kind, "seq_len": self._seq_len, "unusable": self._unusable}

    def _plain(self, column: str, example: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the pieces of a text. They overlap by one token, so that each but the first is predicted once."""
        if example[column] == "":  # the tokenizer may add tokens of its own
            raise UnusableExample("has no token to predict")
        tokens = self._ended(self._tokens(example[column]))
        step = self._seq_len - 1
        pieces = (tokens[start : start + self._seq_len] for start in range(0, max(1, len(tokens) - 1), step))
        return [self._sample(piece, piece) for piece in pieces]

    def _completion(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = self._tokens(example["prompt"], ends=False)
        answer = self._ended(self._tokens(example["completion"], starts=False, ends=False))
        return [self._sample(prompt + answer, [IGNORED] * len(prompt) + answer)]

    def _chat(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a chat as the tokenizer's template writes it, with the tokens of the answers as labels.

        The template writes the tools where it wants to; like the results of tools, they are not predicted.
        """
        messages = [_message(each) for each in example["messages"] or ()]
        tools = _tools(example.get("tools"))
        if tools:
            self._require_written("tools", (messages, tools), (messages, None), "leave the column tools out")
        text, answers = "", list[range]()
        for number, message in enumerate(messages):
            if message["role"] == "assistant" and (number or _is_learned(message)):
                if not number:
                    raise UnusableExample("begins with an answer, which only weight: 0 allows")
                prompt = self._templated(messages[:number], tools, prompts=True)
                longer = self._templated(messages[: number + 1], tools, prompts=False)
                if not (prompt.startswith(text) and longer.startswith(prompt)):
                    raise TaskError(
                        "the tokenizer's chat template writes the start of a chat differently when the chat continues, "
                        "so the place of an answer is not known.\n"
                        "  Use a template that appends, or columns prompt and completion."
                    )
                if message.get("tool_calls"):
                    plain = {"content": ""} | {name: value for name, value in message.items() if name != "tool_calls"}
                    before = messages[:number]
                    self._require_written(
                        "tool_calls", ([*before, message], tools), ([*before, plain], tools),
                        "write the calls into content",
                    )  # fmt: skip
                if _is_learned(message):
                    begin = len(prompt) + self._header(messages[: number + 1], tools, prompt)
                    answers.append(range(begin, max(begin, self._end(longer))))
                text = longer
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = encoded.input_ids, encoded["offset_mapping"]
        labels = [
            # a token may begin before the answer, such as with a space at the end of the prompt
            token if any(start in answer or start < answer.start < end for answer in answers) else IGNORED
            for token, (start, end) in zip(tokens, offsets, strict=True)
        ]
        return [self._sample(tokens, labels)]

    def _end(self, text: str) -> int:
        """Return the end of ``text`` without the white space after its end token, at which a generation stops."""
        shown = text.rstrip()
        return len(shown) if shown.endswith(tuple(self.tokenizer.all_special_tokens)) else len(text)

    def _header(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: str) -> int:
        """Return the number of characters that the template writes between the chat and the answer, if it does not
        write them as a prompt (``add_generation_prompt``); otherwise 0.

        Args:
            prompt: the messages before the last one, as the template writes them.
        """
        *others, last = messages
        if prompt != self._templated(others, tools, prompts=False):
            return 0
        # the header is what two different answers have in common
        answers = [{"role": last["role"], "content": letter} for letter in "AB"]
        texts = [self._templated([*others, answer], tools, prompts=False) for answer in answers]
        shared = itertools.takewhile(lambda letters: letters[0] == letters[1], zip(*texts, strict=False))
        return max(0, len([*shared]) - len(prompt))

    def _require_written(self, key: str, chat: _Chat, without: _Chat, instead: str) -> None:
        """Raise TaskError if the template ignores ``key`` of a chat, which transformers allows.

        Args:
            chat: messages and tools.
            without: the same without ``key``.
            instead: what to do if no tokenizer writes it.
        """
        if self._templated(*chat, prompts=False) == self._templated(*without, prompts=False):
            raise TaskError(
                f"has {key}, and the tokenizer's chat template does not write them.\n"
                f"  Use a tokenizer whose template does (task.tokenizer), or {instead}."
            )

    def _templated(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, prompts: bool) -> str:
        """Return the text of ``messages``; ``prompts``: with the beginning of an answer at the end."""
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompts
            )
        except Exception as error:  # of the template, which is code of the model's authors
            raise TaskError(f"the tokenizer's chat template: {error}") from None

    def _tokens(self, text: Any, *, starts: bool = True, ends: bool = True) -> list[int]:
        """Return the tokens of ``text``, with those that the tokenizer adds at the start and at the end of a text."""
        if not isinstance(text, str):
            raise UnusableExample(f"is {type(text).__name__} where text is expected")
        own, whole = (self.tokenizer(text, add_special_tokens=added).input_ids for added in (False, True))
        first = next((n for n in range(len(whole) - len(own) + 1) if whole[n : n + len(own)] == own), None)
        if whole and not own:  # which of them are at the start is seen from another text
            first = len(self._tokens("a", ends=False)) - len(self._tokens("a", starts=False, ends=False))
        if first is None:
            raise TaskError("the tokenizer changes the tokens of a text when it adds those of its start and end.")
        return whole[0 if starts else first : None if ends else first + len(own)]

    def _ended(self, tokens: list[int]) -> list[int]:
        """Return ``tokens`` with the end token, unless the tokenizer has none or has added one; empty if empty."""
        end = self.tokenizer.eos_token_id
        return tokens if end is None or tokens[-1:] == [end] or not tokens else [*tokens, end]

    def _sample(self, tokens: list[int], labels: list[int]) -> dict[str, Any]:
        if len(tokens) > self._seq_len:
            raise UnusableExample(f"has {len(tokens)} tokens, more than task.seq_len={self._seq_len}")
        if all(label == IGNORED for label in labels[1:]):
            raise UnusableExample("has no token to predict")
        return {"input_ids": tokens, "labels": labels, "length": len(tokens)}

    @cached_property
    def _packing(self) -> Any:
        from launcher.train.data.packing import Packing

        return Packing(self._seq_len, own_rows=not self._pack)

    def collate(self, samples: list[Any]) -> dict[str, Any]:
        return self._with_bounds(self._packing(samples))

    def _with_bounds(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return ``batch`` with the bounds of its documents, which a GPU could not count without a wait of the host."""
        if not self._pack:
            return batch
        from launcher.train.data.packing import document_bounds

        bounds = document_bounds(batch["document_ids"])
        # whole blocks of the kernel, so that few lengths differ
        return batch | {"bounds": bounds, "longest": -(-int(bounds.diff().max()) // 128) * 128}

    def micro_batch_tokens(self, lengths: Sequence[float]) -> int:
        return self._packing.micro_batch_tokens(lengths)

    def model(self) -> nn.Module:
        from transformers import AutoModelForCausalLM

        from launcher.extensions.hf.chunked_loss import ChunkedHead
        from launcher.extensions.hf.document_attention import use_documents

        self._require_causal()
        model = self._build(AutoModelForCausalLM, new_head=False)
        if self._pack:
            self._require_packable(model)
            use_documents(model)
        ChunkedHead.replace_head_of(model)
        return self._adapted(model, "CAUSAL_LM")

    def _require_causal(self) -> None:
        """Raise TaskError for a model whose tokens see those that they predict."""
        from transformers import MODEL_FOR_MASKED_LM_MAPPING

        kind, text = self._config.model_type, self._config.get_text_config()
        if type(self._config) in MODEL_FOR_MASKED_LM_MAPPING:
            why = f"{kind} is a masked language model"
        elif kind in _LOOK_AHEAD:
            why = f"{kind} is not causal"
        elif getattr(text, "use_bidirectional_attention", False) in (True, "all"):
            why = f"use_bidirectional_attention={text.use_bidirectional_attention} in its configuration"
        elif kind == "xlnet" and self._config.attn_type == "bi":
            why = "attn_type=bi in its configuration"
        elif kind == "bert-generation" and not self._config.is_decoder:
            why = "is_decoder=false in its configuration"
        else:
            return
        raise TaskError(
            f"task.model={self._model}: {why}: its tokens see those that they would predict.\n"
            "  Name a causal language model."
        )

    def _require_packable(self, model: Any) -> None:
        """Raise TaskError if a document of ``model`` could see others in its row, or could see less than alone."""
        config = model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or ["full_attention"])
        window = getattr(config, "sliding_window", None)
        window = window if getattr(config, "use_sliding_window", True) else None
        reason = ""
        if "position_ids" not in inspect.signature(model.forward).parameters:
            reason = "takes no position_ids"
        elif getattr(model, "_is_stateful", False) or layers - {"full_attention", "sliding_attention"}:
            reason = "has layers that cannot keep documents apart, such as recurrent ones"
        elif window is not None and window < self._seq_len:
            reason = f"attends to windows of {window} tokens, less than task.seq_len={self._seq_len}"
        elif config._attn_implementation not in ("sdpa", "eager"):
            reason = f"uses {config._attn_implementation}, which takes no mask of documents"
        if reason:
            raise TaskError(
                f"task.pack=true: {type(model).__name__} {reason}, so documents cannot share a row.\n"
                "  Use task.pack=false, with batch.balance=length against padding."
            )

    def loss(self, model: Any, batch: dict[str, Any]) -> Loss:
        """Return the cross-entropy in nats, summed over the predicted tokens."""
        from torch.nn import functional

        from launcher.extensions.hf.chunked_loss import ChunkedHead
        from launcher.extensions.hf.document_attention import mask_of

        # without shared rows no mask is needed: a token sees what precedes it, and the unused end comes last
        inputs = {"input_ids": batch["input_ids"], "use_cache": False}
        if self._pack:
            inputs |= {"position_ids": batch["position_ids"], "attention_mask": mask_of(model, batch)}
        head, targets = model.get_output_embeddings(), batch["targets"]
        with nullcontext() if self._pack else _rows_known_to_be_one_document():
            if isinstance(head, ChunkedHead):
                return Loss(head.loss_of(model, targets, **inputs), items=batch["items"])
            logits = model(**inputs).logits.flatten(0, 1).float()
        total = functional.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
        return Loss(total, items=batch["items"])

    def compile_units(self, model: Any) -> list[nn.Module]:
        """Return the blocks, which share one compilation, and the loss of a head whose loss is computed in chunks."""
        head = model.get_output_embeddings()
        return [*self.shard_units(model), *([head.chunk_loss] if hasattr(head, "chunk_loss") else [])]


class HfCausalLM(CausalLM):
    """Fine-tuning or training of a causal language model. An item is a predicted token; a sample is an example.

    Examples are of one of three kinds, by their columns: ``messages`` (a chat, perhaps with ``tools``; the loss is on
    the answers only, calls of tools included),
    ``prompt`` and ``completion`` (the loss is on the completion only), or text.

    Args:
        model: directory of a model, name on the hub, or path of a configuration (random initial values).
        data: file or directory of examples: json, parquet, csv, text, or what ``save_to_disk`` of datasets wrote.
        text: column of the text; if set, it is used although there are columns of the other kinds.
        tokenizer: directory or hub name; default: the model's.
        seq_len: tokens in a row; longer texts are cut into pieces that do not see each other. Default: 1,024, or the
            length of the model's sequences if that is less.
        pack: examples share rows. Otherwise each has a row of its own, padded to the longest of its micro-batch.
        eval_data: examples of the evaluation; default: a part of ``data``.
        held_out: share of ``data`` for the evaluation, the same in every run; 0: none.
        unusable: examples that are empty or, where they cannot be cut, too long: ``error``, or ``skip``.
        lora: train LoRA adapters only: ``{r, alpha, dropout, targets}``.
        revision: commit, branch or tag of a ``model`` on the hub; the plan stores the commit.
    """

    def __init__(
        self,
        model: str,
        data: str,
        text: str | None = None,
        tokenizer: str | None = None,
        seq_len: int | None = None,
        pack: bool = True,
        eval_data: str | None = None,
        held_out: float = 0.05,
        unusable: Literal["error", "skip"] = "error",
        lora: dict[str, Any] | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__(
            "hf_causal_lm", model, data, tokenizer=tokenizer, seq_len=seq_len, eval_data=eval_data, held_out=held_out,
            lora=lora, revision=revision, text=text, pack=pack, unusable=unusable,
        )  # fmt: skip


@contextmanager
def _rows_known_to_be_one_document() -> Iterator[None]:
    """Return a context in which transformers does not look for several documents in a row, for which the host would
    wait for the GPU in each forward pass."""
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None  # noqa: ARG005
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _message(message: Any) -> dict[str, Any]:
    """Return a message of a chat without the keys that only other messages have."""
    if not (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and (message.get("content") is not None or message.get("tool_calls"))
    ):
        raise UnusableExample("has messages that are not dicts with role and content, or role and tool_calls")
    return _without_nulls(message)


def _is_learned(message: dict[str, Any]) -> bool:
    """Return whether an answer is learned; otherwise it is context."""
    if (weight := message.get("weight", 1)) not in (0, 1):
        raise UnusableExample(f"has an answer of weight {weight}; it can be 0 or 1")
    return weight == 1 and message.get("train") is not False


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a chat: a list, or JSON text of one; None if there are none."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except ValueError as error:
            raise UnusableExample(f"has tools that are not JSON ({error})") from None
    else:
        tools = _without_nulls(tools)
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise UnusableExample("has tools that are neither a list of dicts nor JSON text of one")
    return tools or None


def _without_nulls(value: Any) -> Any:
    """Return ``value`` without the entries of dicts that are None: a table fills in the keys of its other rows."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
