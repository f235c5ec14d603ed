"""task=hf_causal_lm: chats with tools, against the mask that transformers computes from marks in the template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import TaskError
from tests.extensions.hf.hf_files import CHAT_TEMPLATE, configuration, save_lines, save_tokenizer

pytestmark = pytest.mark.usefixtures("datasets_cache")

# transformers computes a mask of what is between generation and endgeneration
TEMPLATE = (
    "{% if tools %}<|start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}<call>{{ call['function'] | tojson }}</call>{% endfor %}"
    "<|end|>{% endgeneration %}{% else %}{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER, TIME = tool("weather", city={"type": "string"}), tool("time", zone={"type": "integer", "enum": [1, 2]})
WITH_RESULT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "weather in Rome?"},
    {"role": "assistant", "tool_calls": [call("weather", city="Rome")]},
    {"role": "tool", "name": "weather", "content": '{"sun": true}'},
    {"role": "assistant", "content": "Sun."},
    {"role": "user", "content": "and here?"},
]
AT_ONCE = [
    {"role": "user", "content": "both?"},
    {"role": "assistant", "content": "I ask.", "tool_calls": [call("weather", city="Oslo"), call("time", zone=2)]},
    {"role": "tool", "name": "weather", "content": "snow"},
    {"role": "tool", "name": "time", "content": "noon"},
    {"role": "assistant", "content": "Snow"},
    {"role": "assistant", "content": "at noon."},
]
PLAIN = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "first"}]
CHATS = [
    {"messages": WITH_RESULT, "tools": [WEATHER]},
    {"messages": AT_ONCE, "tools": [WEATHER, TIME]},
    {"messages": PLAIN, "tools": [TIME]},
    {"messages": PLAIN, "tools": []},
    {"messages": PLAIN, "tools": None},
    {"messages": AT_ONCE, "tools": None},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_files(tmp_path_factory.mktemp("tools"), TEMPLATE)


def save_files(directory: Path, template: str) -> Path:
    """Save a tokenizer, and the configuration of a model of 1,024 tokens: no chat here needs its weights."""
    save_tokenizer(directory, template=template)
    config = configuration("llama")
    config.max_position_embeddings = 1024
    config.save_pretrained(directory)
    return directory


def task(directory: Path, data: Path) -> Any:
    from launcher.extensions.hf.hf_causal_lm import HfCausalLM

    return HfCausalLM(str(directory / "config.json"), str(data), tokenizer=str(directory), held_out=0.0)


def expected(tokenizer: Any, chat: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return the tokens and labels of a chat up to its last answer, by transformers' own mask."""
    last = max(number for number, message in enumerate(chat["messages"]) if message["role"] == "assistant")
    encoded = tokenizer.apply_chat_template(
        chat["messages"][: last + 1], tools=chat["tools"] or None, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, mask = encoded["input_ids"], encoded["assistant_masks"]
    return tokens, [token if learned else -100 for token, learned in zip(tokens, mask, strict=True)]


def rows(job: Any) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"], row["labels"]) for row in sorted(job.train_data(), key=lambda row: row["example"])]


@pytest.mark.parametrize("stored", ["lines", "text", "table"])
def test_answers_are_learned_and_tools_and_their_results_are_not(stored: str, model: Path, tmp_path: Path) -> None:
    import datasets

    if stored == "table":  # fills in the keys that only other rows have
        chats = [{name: [] if value is None else value for name, value in chat.items()} for chat in CHATS]
        datasets.Dataset.from_list(chats).save_to_disk(tmp_path / "data")
        data = tmp_path / "data"
    else:
        texts = [chat | {"tools": json.dumps(chat["tools"])} for chat in CHATS]
        data = save_lines(tmp_path / "chats.jsonl", texts if stored == "text" else CHATS)
    job = task(model, data)
    wanted = [expected(job.tokenizer, chat) for chat in CHATS]
    assert rows(job) == wanted
    learned = ["".join(job.tokenizer.decode([t for t in labels if t != -100])) for _, labels in wanted]
    assert learned[0] == '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call><|end|>Sun.<|end|>'
    assert learned[1].startswith('I ask.<call>{"name": "weather", "arguments": {"city": "Oslo"}}</call><call>')
    assert learned[1].endswith("</call><|end|>Snow<|end|>at noon.<|end|>")


def test_a_null_that_matters_is_kept_in_json_text(model: Path, tmp_path: Path) -> None:
    tools = [tool("weather", city={"type": "string", "default": None})]
    file = save_lines(tmp_path / "chats.jsonl", [{"messages": PLAIN, "tools": json.dumps(tools)}])
    job = task(model, file)
    assert '"default": null' in job.tokenizer.decode(job.train_data()[0]["input_ids"])


CALLS = TEMPLATE[TEMPLATE.index("{% for call") : TEMPLATE.index("<|end|>{% endgeneration")]
REFUSED = {
    "ignores tools": (CHAT_TEMPLATE, "has tools, and the tokenizer's chat template does not write them"),
    "ignores calls": (TEMPLATE.replace(CALLS, ""), "has tool_calls, and the tokenizer's chat template does not write"),
    "rewrites": (
        TEMPLATE.replace("{% if tools %}", "{% if tools %}{{ messages | length }}"),
        "chat template writes the start of a chat differently",
    ),
}


@pytest.mark.parametrize("template", REFUSED)
def test_a_template_that_cannot_be_used_is_refused(template: str, tmp_path: Path) -> None:
    text, message = REFUSED[template]
    file = save_lines(tmp_path / "chats.jsonl", [CHATS[0]])
    job = task(save_files(tmp_path / "model", text), file)
    with pytest.raises(TaskError, match=message):
        job.train_data()


@pytest.mark.parametrize("tools", ["{", '{"name": "weather"}', "[1]"])
def test_tools_that_are_none_are_named(tools: str, model: Path, tmp_path: Path) -> None:
    job = task(model, save_lines(tmp_path / "chats.jsonl", [{"messages": PLAIN, "tools": tools}]))
    with pytest.raises(TaskError, match=r"example 0 \(counted from 0\) has tools that are"):
        job.train_data()
