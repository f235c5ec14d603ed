"""Examples from files, for the tasks with Hugging Face models: read, split and tokenised once, and cached.

The module does not import torch, transformers or datasets at module level.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.errors import TaskError, did_you_mean
from launcher.quantities import first_names

# suffix of a file -> builder of the datasets package
_BUILDERS = {
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".txt": "text",
    ".md": "text",
    ".py": "text",
}
Encode = Callable[[dict[str, Any]], list[dict[str, Any]]]  # example -> rows

# changed whenever the tokenised rows change, so that no cache of an older version is used
_FORMAT = 3
# column of an example's number in its file, from 0
NUMBER = "example_number"
# seed of the split into training and held-out examples; not the job's, so that all runs have the same split
_SPLIT_SEED = 0


def read_examples(key: str, path: str) -> Any:
    """Return the examples of a data set of the datasets package (``save_to_disk``), of a file, or of all files of one
    kind in a directory and below it, with their numbers in the column NUMBER.

    A text file is one example with a column ``text``.

    Args:
        key: config key that names ``path``, for messages.

    Raises:
        TaskError: there is no such file, its kind is not known, or it cannot be read.
    """
    import numpy

    data = _read(key, path)
    return data.add_column(NUMBER, numpy.arange(len(data)))


def _read(key: str, path: str) -> Any:
    import datasets

    source = Path(path)
    if not source.exists():
        raise TaskError(f"{key}={path}: no such file or directory.")
    try:
        if (source / "dataset_info.json").exists() or (source / "dataset_dict.json").exists():
            data = datasets.load_from_disk(path)
            if isinstance(data, datasets.DatasetDict):
                raise TaskError(
                    f"{key}={path}: it holds several splits ({', '.join(map(str, data))}).\n"
                    f"  Name the directory of one, such as {key}={source / str(next(iter(data)))}."
                )
            return data
        files = [source] if source.is_file() else sorted(each for each in source.rglob("*") if each.suffix in _BUILDERS)
        kinds = {_BUILDERS.get(each.suffix, "") for each in files}
        if len(kinds) != 1 or "" in kinds:
            names = first_names(sorted({each.suffix for each in files})) or "none"
            raise TaskError(
                f"{key}={path}: one kind of file is read at a time, and this has {names}.\n"
                f"  Known: {', '.join(_BUILDERS)}, and directories that save_to_disk wrote."
            )
        (kind,) = kinds
        # a directory of texts may have empty ones, which are examples that cannot be used
        empty = [each for each in files if not each.stat().st_size]
        if empty and (kind != "text" or len(empty) == len(files)):
            raise TaskError(f"{key}={path}: {empty[0]} is empty (0 bytes).\n  Write it again, or leave it out.")
        options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
        return datasets.load_dataset(kind, data_files=list(map(str, files)), split="train", **options)
    except TaskError:
        raise
    except Exception as error:  # of pyarrow, pandas and datasets, which have no common type
        raise TaskError(
            f"{key}={path}: it cannot be read: {error.__cause__ or error or type(error).__name__}"
        ) from None


def split_examples(data: Any, held_out: float) -> tuple[Any, Any]:
    """Return (training, held-out) examples: a random split that is the same for every run.

    Raises:
        TaskError: one of the two would be empty.
    """
    if not held_out:
        return data, None
    count = max(1, round(len(data) * held_out))
    if count >= len(data):
        raise TaskError(
            f"task.held_out={held_out}: {len(data)} examples cannot be divided.\n"
            "  Use task.eval_data=PATH for held-out data, or task.held_out=0 for none."
        )
    parts = data.train_test_split(test_size=count, seed=_SPLIT_SEED)
    return parts["train"], parts["test"]


def require_columns(key: str, path: str, data: Any, names: list[str]) -> None:
    """Raise TaskError if ``data`` lacks one of the columns ``names``, which the config key ``key`` names."""
    columns = [name for name in data.column_names if name != NUMBER]
    for name in names:
        if name not in columns:
            raise TaskError(
                f"{key}={name}: {path} has no such column.\n"
                f"  {did_you_mean(name, columns)}Its columns: {first_names(columns)}."
            )


def tokenized(data: Any, path: str, tokenizer: Any, settings: dict[str, Any], encode: Encode) -> Any:
    """Return the rows that ``encode`` makes of each example of ``data``.

    The result is in the cache of the datasets package, under a hash of the data (of files: their names and times of
    change), the tokenizer and ``settings``.
    Processes of one host that need it at the same time wait for the first one.

    Args:
        settings: everything else that ``encode`` depends on. With ``unusable="error"``, the first example that
            ``encode`` refuses by UnusableExample is an error; otherwise such examples are left out.

    Raises:
        TaskError: ``encode`` refused an example, whose number is in the message; or no example is left.
    """
    from datasets import config
    from filelock import FileLock

    text = json.dumps([_FORMAT, data._fingerprint, _identity(tokenizer), settings], sort_keys=True)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    cache = Path(config.HF_DATASETS_CACHE) / "launcher" / f"{fingerprint}.arrow"
    cache.parent.mkdir(parents=True, exist_ok=True)

    def encode_rows(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        rows: list[dict[str, Any]] = []
        for position, number in enumerate(columns[NUMBER]):
            try:
                example = {name: values[position] for name, values in columns.items()}
                rows += [row | {"example": number} for row in encode(example)]
            except TaskError as error:
                raise TaskError(f"{path}: example {number} (counted from 0): {error}") from None
            except UnusableExample as error:
                if settings["unusable"] == "error":
                    raise TaskError(
                        f"{path}: example {number} (counted from 0) {error}.\n"
                        "  task.unusable=skip leaves out such examples, and says how many."
                    ) from None
        return {name: [row[name] for row in rows] for name in rows[0]} if rows else {"example": []}

    with FileLock(f"{cache}.lock"):
        result = data.map(
            encode_rows,
            batched=True,
            remove_columns=data.column_names,
            cache_file_name=str(cache),
            new_fingerprint=fingerprint,
            desc=f"tokenise {path}",
        )
    if not len(result):
        raise TaskError(f"{path}: none of its {len(data)} examples can be used.")
    return result


class UnusableExample(Exception):
    """An example that is empty, or longer than the model's sequences. The message completes "example N ..."."""


def _identity(tokenizer: Any) -> list[Any]:
    """Return what a tokenizer's result depends on, as values for JSON."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        words: Any = sorted(tokenizer.get_vocab().items())
    else:  # its own truncation and padding are those of the last call
        words = json.loads(backend.to_str()) | {"truncation": None, "padding": None}
    settings = [getattr(tokenizer, name, None) for name in ("truncation_side", "split_special_tokens", "chat_template")]
    options = {name: str(value) for name, value in tokenizer.init_kwargs.items()}
    version = importlib.metadata.version("transformers")
    return [type(tokenizer).__name__, version, words, settings, options, str(tokenizer.special_tokens_map)]
