"""Programs of `launch run`: what is started, and what is refused before anything starts."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.launch.program import program_file, require_program


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package, commands = tmp_path / "pkg" / "sub", tmp_path / "bin"
    package.mkdir(parents=True)
    commands.mkdir()
    for name in ("__init__.py", "sub/__init__.py", "sub/train.py", "__main__.py"):
        (tmp_path / "pkg" / name).write_text("raise SystemExit('imported')")
    (tmp_path / "bare" / "deep").mkdir(parents=True)
    (tmp_path / "bare" / "deep" / "loop.py").touch()
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    (tmp_path / "train.sh").write_text('#!/bin/bash\npython train.py "$@"\n')
    (tmp_path / "job").write_text("export X=1\ntorchrun x.py\n")
    (tmp_path / "own").write_text("import sys\n")
    for name in ("launch.py", "__main__.py"):
        (tmp_path / name).touch()
    (tmp_path / "env").mkdir()
    for name in ("python", "trainer"):
        (tmp_path / "env" / name).write_text("#!/elsewhere/bin/python3.11\n")
    with zipfile.ZipFile(tmp_path / "own.pyz", "w") as archive:
        archive.writestr("__main__.py", "")
    here, elsewhere = sys.executable, "/elsewhere/bin/python3.11"
    for name, head in {
        "here": f"#!{here}\n", "long": f"#!/bin/sh\n'''exec' \"{here}\" \"$0\" \"$@\"\n' '''\n",
        "any": "#!/usr/bin/env python3\n", "other": f"#!{elsewhere}\n", "shell": "#!/bin/bash\n",
        "other-long": f"#!/bin/sh\n'''exec' \"{elsewhere}\" \"$0\" \"$@\"\n' '''\n",
        "pytest": f"#!{elsewhere}\n",
    }.items():  # fmt: skip
        (commands / name).write_text(head)
        (commands / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "stem"),
    [
        ("-m pkg.sub.train --x", "train"), ("-m pkg", "pkg"), ("-m pkg.__main__", "pkg"), ("-m json.tool", "tool"),
        ("-m bare.deep.loop", "loop"),
        ("own", "own"), ("own.pyz", "own"), ("pkg/sub/train.py -m x", "train"), ("here", "here"), ("long", "long"),
        ("-m launch", "launch"), ("-m __main__", "__main__"),
        ("any", "any"), ("pytest", "pytest"), ("accelerate env", "accelerate"),
    ],
)  # fmt: skip
def test_programs(place: Path, arguments: str, stem: str) -> None:
    assert require_program(arguments.split(), str(place), contained=False) == stem


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "no script"), ("-m", "-m: no module"), ("-m pkg.sub", "no such module to run"),
        ("-m pkg.nothing", "no such module"), ("-m nothing.at.all", "no such module"), ("-m .", "no such module"),
        ("nothing", "no such script or command"), ("./here", "no such script"), ("-c pass", "no such script"),
        ("job.sh", "not written in Python"), ("job", "not written in Python"), ("shell", "not written in Python"),
        ("train.sh", "not written in Python"),
        ("/bin/ls", "not written in Python"), ("other", "belongs to /elsewhere/bin/python3.11"),
        ("env/trainer", "belongs to /elsewhere/bin/python3.11"), ("-m deepspeed x.py", "deepspeed: starts processes"),
        ("other-long", "belongs to /elsewhere/bin/python3.11"), ("torchrun x.py", "torchrun: starts processes itself"),
        ("/usr/bin/srun x", "srun: starts processes"), ("-m torch.distributed.run x.py", "starts processes itself"),
        ("accelerate launch x.py", "starts processes itself"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_is_refused(place: Path, arguments: str, words: str) -> None:
    with pytest.raises(UserError, match=r"^launch run: ") as refused:
        require_program(arguments.split(), str(place), contained=False)
    assert words in str(refused.value)


def test_an_interpreter_is_left_out(place: Path) -> None:
    with pytest.raises(UserError, match=r"launch run -- -m pkg\.sub\.train --x"):
        require_program([sys.executable, "-m", "pkg.sub.train", "--x"], str(place), contained=False)


def test_the_modules_and_commands_of_a_container_are_not_known_here(place: Path) -> None:
    assert require_program(["-m", "torchtitan.train"], str(place), contained=True) == "train"
    assert require_program(["axolotl", "train"], str(place), contained=True) == "axolotl"
    assert require_program(["other", "train"], str(place), contained=True) == "other", "another command of this name"
    with pytest.raises(UserError, match="no such script"):
        require_program(["./nothing.py"], str(place), contained=True)


def test_a_command_beside_this_python_comes_first(place: Path) -> None:
    (place / "bin" / "launch").write_text("")
    (place / "bin" / "launch").chmod(0o755)
    assert program_file("launch") == Path(sys.executable).with_name("launch")
