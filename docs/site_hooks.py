"""Hooks of mkdocs for `make docs`: pages for files outside docs/, highlighted commands, formulas without JavaScript.

Links in docs/ are relative to the repository, as git hosts follow them. A file outside docs/ that a page links to
becomes a page in the folder ``repository`` of the site.
"""

from __future__ import annotations

import html
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# a paragraph of an indented block that starts with one of them is commands; any other one is output
PROGRAMS = ("launch", "make", "python", "pip", "docker", "git", "torchrun", "accelerate", "eval", "scontrol")
_DOCS, _OUTSIDE = "docs/", "repository/"
_LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)((?:#[^)\s]*)?)\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml"}
_COMMAND = re.compile(rf"(?:[A-Z_]+=\S* )*(?:{'|'.join(PROGRAMS)})(?= )|[A-Z_]+=\S* ")
_BLOCK = re.compile(
    r"^(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<fenced>[\s\S]*?)^(?P=fence)$"
    r"|(?<=\n\n)(?P<indented>(?:    .*\n|\n(?=    ))+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """Code block of a page.

    Attributes:
        language: as written behind the fence; sh or text of indented blocks.
        title: file that a fenced block is the content of, from ``title="NAME"``.
        start, end: place in the page.
    """

    language: str
    title: str
    text: str
    start: int
    end: int


def blocks(markdown: str) -> Iterator[Block]:
    """Yield the code blocks of a page. An indented block is divided where commands and output meet."""
    for found in _BLOCK.finditer(markdown):
        if found["indented"] is None:
            language, _, rest = found["info"].partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            yield Block(language, title[1] if title else "", found["fenced"], *found.span())
            continue
        start = found.start()
        pending: Block | None = None
        for paragraph in re.split(r"(?<=\n)(?=\n)", found["indented"]):
            text = "".join(f"{line[4:]}\n" for line in paragraph.splitlines())
            first = next((line for line in text.splitlines() if line and not line.startswith("#")), "")
            language = "sh" if _COMMAND.match(first) else "text"
            if pending is not None and pending.language != language:
                yield pending
                pending = None
            before = pending or Block(language, "", "", start, start)
            start += len(paragraph)
            pending = Block(language, "", before.text + text, before.start, start)
        if pending is not None:
            yield pending


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of files outside docs/, with those that they link to."""
    from mkdocs.structure.files import File

    waiting = [_DOCS + page.src_uri for page in files.documentation_pages()]
    found: set[str] = set()
    while waiting:
        page = waiting.pop()
        for link in _LINK.finditer(_content(page)):
            target = _target(page, link[1])
            if not target.startswith(_DOCS) and target not in found and (ROOT / target).is_file():
                found.add(target)
                waiting.append(target)
    for path in sorted(found):
        files.append(File.generated(config, _uri(path), content=_content(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site, and put fences around indented blocks, so that commands are highlighted."""
    uri = page.file.src_uri
    source = _path(uri)

    def in_site(link: re.Match[str]) -> str:
        target = _target(source, link[1])
        if not (ROOT / target).is_file():
            return link[0]  # mkdocs reports it
        return f"]({posixpath.relpath(_uri(target), posixpath.dirname(uri))}{link[2]})"

    for block in reversed(list(blocks(markdown))):
        if not markdown.startswith("```", block.start):
            code = block.text.strip("\n")
            markdown = f"{markdown[: block.start]}```{block.language}\n{code}\n```\n\n{markdown[block.end :]}"
    return _LINK.sub(in_site, markdown)


def on_page_content(content: str, **_: Any) -> str:
    r"""Replace \[...\] and \(...\), which would need JavaScript, by MathML."""
    from latex2mathml.converter import convert

    def formula(found: re.Match[str]) -> str:
        return convert(html.unescape(found[2]), display="block" if found[1] == "[" else "inline")

    return re.sub(r"\\([\[(])([\s\S]+?)\\[\])](?=</(?:div|span)>)", formula, content)


def _content(path: str) -> str:
    """Return a file as Markdown."""
    file = ROOT / path
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"# {path}\n\n``````{_LANGUAGES.get(file.suffix, 'text')}\n{text}``````\n"


def _target(source: str, link: str) -> str:
    """Return the path of a link in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def _uri(path: str) -> str:
    """Return the source of a file's page, as mkdocs names it, from its path in the repository."""
    if path.startswith(_DOCS):
        return path.removeprefix(_DOCS)
    return _OUTSIDE + (path if path.endswith(".md") else f"{path}.md")


def _path(uri: str) -> str:
    """Return the path in the repository of the file from which a page is made."""
    if not uri.startswith(_OUTSIDE):
        return _DOCS + uri
    path = uri.removeprefix(_OUTSIDE)
    return path if (ROOT / path).exists() else path.removesuffix(".md")
