"""Code blocks of README and docs: configurations compose, Python uses names that exist, what is a whole program runs.

A block without a language is output, and so is a paragraph of an indented block that does not start with a program.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import launcher
from launcher.cli import flags
from launcher.cli.keys import launch_keys
from launcher.config.hydra import compose
from launcher.config.schema import check_values
from tests.helpers import ROOT, launch, patience, torchrun
from tests.test_docs import PAGES

FLAGS = flags()
# these show configurations of a person's own project, or notes from a release to the next
OTHERS = ("CHANGELOG.md",)
OVERRIDES = ("train", "plan", "verify", "drill", "run", "doctor", "resume")
VALUES = ("--config-dir", "--config-name", "--html", "--windows", "--dir", "--rank", "--node", "--cfg")
ELSEWHERE = ("git", "cd", "eval", "scontrol", "accelerate", "export", ".", "pre-commit", "docker")
LANGUAGES = ("sh", "python", "yaml", "text", "")
STARTS = (["launch", "train"], ["launch", "run"])


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hooks = load_hooks()
BLOCKS = [
    pytest.param(page, block, id=f"{page.relative_to(ROOT)}:{page.read_text()[: block.start].count(chr(10)) + 1}")
    for page in PAGES
    if page.name not in OTHERS
    for block in hooks.blocks(page.read_text(encoding="utf-8"))
]


def of_language(language: str) -> list[Any]:
    return [param for param in BLOCKS if param.values[1].language == language]


def test_indented_blocks_are_divided_into_commands_and_output() -> None:
    indented = "Text.\n\n    launch plan\n\n    Plan: a\n\n    more\n\nText.\n\n"
    text = f"{indented}```python\nlaunch = 1\n\n    x\n```\n\n    A=1 make x\n"
    found = [(block.language, block.text.strip()) for block in hooks.blocks(text)]
    assert found == [
        ("sh", "launch plan"), ("text", "Plan: a\n\nmore"), ("python", "launch = 1\n\n    x"), ("sh", "A=1 make x"),
    ]  # fmt: skip


def test_languages_are_known() -> None:
    assert {param.id for param in BLOCKS if param.values[1].language not in LANGUAGES} == set()


# Python

API = (ROOT / "docs" / "reference" / "python-api.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "block"), of_language("python"))
def test_python_uses_names_that_exist(page: Path, block: Any) -> None:
    tree = ast.parse(textwrap.dedent(block.text), str(page))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "launcher":
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "launcher":
                assert hasattr(launcher, node.attr), node.attr
            if node.value.id == "engine":
                assert re.search(rf"`{node.attr}[`(]", API), f"engine.{node.attr} is not in python-api.md"


# YAML


@pytest.mark.parametrize(("page", "block"), of_language("yaml"))
def test_configurations_compose(page: Path, block: Any, tmp_path: Path) -> None:
    content = yaml.safe_load(block.text)
    if "# @package _global_" not in block.text:  # of another program
        assert content, page
        return
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(block.text)
    check_values(compose([f"hydra.searchpath=[file://{tmp_path}]", "+experiment=mine"]))


# commands


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command, without comments, redirections and what an ellipsis stands for."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += f"{line}\n"
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        try:
            words = [word for word in lexer if word != "..."]
        except ValueError:  # a quote that a later line closes
            continue
        pending = ""
        command: list[str] = []
        for before, word in itertools.pairwise(["", *words, ";"]):
            if set(word) <= set("|&;"):
                if command:
                    yield command
                command = []
            elif not set(word) <= set("<>") and not (before and set(before) <= set("<>")):
                command.append(word)
    assert pending == "", "a quote is open"


@pytest.mark.parametrize(("page", "block"), of_language("sh"))
def test_commands_are_possible(page: Path, block: Any, tmp_path: Path) -> None:
    write_programs(page, tmp_path)
    for words in commands(block.text):
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        program, arguments = words[0], words[1:]
        if program == "launch":
            require_launch(arguments, tmp_path)
        elif program == "make":
            targets = [word for word in arguments if "=" not in word]
            makefile = (ROOT / "Makefile").read_text()
            assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []
        elif program == "pip":
            require_pip(arguments)
        elif program in ("python", "torchrun"):
            require_script(program, arguments, page)
        elif program.startswith("--"):  # `launch report RUN --csv | --json`: one or the other
            assert program in itertools.chain(*FLAGS.values())
        else:
            assert program in ELSEWHERE, f"{program}: not a program that the docs know"


def require_launch(arguments: list[str], shown: Path) -> None:
    """Fail if a verb, a flag or a key does not exist, or a value is not allowed. ``shown``: files of the page."""
    verb, arguments = arguments[0], arguments[1:]
    assert verb in FLAGS
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    flags = [word.partition("=")[0] for word in arguments if word.startswith("-")]
    assert [flag for flag in flags if flag not in FLAGS[verb] and flag != "-m"] == []
    if verb == "keys":
        assert launch_keys([word for word in arguments if word not in ("GROUP",) and "my_tasks" not in word]) == 0
    if verb not in OVERRIDES:
        return
    own: list[str] = []
    if "--config-dir" in arguments:
        place = arguments[arguments.index("--config-dir") + 1]
        folder = ROOT / place if (ROOT / place).exists() else shown / place
        own = [f"hydra.searchpath=[file://{folder}]"]
    if "--config-name" in arguments:
        assert (ROOT / place / f"{arguments[arguments.index('--config-name') + 1]}.yaml").exists()
        return
    before = ["", *arguments]
    words = [word for at, word in enumerate(arguments) if not word.startswith("-") and before[at] not in VALUES]
    if verb == "resume":
        words = words[1:]
    assert [word for word in words if "=" not in word] == []
    choices = [*map(values_of, (word for word in words if not word.startswith("hydra")))]
    for number in range(max(map(len, choices), default=1)):
        check_values(compose([*own, *(values[min(number, len(values) - 1)] for values in choices if values)]))


def values_of(word: str) -> list[str]:
    """Return an override with each of the values that -m would try; none of an interval."""
    override = OverridesParser.create().parse_override(word)
    if not override.is_sweep_override():
        return [word.replace("=all", "=auto") if word in ("strategy=all", "strategy.sync=all") else word]
    if not override.is_discrete_sweep():
        return []
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def require_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"(?:launcher|\.)\[([\w,]+)\]", " ".join(arguments)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    if "-c" in arguments:
        assert (ROOT / arguments[arguments.index("-c") + 1]).exists()


def require_script(program: str, arguments: list[str], page: Path) -> None:
    """Fail if a script or module is neither here nor a file of the same page."""
    if program == "python" and arguments[0] == "-c":
        compile(arguments[1], str(page), "exec")
    elif program == "python" and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None
    else:
        script = next(word for word in arguments if word.endswith(".py"))
        assert (ROOT / script).exists() or f'title="{script}"' in page.read_text(encoding="utf-8")


# whole programs


def write_programs(page: Path, place: Path) -> None:
    """Write the files that a page shows, those with a title."""
    for block in hooks.blocks(page.read_text(encoding="utf-8")):
        if block.title:
            (place / block.title).parent.mkdir(parents=True, exist_ok=True)
            (place / block.title).write_text(block.text)


def run_commands(page: Path, place: Path, chosen: Callable[[list[str]], bool]) -> None:
    """Run commands of a page in a directory with its files. ``chosen``: decides by the words of a command."""
    write_programs(page, place)
    texts = [block.text for block in hooks.blocks(page.read_text(encoding="utf-8")) if block.language == "sh"]
    found = [words for text in texts for words in commands(text) if chosen(words)]
    assert found
    for words in found:
        if words[0] == "launch":
            done = launch(*words[1:], cwd=place)
        else:
            program = sys.executable if words[0] == "python" else str(Path(sys.executable).with_name(words[0]))
            done = subprocess.run(
                [program, *words[1:]], cwd=place, capture_output=True, text=True, check=False, timeout=patience(240)
            )
        assert done.returncode == 0, done.stdout + done.stderr


GUIDES = [
    ROOT / "docs" / "guides" / f"from-{name}.md" for name in ("torchrun", "accelerate", "lightning", "hydra-submitit")
]


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_programs_of_a_guide_run(page: Path, tmp_path: Path) -> None:
    run_commands(page, tmp_path, lambda words: words[:2] in STARTS and "cluster=slurm" not in words)


@pytest.mark.slow
def test_ddp_and_fsdp_by_hand_accumulate_the_same_gradient(tmp_path: Path) -> None:
    write_programs(ROOT / "docs" / "guides" / "accumulation.md", tmp_path)
    ddp, fsdp = (torchrun(tmp_path / f"accumulate_{name}.py", [], 2, tmp_path).splitlines() for name in ("ddp", "fsdp"))
    assert len(ddp) == 5
    assert ddp == fsdp


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("page", "library"), [(GUIDES[1], "accelerate"), (GUIDES[2], "lightning")])
def test_the_programs_of_the_other_library_run(page: Path, library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    run_commands(page, tmp_path, lambda words: words[-1] == "before.py")
