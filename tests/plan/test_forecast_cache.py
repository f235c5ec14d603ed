"""A value comes back exactly as long as everything that it depends on is unchanged."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.plan import forecast_cache
from launcher.plan.forecast_cache import READ_BYTES, ContentCache
from tests.helpers import ROOT

KEY = {"task": {"width": 3, "names": ["a", None]}, "seed": 0}
VALUE = {"peak": 12, "share": 0.25, "notes": ["é"]}


@pytest.fixture
def cache(tmp_path: Path) -> ContentCache:
    return ContentCache(tmp_path / "cache")


def test_a_value_comes_back_for_an_equal_key_only(cache: ContentCache) -> None:
    assert cache.get(KEY) is None
    cache.put(KEY, VALUE, [])
    assert cache.get(dict(reversed([*KEY.items()]))) == VALUE
    assert cache.get({**KEY, "seed": 1}) is None
    cache.put(KEY, 7, [])
    assert cache.get(KEY) == 7


def write_large(path: Path) -> None:
    path.write_bytes(b"x" * (READ_BYTES + 1))


# what is there before, and each thing that happens to it
CHANGES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "edited, as long as before": (lambda p: p.write_text("a = 1"), lambda p: p.write_text("a = 2")),
    "removed": (lambda p: p.write_text("a"), lambda p: p.unlink()),
    "appeared": (lambda _: None, lambda p: p.write_text("a")),
    "a large file was edited": (write_large, lambda p: p.write_bytes(p.read_bytes()[:-1] + b"y")),
    "a large file was replaced": (write_large, lambda p: (write_large(new := p.with_suffix(".new")), new.replace(p))),
    "became a directory": (lambda p: p.write_text("a"), lambda p: (p.unlink(), p.mkdir())),
    "a name appeared": (lambda p: p.mkdir(), lambda p: (p / "new").touch()),
    "a name was removed": (lambda p: ((p / "old").mkdir(parents=True)), lambda p: (p / "old").rmdir()),
    "a directory appeared": (lambda _: None, lambda p: p.mkdir()),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_an_entry_is_stale_once_what_it_depends_on_has_changed(
    change: str, cache: ContentCache, tmp_path: Path
) -> None:
    before, after = CHANGES[change]
    path, other = tmp_path / "it", tmp_path / "other"
    other.write_text("unchanged")
    before(path)
    cache.put(KEY, VALUE, [other, path])
    assert cache.get(KEY) == VALUE
    time.sleep(0.02)  # a file's times have the kernel's clock ticks
    after(path)
    assert cache.get(KEY) is None
    cache.put(KEY, VALUE, [other, path])
    assert cache.get(KEY) == VALUE


def test_a_small_file_that_was_only_touched_is_the_same(cache: ContentCache, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("a = 1")
    cache.put(KEY, VALUE, [path])
    path.touch()
    assert cache.get(KEY) == VALUE


def test_what_was_edited_while_the_value_was_computed_is_not_stored(cache: ContentCache, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("a = 1")
    os.utime(path, (1000, 1000))
    (tmp_path / "directory").mkdir()
    cache.put(KEY, VALUE, [path, tmp_path / "absent", tmp_path / "directory"], since=1001)
    assert cache.get(KEY) == VALUE
    os.utime(path, (1002, 1002))
    cache.put({"other": 1}, VALUE, [path], since=1001)
    assert cache.get({"other": 1}) is None


def test_a_variable_that_a_value_depends_on(cache: ContentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "1")
    monkeypatch.delenv("ABSENT", raising=False)
    cache.put(KEY, VALUE, [], variables=["MINE", "ABSENT"])
    assert cache.get(KEY) == VALUE
    with monkeypatch.context() as patch:
        patch.setenv("ABSENT", "")
        assert cache.get(KEY) is None
    assert cache.get(KEY) == VALUE
    monkeypatch.setenv("MINE", "2")
    assert cache.get(KEY) is None


def test_an_entry_of_another_version_is_a_miss(cache: ContentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.put(KEY, VALUE, [])
    monkeypatch.setattr(forecast_cache, "versions", lambda: "another")
    assert cache.get(KEY) is None
    cache.put(KEY, VALUE, [])
    assert cache.get(KEY) == VALUE


def test_a_damaged_entry_is_a_miss(cache: ContentCache, tmp_path: Path) -> None:
    cache.put(KEY, VALUE, [tmp_path])
    (entry,) = (tmp_path / "cache").iterdir()
    good, choose = entry.read_bytes(), random.Random(0)
    for _ in range(200):
        place = choose.randrange(len(good))
        cut = good[:place], good[:place] + bytes([good[place] ^ choose.randrange(1, 256)]) + good[place + 1 :]
        entry.write_bytes(choose.choice(cut))
        assert cache.get(KEY) is None
    for other in (b"", b"null", b"[]", b"\xff\xfe", good + b" "):
        entry.write_bytes(other)
        assert cache.get(KEY) is None
    entry.unlink()
    entry.mkdir()
    assert cache.get(KEY) is None
    cache.put(KEY, VALUE, [])


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = ContentCache(tmp_path / "file" / "cache")
    cache.put(KEY, VALUE, [])
    assert cache.get(KEY) is None


def test_the_oldest_entries_are_removed(cache: ContentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast_cache, "MOST_ENTRIES", 3)
    for number in range(3):
        cache.put({"number": number}, number, [])
        for entry in (tmp_path / "cache").iterdir():  # each a minute later than the one before
            os.utime(entry, (entry.stat().st_atime, entry.stat().st_mtime - 60))
    assert cache.get({"number": 0}) == 0  # used again
    cache.put({"number": 3}, 3, [])
    assert [cache.get({"number": number}) for number in range(4)] == [0, None, 2, 3]


def test_writers_at_the_same_time(cache: ContentCache) -> None:
    seen: list[object] = []

    def work(number: int) -> None:
        for _ in range(20):
            cache.put(KEY, [number] * 1000, [])
            seen.append(cache.get(KEY))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 80
    assert all(value in [[number] * 1000 for number in range(4)] for value in seen)


def test_where_the_entries_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for base, place in (("", ".cache"), ("relative", ".cache"), (str(tmp_path / "xdg"), "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        ContentCache().put(KEY, VALUE, [])
        assert [*(tmp_path / place / "launcher").glob("*.json")], base
    assert not (tmp_path / "relative").exists()


def test_the_versions_name_the_sources(tmp_path: Path) -> None:
    """A copy of the package that is edited is another version."""
    script = "from launcher.plan.forecast_cache import versions; print(versions())"

    def found(root: Path) -> str:
        command = [sys.executable, "-P", "-c", script]
        return subprocess.run(
            command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True
        ).stdout

    copy = tmp_path / "launcher"
    shutil.copytree(ROOT / "launcher", copy, ignore=shutil.ignore_patterns("__pycache__"))
    first = found(tmp_path)
    assert found(tmp_path) == first
    (copy / "errors.py").write_text((copy / "errors.py").read_text() + "\n# edited\n")
    assert found(tmp_path) != first


def test_an_unstorable_value_is_a_mistake(cache: ContentCache) -> None:
    with pytest.raises(TypeError):
        cache.put(KEY, time, [])
