"""README and docs: links lead somewhere, generated pages are up to date, nothing is written twice."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import launcher
from tests.helpers import ROOT

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
CODE = re.compile(r"```[\s\S]*?```|^(?:    .*\n)+", re.MULTILINE)


def prose(page: Path) -> str:
    return CODE.sub("\n\n", page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_index_lists_every_page() -> None:
    listed = {(DOCS / link).resolve() for link in links(DOCS / "README.md")}
    assert {page for page in DOCS.rglob("*.md") if page != DOCS / "README.md"} <= listed


def test_pages_that_code_names_exist() -> None:
    files = [path for place in ("launcher", "jobs", "tests", "conf", "docker") for path in (ROOT / place).rglob("*")]
    texts = [path for path in files if path.suffix in (".py", ".yaml", ".sh", ".j2", ".md")]
    for path in (*texts, ROOT / "Makefile", ROOT / "pyproject.toml"):
        for name in re.findall(r"\bdocs/[\w/-]+\.(?:md|png|svg|py)\b", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path}: {name}"


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_no_sentence_is_written_twice() -> None:
    sentences: Counter[str] = Counter()
    for page in PAGES:
        for block in re.split(r"\n\s*\n|^[-|] ?|\|", prose(page), flags=re.MULTILINE):
            text = re.sub(r"\s+", " ", block)
            sentences.update(part.strip() for part in re.split(r"(?<=[.:;]) ", text) if len(part) > 60)
    assert [sentence for sentence, times in sentences.items() if times > 1] == []


def test_the_configuration_page_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, str(DOCS / "configuration.py"), "--check"], check=False)
    assert done.returncode == 0, "run `make docs-reference`"


def test_the_readme_lists_every_command() -> None:
    command = [sys.executable, "-m", "launcher", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    commands = set(re.findall(r"^  (launch [a-z]+)", text, re.MULTILINE))
    assert "launch train" in commands
    table = "\n".join(line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("| `launch"))
    assert {name for name in commands if f"`{name} " not in table and f"`{name}`" not in table} == set()


def test_the_api_page_lists_every_public_name() -> None:
    text = (DOCS / "reference" / "python-api.md").read_text(encoding="utf-8")
    assert {name for name in launcher.__all__ if not re.search(rf"`{name}[`(]", text)} == set()
