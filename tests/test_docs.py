"""README and docs: links lead somewhere, generated pages are up to date, nothing is written twice."""

from __future__ import annotations

import ast
import html
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import launcher
from launcher.cli import flags
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


def test_files_of_the_reading_order_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Reading order")[2].partition("\n## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(files) > 20
    assert [file for file in files if not (ROOT / "launcher" / file).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


def test_no_sentence_is_written_twice() -> None:
    sentences: Counter[str] = Counter()
    for page in PAGES:
        for block in re.split(r"\n\s*\n|^[-|] ?|\|", prose(page), flags=re.MULTILINE):
            text = re.sub(r"\s+", " ", block)
            sentences.update(part.strip() for part in re.split(r"(?<=[.:;]) ", text) if len(part) > 60)
    assert [sentence for sentence, times in sentences.items() if times > 1] == []


GENERATORS = ("configuration.py", "assets/make_timelines.py", "outputs.py")


@pytest.mark.parametrize("script", GENERATORS)
def test_what_is_generated_is_up_to_date(script: str) -> None:
    done = subprocess.run([sys.executable, str(DOCS / script), "--check"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `make docs-reference`"


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


def test_the_command_line_page_has_every_flag() -> None:
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in text.splitlines() if line.startswith("| `-"))
    assert {flag for several in flags().values() for flag in several if not re.search(rf"`{flag}\b", table)} == set()


# messages


def templates() -> dict[Path, list[str]]:
    """Return all texts in the source, by file, with a mark in place of what varies."""
    texts: dict[Path, list[str]] = {}
    for path in (ROOT / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                words = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in parts]
                texts.setdefault(path, []).append(re.sub(r"\s+", " ", "".join(words)))
    return texts


def messages() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^### (.*)$", text, re.MULTILINE)


def test_messages_of_the_troubleshooting_page_exist() -> None:
    """Each part of a message between two ellipses is in a text of one and the same module."""
    texts = templates()
    unknown: list[str] = []
    for heading in messages():
        parts = [part.strip(" :.()'=") for part in heading.strip("`").split("...")]
        parts = [part for part in parts if len(part) > 3]
        assert max(map(len, parts)) > 7, f"{heading}: nothing to recognise it by"
        if not any(all(any(part in text for text in found) for part in parts) for found in texts.values()):
            unknown.append(heading)
    assert unknown == []


def test_labels_of_measured_outputs_exist() -> None:
    """The names of lines of a plan and a summary on the page are still printed."""
    printed = {
        text
        for path, found in templates().items()
        if path.parent.name in ("report", "cli", "trackers")
        for text in found
    }
    shown = re.findall(r"<!-- output: launch train .*?-->\n\n```text\n([\s\S]*?)^```$", all_docs(), re.MULTILINE)
    labels = {label for text in shown for label in re.findall(r"^(\S.*?)(?:  +|: )", text, re.MULTILINE)}
    assert {"Plan", "loss", "speed-up"} <= labels
    assert {label for label in labels if not any(text.startswith(label) for text in printed)} == set()


def all_docs() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


# the site

BUILD = (sys.executable, "-m", "mkdocs", "build")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; the build fails on a broken link, a missing anchor, or a page that is not in its navigation."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run([*BUILD, "--site-dir", str(place)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return place


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    """With --quiet, mkdocs would not count warnings as errors."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "README.md").write_text("# Title\n\n[a](nowhere.md) [b](#nothing)\n")
    (tmp_path / "docs" / "unlisted.md").write_text("# Unlisted\n")
    own = "docs_dir: docs\nsite_dir: site\nhooks: []\nplugins: [search]\nextra_css: []\nnav: [README.md]\n"
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT}/mkdocs.yml\n{own}")
    done = subprocess.run(BUILD, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    for place in ("'nowhere.md'", "'#nothing'", "unlisted.md"):
        assert place in done.stderr
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\ndocs:")[2].partition("\n\n")[0]
    assert "mkdocs build\n" in recipe


def test_the_site_has_every_page(site: Path) -> None:
    names = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md") if page.name != "README.md"}
    assert {name for name in names if not (site / name).exists()} == set()
    assert "engine.finish_step(result)" in text_of(site / "repository" / "jobs" / "own_loop.py.html")
    assert not list(site.rglob("*.py"))


def text_of(page: Path) -> str:
    return re.sub(r"<[^>]*>", "", page.read_text(encoding="utf-8"))


def test_the_site_needs_no_network(site: Path) -> None:
    """Scripts, styles, fonts and pictures are its own, and the search index is a script, as file:// needs."""
    loads = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*href=\"?https?://")
    foreign = re.compile(r"url\(\s*[\"']?https?://|@import")
    for page in site.rglob("*.html"):
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page
    for style in site.rglob("*.css"):
        assert not foreign.search(style.read_text(encoding="utf-8")), style
    assert (site / "search" / "search_index.js").exists()


@pytest.mark.parametrize(
    "message",
    [
        "train.hang_timeout=20: must be above cluster.grace_s=30, the seconds in which workers must stop.",
        "batch.global_size=96 batch.micro_size=5: 96 samples cannot be shared by 2 ranks in units of 5.",
        "task._target_=my_tasks.Mine: the class has no method loss.",
        "cluster.workers_per_node=4: this machine has 2 usable GPUs, and each worker needs one.",
    ],
)
def test_the_start_of_a_message_finds_its_entry(site: Path, message: str) -> None:
    """The words that the site's search makes of the message contain those of the entry's title, and of no other one."""
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = [each["title"] for each in index["docs"] if each["location"].startswith("troubleshooting.html#")]

    def words(text: str) -> set[str]:
        return {word for word in re.split(index["config"]["separator"], html.unescape(text)) if word.strip(".")}

    found = [title for title in titles if words(re.sub("<[^>]*>", "", title)) <= words(message)]
    assert len(found) == 1, (titles, found)


def test_the_page_for_unknown_addresses_works_at_any_depth(site: Path) -> None:
    links = re.findall(r'(?:href|src)="([^"]*)"', (site / "404.html").read_text(encoding="utf-8"))
    assert len(links) > 50
    assert [link for link in links if not link.startswith("/")] == []


def test_the_site_shows_signatures_and_formulas(site: Path) -> None:
    signatures = text_of(site / "reference" / "python-signatures.html")
    assert ":::" not in signatures
    assert "finish_step(" in signatures
    readme = (site / "repository" / "index.html").read_text(encoding="utf-8")
    assert "<math" in readme
    assert "\\frac" not in readme
