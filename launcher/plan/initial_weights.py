"""Weights that a run starts with (``checkpoint.init_from``): found and identified when the job is planned. No torch."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from launcher.errors import ConfigError, did_you_mean
from launcher.quantities import count, first_names
from launcher.rundir.paths import MANIFEST, RunPaths, find, is_run, is_sweep

KEY = "checkpoint.init_from"
# names of Hugging Face's format: weights in one file, or the index of several
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
_ALLOWED = (
    "Name a run, a checkpoint of one (.../checkpoints/step_000100), a safetensors file, or a directory with "
    f"{ONE_FILE} or {INDEX}."
)
# all bytes of files up to this size in total identify the content of safetensors files; of larger ones, their headers
# and this many blocks of this size from each file, evenly spaced
_WHOLE_BYTES, _BLOCKS, _BLOCK_BYTES = 10**9, 1024, 1 << 16
_HEADER_LIMIT = 100_000_000  # bytes, that of the safetensors library


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """Weights that a run starts with.

    Attributes:
        path: absolute; directory of a checkpoint, a safetensors file, or a directory of such files.
        run, step: of a checkpoint in a run's directory; None for any other.
        digest: identifies the content: of a checkpoint's manifest, which has a checksum of each file; of sizes,
            headers and contents of safetensors files, of which large ones are sampled.
    """

    path: str
    run: str | None
    step: int | None
    digest: str

    @property
    def text(self) -> str:
        """Description in one line."""
        if self.run is None:
            return self.path
        return f"run {self.run}, step {self.step} ({self.path})"

    def require_unchanged(self) -> None:
        """Check that the weights are those for which the run was planned.

        Raises:
            ConfigError: they are gone, or have changed.
        """
        path = Path(self.path)
        if not path.exists():
            raise ConfigError(
                KEY, self.path, "does not exist on this host (any more).",
                "Restore it, or start a new run with other weights.",
            )  # fmt: skip
        if weights_at(path, self.path).digest != self.digest:
            raise ConfigError(
                KEY, self.path, "has changed since the run was planned.",
                "Restore it, or start a new run with the present weights: launch train.",
            )  # fmt: skip


def find_weights(word: str, runs: Path, cwd: Path) -> InitialWeights:
    """Return the weights that ``checkpoint.init_from=word`` names.

    Args:
        word: name, directory or prefix of a run (SWEEP/RUN for a run of a sweep), or a path.
        runs: directory of the runs.
        cwd: directory to which other relative paths belong.

    Raises:
        ConfigError: there are none, or they are damaged.
    """
    if not word.strip():
        raise ConfigError(KEY, '""', "is empty.", _ALLOWED)
    places = [place for place in (runs / word, cwd / Path(word).expanduser()) if place.exists()]
    for place in places:
        if is_run(place):
            return _newest_of(RunPaths(place.resolve()), word)
        if _holds_weights(place):
            return weights_at(place.resolve(), word)
    if places:
        raise ConfigError(KEY, word, f"{_described(places[0])}.", _ALLOWED)
    sweep, _, cell = word.rpartition("/")
    parent = runs / sweep if sweep and is_sweep(runs / sweep) else runs
    return _newest_of(_run_starting_with(cell if parent != runs else word, parent, word), word)


def weights_at(path: Path, word: str) -> InitialWeights:
    """Return the weights at ``path``.

    Args:
        path: a checkpoint, a safetensors file, or a directory with safetensors files.
        word: what the user typed, for messages.

    Raises:
        ConfigError: a file is missing, damaged or not readable.
    """
    try:
        if (path / MANIFEST).exists():
            return _checkpoint_at(path, word)
        digest = hashlib.blake2b(digest_size=16)
        files = safetensors_files(path, word)
        is_small = sum(file.stat().st_size for file in files) <= _WHOLE_BYTES
        for file in files:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            digest.update(_read_header(file, word))
            _add_content(file, digest, whole=is_small)
    except OSError as error:
        raise ConfigError(KEY, word, f"cannot be read: {error}.") from None
    return InitialWeights(path=str(path), run=None, step=None, digest=digest.hexdigest())


def safetensors_files(path: Path, word: str) -> list[Path]:
    """Return the files of the weights at ``path``: itself, or those in a directory.

    Raises:
        ConfigError: the index is damaged, or a file that it lists is missing.
    """
    if path.is_file():
        return [path]
    if not (path / INDEX).exists():
        return [path / ONE_FILE]
    try:
        names = sorted({*cast("dict[str, str]", json.loads((path / INDEX).read_bytes())["weight_map"]).values()})
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _damaged(path / INDEX, word, error) from None
    outside = [name for name in names if Path(name).name != name]
    missing = [name for name in names if not (path / name).is_file()]
    if outside or missing or not names:
        problem = f"lists {first_names(outside or missing)}, which {'are' if len(outside or missing) > 1 else 'is'} "
        problem += "not in that directory" if names else "no file"
        raise ConfigError(KEY, word, f"{path / INDEX} {problem}.", "Copy the whole directory.")
    return [path / name for name in names]


def _damaged(file: Path, word: str, error: Exception) -> ConfigError:
    return ConfigError(KEY, word, f"{file} is damaged: {type(error).__name__}: {error}.")


def _holds_weights(place: Path) -> bool:
    if place.is_file():
        return place.suffix == SUFFIX
    return any((place / name).is_file() for name in (MANIFEST, INDEX, ONE_FILE))


def _described(place: Path) -> str:
    """Return what is at a place without weights."""
    if place.is_file():
        return f"{place} is not a {SUFFIX} file"
    if is_sweep(place):
        return f"is a sweep; write {place.name}/ and the name of one of its runs"
    if (place / "adapter_model.safetensors").exists():
        return f"{place} has the weights of an adapter only"
    if any(place.glob("*.bin")):
        return f"{place} has its weights in *.bin files, which can execute code when they are read"
    return f"{place} has no weights"


def _run_starting_with(start: str, parent: Path, word: str) -> RunPaths:
    runs = {paths.root.name: paths for paths in find(parent)}
    matches = [name for name in runs if start and name.startswith(start)]
    if len(matches) == 1:
        return RunPaths(runs[matches[0]].root.resolve())
    if matches:
        raise ConfigError(KEY, word, f"{len(matches)} runs match: {first_names(sorted(matches), 8)}.", "Write more.")
    raise ConfigError(
        KEY, word, f"there is no such file or directory, and no such run in {parent}.",
        f"{did_you_mean(start, runs)}{_ALLOWED}",
    )  # fmt: skip


def _newest_of(paths: RunPaths, word: str) -> InitialWeights:
    checkpoints = paths.committed_checkpoints()
    if not checkpoints:
        raise ConfigError(KEY, word, f"run {paths.root.name} has no checkpoint yet.", "Wait for its first one.")
    return weights_at(checkpoints[0], word)


def _checkpoint_at(path: Path, word: str) -> InitialWeights:
    """Return the weights in a checkpoint, after a check that its files have the sizes of the manifest."""
    text = (path / MANIFEST).read_bytes()
    try:
        files = cast("dict[str, dict[str, int]]", json.loads(text)["files"])
        sizes = {name: file["bytes"] for name, file in files.items()}
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _damaged(path / MANIFEST, word, error) from None
    found = {name: (path / name).stat().st_size for name in sizes if (path / name).is_file()}
    wrong = [name for name, size in sizes.items() if found.get(name) != size]
    if wrong:
        raise ConfigError(
            KEY, word, f"{path} is damaged: {count(len(wrong), 'file')} missing or of another size: "
            f"{first_names(wrong)}.", f"Use another checkpoint: {_others(path)}.",
        )  # fmt: skip
    within_run = path.parent.name == "checkpoints" and is_run(path.parent.parent)
    digits = path.name.removeprefix("step_")
    return InitialWeights(
        path=str(path),
        run=path.parent.parent.name if within_run else None,
        step=int(digits) if digits.isdecimal() else None,
        digest=hashlib.blake2b(text, digest_size=16).hexdigest(),
    )


def _others(path: Path) -> str:
    names = [each.name for each in RunPaths(path.parent.parent).committed_checkpoints() if each != path]
    return first_names(names) or "there is no other"


def _read_header(file: Path, word: str) -> bytes:
    """Return the header of a safetensors file, after a check that the file has all of its data."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= min(size, _HEADER_LIMIT) else b""
    try:
        entries = cast("dict[str, dict[str, Any]]", json.loads(header))
        ends = [int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, LookupError, AttributeError, TypeError):
        raise ConfigError(KEY, word, f"{file} is not a safetensors file, or is damaged.") from None
    if size != (full := 8 + length + max(ends, default=0)):
        raise ConfigError(
            KEY, word, f"{file} has {size:,} bytes instead of the {full:,} of its header.",
            "It was copied in part: copy it again.",
        )  # fmt: skip
    return header


def _add_content(file: Path, digest: hashlib.blake2b, *, whole: bool) -> None:
    """Add the content of ``file`` to ``digest``: all of it, or evenly spaced blocks. Weights that were trained further
    differ everywhere, and reading all of a large file would delay every submission."""
    size = file.stat().st_size
    step = _BLOCK_BYTES if whole else max(_BLOCK_BYTES, size // _BLOCKS)
    with file.open("rb") as stream:
        for start in range(0, size, step):
            digest.update(os.pread(stream.fileno(), _BLOCK_BYTES, start))
