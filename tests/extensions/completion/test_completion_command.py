"""`launch completion` in the real shells: what each offers for a line, and where it puts a space."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest

from launcher.cli import flags, run
from launcher.cli.overrides import _HYDRA_FLAGS, _OWN_FLAGS
from launcher.extensions.completion.completion_command import script
from tests.conftest import Launch
from tests.helpers import patience

# `make test` installs the others, if it can
SHELLS = ["bash", *filter(shutil.which, ("zsh", "fish"))]
# prints what the completion of a line offers, each in brackets, with the space that follows it
DRIVERS = {
    "bash": """
source "$1"
compopt() { [ "$2" = nospace ] && space=''; }
COMP_LINE=$2 COMP_POINT=${#2} space=' '
_launch
printf '[%s]\\n' "${COMPREPLY[@]/%/$space}"
""",
    "zsh": """
compdef() { : }
compadd() { local space=$2; shift 3; (( $# )) && print -rl -- "[${^@}$space]" }
_files() { : }
source "$1"
words=(${(z)2})
[[ $2 == *' ' ]] && words+=('')
CURRENT=$#words
_launch
""",
    "fish": """
source $argv[1]
for found in (complete -C $argv[2])
    string match -q '*=' -- $found; and echo "[$found]"; or echo "[$found ]"
end
""",
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        (place / shell).write_text(script(shell))
        (place / f"{shell}.driver").write_text(DRIVERS[shell])
    return place


def offered(shell: str, scripts: Path, cwd: Path, line: str) -> list[str]:
    """Return the candidates that begin with the last word of ``line``, as full words."""
    command = [shell, *(["-f"] if shell == "zsh" else []), str(scripts / f"{shell}.driver"), str(scripts / shell), line]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=patience(60))
    assert done.stderr == "", done.stderr
    words = [word.removeprefix("[").removesuffix("]") for word in done.stdout.splitlines()]
    last = line.rpartition(" ")[2]
    if shell == "bash" and "=" in last:  # bash replaces what follows the =
        before = last[: max(last.rfind("="), last.rfind(":")) + 1]
        words = [before + word for word in words]
    return sorted(word for word in words if word.startswith(last) and word.strip())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("bytes_gpt-1", "bytes_gpt-2", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "plan.json").write_text("{}")
    (tmp_path / "elsewhere" / "sweep-1").mkdir(parents=True)
    (tmp_path / "elsewhere" / "sweep-1" / "sweep.json").write_text("{}")
    (tmp_path / "runs" / "no_run").mkdir()
    return tmp_path


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("launch re", ["report ", "resume ", "retry "]),
        ("launch train --co", ["--config-dir ", "--config-name "]),
        ("launch train batch.acc", ["batch.accumulation="]),
        ("launch train strategy=", [f"strategy={name} " for name in ("auto", "ddp", "fsdp", "hsdp", "single")]),
        ("launch train strategy.sync=ga", ["strategy.sync=gather_once "]),
        ("launch train -m strategy=ddp,f", ["strategy=ddp,fsdp "]),
        ("launch plan task=llama task.kv", ["task.kv_heads="]),
        ("launch plan task=llama task.dt", ["task.dtype="]),
        ("launch plan task=llama task.dtype=b", ["task.dtype=bf16 "]),
        ("launch train task.kv", []),
        ("launch status by", ["bytes_gpt-1 ", "bytes_gpt-2 "]),
        ("launch status ", ["bytes_gpt-1 ", "bytes_gpt-2 ", "other "]),
        ("launch completion ", ["bash ", "fish ", "zsh "]),
        ("launch train task=hf_classifier task.unusable=c", ["task.unusable=cut "]),
        ("launch train task=llama task.unusable=c", []),
        ("launch keys task=lla", ["task=llama "]),
        ("launch resume other task.si", []),
        ("launch plan --config-name strat", []),
        ("launch logs other --fo", ["--follow "]),
        ("launch report bytes_gpt-1 ot", ["other "]),
        ("launch status --dir elsewhere sw", ["sweep-1 "]),
        ("launch resume other batch.mic", ["batch.micro_size=", "batch.micro_tokens="]),
        ("launch status no", []),
        ("launch completion z", ["zsh "]),
    ],
)
def test_what_a_shell_offers(shell: str, line: str, expected: list[str], scripts: Path, runs: Path) -> None:
    assert offered(shell, scripts, runs, line) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_files_where_nothing_else_fits(shell: str, scripts: Path, runs: Path) -> None:
    (runs / "trainer.py").write_text("")
    if shell == "zsh":  # the driver prints what _files would add
        (scripts / "zsh.driver").write_text(
            DRIVERS["zsh"].replace("_files() { : }", "_files() { print '[trainer.py ]' }")
        )
    if shell != "bash":  # complete -o default does it where there are no candidates
        assert offered(shell, scripts, runs, "launch run -- tr") == ["trainer.py "]
    else:
        assert offered(shell, scripts, runs, "launch run -- tr") == []


def test_bash_quotes_a_name_with_a_space(scripts: Path, runs: Path) -> None:
    (runs / "runs" / "my run").mkdir()
    (runs / "runs" / "my run" / "plan.json").write_text("{}")
    assert offered("bash", scripts, runs, "launch status my") == ["my\\ run "]


FLAGS = flags()


@pytest.mark.parametrize("verb", FLAGS)
def test_the_commands_have_these_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    takes_overrides = "--config-dir" in FLAGS[verb] and verb != "keys"  # which has a parser of its own
    with nullcontext() if takes_overrides else pytest.raises(SystemExit):
        run([verb, "--help"])
    described = {*re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out)} - {"--help"}
    if takes_overrides:
        assert {*FLAGS[verb]} <= {*_OWN_FLAGS, *_HYDRA_FLAGS, *described}
    else:
        assert described == {*FLAGS[verb]}


def test_the_script_is_printed_for_eval(launch: Launch) -> None:
    assert launch("completion", "bash").stdout == script("bash") + "\n"
    assert launch("completion", "tcsh").returncode == 2
