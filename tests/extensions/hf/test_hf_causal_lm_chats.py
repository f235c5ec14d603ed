"""task=hf_causal_lm with chats: which part of a chat is learned, whatever its template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.errors import TaskError
from tests.extensions.hf.hf_files import CHAT_TEMPLATE, save_lines, save_model
from tests.extensions.hf.test_hf_causal_lm import task

pytestmark = pytest.mark.usefixtures("datasets_cache")


def test_the_loss_of_a_chat_is_on_its_answers(llama: Path, tmp_path: Path) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "two?"},
        {"role": "assistant", "content": "second"},
        {"role": "user", "content": "not answered"},
    ]
    job = task(llama, save_lines(tmp_path / "chats.jsonl", [{"messages": chat}]), seq_len=128)
    row = job.train_data()[0]
    learned = [label for label in row["labels"] if label != -100]
    assert job.tokenizer.decode(learned) == "first<|end|>second<|end|>"
    whole = job.tokenizer.decode(row["input_ids"])
    assert whole == job.tokenizer.apply_chat_template(chat[:5], tokenize=False)
    assert [t for t, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100] == learned


def test_a_chat_without_messages_cannot_be_used(llama: Path, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Name it."}, {"role": "assistant", "content": "area"}]
    file = save_lines(tmp_path / "chats.jsonl", [{"messages": chat}, {"messages": None}])
    with pytest.raises(TaskError, match=r"example 1 \(counted from 0\) has no token to predict"):
        task(llama, file).train_data()
    assert list(task(llama, file, unusable="skip").train_data()["example"]) == [0]


def test_keys_that_only_other_messages_have_are_left_out(tmp_path: Path) -> None:
    named = CHAT_TEMPLATE.replace(
        "{{ message['role'] }}", "{{ message['name'] if 'name' in message else message['role'] }}"
    )
    chat = [{"role": "user", "name": "Ada", "content": "one?"}, {"role": "assistant", "content": "first"}]
    file = save_lines(tmp_path / "chats.jsonl", [{"messages": chat}])
    job = task(save_model(tmp_path / "model", "llama", template=named), file)
    assert job.tokenizer.decode(job.train_data()[0]["input_ids"]).startswith(
        "<|start|>Ada\none?<|end|><|start|>assistant"
    )


def learned_of(tmp_path: Path, template: str, chat: list[dict[str, Any]]) -> tuple[str, str]:
    """Return the text of a chat, and the part of it that is learned."""
    file = save_lines(tmp_path / "chats.jsonl", [{"messages": chat}])
    job = task(save_model(tmp_path / "model", "llama", template=template), file, seq_len=128)
    row = job.train_data()[0]
    learned = [label for label in row["labels"] if label != -100]
    return job.tokenizer.decode(row["input_ids"]), job.tokenizer.decode(learned)


ASKED = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "f area(width)"}]


def test_an_answer_whose_start_joins_what_precedes_it(tmp_path: Path) -> None:
    """Letters of the template and of the answer are one token: it is learned, or the answer would lose its start."""
    ends_with_def = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\nde{% endif").replace(
        "{{ message['content'] }}", "{{ ('de' if message['role'] == 'assistant' else '') + message['content'] }}"
    )
    whole, learned = learned_of(tmp_path, ends_with_def, ASKED)
    assert whole.endswith("assistant\ndef area(width)<|end|>")
    assert learned in ("def area(width)<|end|>", "f area(width)<|end|>")


def test_white_space_after_the_end_of_an_answer_is_not_learned(tmp_path: Path) -> None:
    whole, learned = learned_of(tmp_path, CHAT_TEMPLATE.replace("<|end|>", "<|end|>\n"), ASKED)
    assert whole.endswith("<|end|>\n")
    assert learned == "f area(width)<|end|>"


@pytest.mark.parametrize("answer", ["f area(width)", "a", ""])
def test_a_header_that_is_no_prompt_is_not_learned(answer: str, tmp_path: Path) -> None:
    template = CHAT_TEMPLATE[: CHAT_TEMPLATE.index("{% if add_generation_prompt")]
    whole, learned = learned_of(tmp_path, template, [ASKED[0], {"role": "assistant", "content": answer}])
    assert f"<|start|>assistant\n{answer}<|end|>" in whole
    assert learned == f"{answer}<|end|>"


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}])
def test_an_answer_that_is_marked_as_context(mark: dict[str, Any], tmp_path: Path) -> None:
    other = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "print", "weight": 1}]
    greeting = {"role": "assistant", "content": "os"} | mark
    whole, learned = learned_of(tmp_path, CHAT_TEMPLATE, [greeting, ASKED[0], ASKED[1] | mark, *other])
    assert "f area(width)<|end|>" in whole
    assert learned == "print<|end|>"


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "assistant", "content": "first"}],
        [ASKED[0], {"role": "assistant", "content": None}],
        [ASKED[0], ASKED[1] | {"weight": 0.5}],
    ],
)
def test_chats_without_something_to_answer_or_an_answer(
    chat: list[dict[str, Any]], llama: Path, tmp_path: Path
) -> None:
    file = save_lines(tmp_path / "chats.jsonl", [{"messages": chat}])
    with pytest.raises(
        TaskError,
        match=r"example 0 \(counted from 0\) (begins with an|has messages that are not|has an answer of weight)",
    ):
        task(llama, file).train_data()
