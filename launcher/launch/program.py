"""Program of `launch run`: a script, a module after -m, or an installed command that is written in Python."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from launcher.errors import UserError

_FORMS = "Use: launch run [key=value ...] -- SCRIPT | -m MODULE | COMMAND [arguments ...]."
# commands and modules that start workers themselves
_STARTERS = {
    "torchrun", "deepspeed", "accelerate launch", "accelerate-launch", "launch", "srun", "mpirun", "mpiexec",
}  # fmt: skip
_STARTER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed"}
_SUFFIXES = (".py", ".pyw", ".pyc", ".pyz")


def program_file(name: str) -> Path | None:
    """Return the file of a script, or of a command beside this Python or on PATH; None if there is neither."""
    if Path(name).is_file():
        return Path(name)
    found = None if "/" in name else shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return Path(found) if found else None


def no_program(arguments: Sequence[str]) -> UserError:
    """Return the error about ``arguments`` of `launch run`, which have no --."""
    words = (word for word in arguments if word == "-m" or word.endswith(_SUFFIXES) or program_file(word))
    first = next((word for word in words if "=" not in word), None)
    before = f"Put `--` before {first}. " if first else ""
    return UserError(f"launch run: no script.\n  {before}{_FORMS}")


def require_program(arguments: Sequence[str], cwd: str, *, contained: bool) -> str:
    """Check what follows the -- of `launch run`, and return a stem for the run's name.

    Args:
        contained: whether the job runs in a container, whose modules and commands are not known here.

    Raises:
        UserError: there is no such program, it is not written in Python, or it starts workers itself.
    """
    if not arguments:
        raise UserError(f"launch run: no script.\n  {_FORMS}")
    first, *others = arguments
    if first == "-m" and not others:
        raise UserError(f"launch run: -m: no module.\n  {_FORMS}")
    name = " ".join(others[:1]) if first == "-m" else Path(first).name
    if {name, f"{name} {' '.join(others[:1])}"} & (_STARTER_MODULES if first == "-m" else _STARTERS):
        raise UserError(
            f"launch run: {name}: starts processes itself, as `launch run` does on every node.\n"
            "  Name the program that it starts: launch run cluster.workers_per_node=2 -- train.py."
        )
    if first == "-m":
        if not contained and not _has_module(name, cwd):
            raise UserError(f"launch run: -m {name}: this Python has no such module to run.\n  {_FORMS}")
        return name.removesuffix(".__main__").rpartition(".")[2]
    file = Path(first) if Path(first).is_file() else None if contained else program_file(first)
    if file is None and not (contained and "/" not in first and not first.startswith("-")):
        raise UserError(f"launch run: {first}: there is no such script or command.\n  {_FORMS}")
    if file is None:
        return name
    if not _is_python(file):
        instead = " ".join(others) if name.startswith("python") and others else "train.py"
        raise UserError(
            f"launch run: {first}: is not written in Python, and each worker is a Python process.\n"
            f"  Name a program in Python: launch run -- {instead}."
        )
    if (is_command(file) or not Path(first).is_file()) and (other := _other_python(file)):
        raise UserError(
            f"launch run: {file}: belongs to {other}, and the workers run {sys.executable}.\n"
            "  Install launcher beside it, and use the `launch` of that Python."
        )
    return file.stem


def is_command(file: Path) -> bool:
    """Return whether the file is an installed command: there is a Python beside it."""
    return file.with_name("python").is_file()


def _has_module(name: str, cwd: str) -> bool:
    """Return whether `python -m NAME` would find its file. Imports nothing."""
    spec: ModuleSpec | None = None
    parts = [*name.split("."), "__main__"]
    for number, part in enumerate(parts):
        inside = [cwd] if spec is None else spec.submodule_search_locations
        if inside is None:
            return number == len(parts) - 1  # a module that is no package
        # its last name only: a namespace package would look for its parent among the imported ones
        found = PathFinder.find_spec(part, list(inside)) if part else None
        if number == 0 and part and (found is None or found.origin is None):
            with suppress(ValueError):  # __main__
                found = importlib.util.find_spec(part) or found
        if found is None:
            return False
        spec = found
    return True


def _head(file: Path) -> str:
    """Return the first two lines.

    A script whose interpreter has a long path starts with `#!/bin/sh` and `'''exec' PYTHON ...`.
    """
    with file.open("rb") as opened:
        return b"".join(opened.readline(1000) for _ in range(2)).decode(errors="replace")


def _is_python(file: Path) -> bool:
    shebang, _, second = _head(file).partition("\n")
    if file.suffix in _SUFFIXES or not shebang.startswith("#!"):
        return file.suffix in _SUFFIXES or _parses(file)
    return bool(re.search("python|pypy", second if second.startswith("'''exec'") else shebang))


def _parses(file: Path) -> bool:
    try:
        compile(file.read_bytes(), file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _other_python(file: Path) -> str | None:
    """Return the interpreter of an installed command if it is another Python; else None."""
    named = re.search(r"/[^\s\"']*/python[\d.]*(?=[\s\"'])", _head(file))
    if named is None or metadata.entry_points(group="console_scripts", name=file.name):
        return None
    same = Path(named[0]).parent.resolve() == Path(sys.executable).parent.resolve()
    return None if same else named[0]
