"""task=hf_classifier: classes from the data, accuracy, and the examples that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from launcher.errors import TaskError
from launcher.extensions.hf.hf_classifier import HfClassifier
from tests.extensions.hf.hf_files import TEXTS, save_lines, save_model

pytestmark = pytest.mark.usefixtures("datasets_cache")
ROWS = [{"text": text, "label": "code" if "(" in text else "prose"} for text in TEXTS]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("bert"), "bert")


def task(model: Path, data: Path, **settings: Any) -> HfClassifier:
    return HfClassifier(str(model), str(data), **({"held_out": 0.0, "seq_len": 64} | settings))


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_loss_and_accuracy_are_those_of_each_example_alone(kind: str, tmp_path: Path) -> None:
    job = task(save_model(tmp_path / kind, kind), save_lines(tmp_path / "rows.jsonl", ROWS))
    model, data = job.model().eval(), job.train_data()
    assert model.config.id2label == {0: "code", 1: "prose"}
    result = job.loss(model, job.collate([data[index] for index in range(len(data))]))
    logits = [model(input_ids=torch.tensor([job.tokenizer(row["text"]).input_ids])).logits[0] for row in ROWS]
    classes = torch.tensor([("code", "prose").index(row["label"]) for row in ROWS])
    expected = torch.nn.functional.cross_entropy(torch.stack(logits), classes, reduction="sum")
    torch.testing.assert_close(result.total, expected, rtol=1e-5, atol=1e-6)
    right, count = result.metrics["accuracy"]
    assert (int(right), count) == (int((torch.stack(logits).argmax(1) == classes).sum()), len(ROWS))


def test_the_weights_of_the_body_are_the_models_own(bert: Path, tmp_path: Path) -> None:
    from transformers import AutoModel

    model = task(bert, save_lines(tmp_path / "rows.jsonl", ROWS)).model()
    body = AutoModel.from_pretrained(bert).state_dict()
    assert all(torch.equal(value, body[name]) for name, value in model.bert.state_dict().items())
    assert model.classifier.weight.shape == (2, 32)


def test_classes_that_are_numbers(bert: Path, tmp_path: Path) -> None:
    rows = [{"text": text, "label": number % 4} for number, text in enumerate(TEXTS) if number % 4 != 1]
    job = task(bert, save_lines(tmp_path / "rows.jsonl", rows))
    assert job.model().classifier.weight.shape == (4, 32)  # 1 is a class without examples
    assert list(job.train_data()["label"]) == [row["label"] for row in rows]


def test_texts_that_are_too_long(bert: Path, tmp_path: Path) -> None:
    file = save_lines(
        tmp_path / "rows.jsonl", [*ROWS, {"text": "x(" * 80, "label": "code"}, {"text": "", "label": "code"}]
    )
    with pytest.raises(TaskError, match=r"example 8 \(counted from 0\) has .* tokens, more than task.seq_len=64"):
        task(bert, file).train_data()
    assert list(task(bert, file, unusable="skip").train_data()["example"]) == list(range(8))
    cut = task(bert, file, unusable="cut").train_data()
    assert list(cut["example"]) == list(range(9))
    assert cut["length"][8] == 64


@pytest.mark.parametrize(
    ("settings", "rows", "message"),
    [
        ({"label": "lable"}, ROWS, "task.label=lable: .* has no such column"),
        ({}, [{"text": "a", "label": 0.5}, {"text": "b", "label": 1.5}], "its values are float"),
        ({}, ROWS[:1], "only one class"),
        (
            {},
            [{"text": str(label), "label": label} for label in (0, 1, -1)],
            "-1 is no class: numbers of classes start",
        ),
    ],
)
def test_wrong_classes_are_named(bert: Path, tmp_path: Path, settings: Any, rows: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        task(bert, save_lines(tmp_path / "rows.jsonl", rows), **settings).model()


def test_an_unknown_class_in_the_held_out_data_is_named(bert: Path, tmp_path: Path) -> None:
    other = save_lines(tmp_path / "other.jsonl", [{"text": "a text", "label": "verse"}])
    job = task(bert, save_lines(tmp_path / "rows.jsonl", ROWS), eval_data=str(other))
    with pytest.raises(TaskError, match=r"example 0 .*'verse' is no class of"):
        job.eval_data()


@pytest.mark.parametrize("label", [-1, None])
def test_an_example_without_a_label_is_refused(bert: Path, tmp_path: Path, label: int | None) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["code", "prose"])})
    rows = {"text": ["some code", "some prose", "a text"], "label": [0, 1, label]}
    Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "rows")
    with pytest.raises(TaskError, match=rf"example 2 \(counted from 0\): task.label=label: {label} is no class of"):
        task(bert, tmp_path / "rows").train_data()


def test_a_tokenizer_without_a_pad_token_is_refused(tmp_path: Path) -> None:
    directory = save_model(tmp_path / "model", "llama", pad=False)
    with pytest.raises(TaskError, match="the tokenizer has no pad token"):
        task(directory, save_lines(tmp_path / "rows.jsonl", ROWS)).model()


def test_adapters_and_the_new_head_are_trained(bert: Path, tmp_path: Path) -> None:
    model = task(bert, save_lines(tmp_path / "rows.jsonl", ROWS), lora={"r": 2, "targets": ["query"]}).model()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-1] for name in trained if "classifier" in name} == {"weight", "bias"}
    assert all("lora_" in name or "classifier" in name for name in trained)


def test_a_tokenizer_that_pads_on_the_left_gives_the_same(bert: Path, tmp_path: Path) -> None:
    job = task(bert, save_lines(tmp_path / "rows.jsonl", ROWS))
    model, data = job.model().eval(), job.train_data()
    rows = [data[index] for index in range(len(data))]
    expected = job.loss(model, job.collate(rows)).total.detach()
    job.tokenizer.padding_side = "left"
    torch.testing.assert_close(job.loss(model, job.collate(rows)).total.detach(), expected)


def trained_head(directory: Path, names: list[str]) -> Path:
    """Save a classifier of ``names`` with its head."""
    import transformers

    save_model(directory, "bert")
    config = transformers.BertConfig.from_pretrained(directory, id2label=dict(enumerate(names)), num_labels=len(names))
    transformers.BertForSequenceClassification(config).save_pretrained(directory)
    return directory


def test_a_trained_head_keeps_the_order_of_its_classes(tmp_path: Path) -> None:
    job = task(trained_head(tmp_path / "model", ["prose", "code"]), save_lines(tmp_path / "rows.jsonl", ROWS))
    assert job.model().config.id2label == {0: "prose", 1: "code"}
    assert list(job.train_data()["label"]) == [int("(" in text) for text in TEXTS]


def test_a_trained_head_of_other_classes_is_refused(tmp_path: Path) -> None:
    file = save_lines(tmp_path / "rows.jsonl", ROWS)
    for names in (["good", "bad"], ["one", "two", "three"]):
        with pytest.raises(TaskError, match="it has a trained classifier of"):
            task(trained_head(tmp_path / names[0], names), file).model()


def test_named_classes_of_a_dataset_are_matched_by_name(bert: Path, tmp_path: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    for name, order in (("train", ["prose", "code"]), ("eval", ["code", "prose"])):
        features = Features({"text": Value("string"), "label": ClassLabel(names=order)})
        rows = {"text": TEXTS, "label": [order.index("code" if "(" in text else "prose") for text in TEXTS]}
        Dataset.from_dict(rows, features).save_to_disk(tmp_path / name)
    job = task(bert, tmp_path / "train", eval_data=str(tmp_path / "eval"))
    assert job.model().config.id2label == {0: "prose", 1: "code"}
    assert list(job.eval_data()["label"]) == list(job.train_data()["label"])


def test_a_class_that_is_held_out_only_is_a_class(bert: Path, tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": "rare" if n == 7 else "ab"[n % 2]} for n in range(20)]
    for held_out in (0.1, 0.3, 0.5):
        job = task(bert, save_lines(tmp_path / "rows.jsonl", rows), held_out=held_out)
        assert job.model().config.num_labels == 3
        assert len(job.train_data()) + len(job.eval_data()) == 20


def test_layers_without_weights_are_trained_beside_adapters(tmp_path: Path) -> None:
    import transformers

    directory = save_model(tmp_path / "masked", "bert")
    config = transformers.BertConfig.from_pretrained(directory)
    transformers.BertForMaskedLM(config).save_pretrained(directory)  # has no pooler
    job = task(directory, save_lines(tmp_path / "rows.jsonl", ROWS), lora={"r": 2, "targets": "query"})
    trained = [name for name, parameter in job.model().named_parameters() if parameter.requires_grad]
    assert any("pooler.dense" in name for name in trained)
