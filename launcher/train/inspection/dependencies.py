"""Dependencies of an inspection of a task: modules, files, directories and environment variables that it has read."""

from __future__ import annotations

import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

# the import system lists directories; what was imported is known from sys.modules
_IMPORT_SYSTEM = "<frozen importlib._bootstrap"
_NO_FILES = ("/proc/", "/sys/", "/dev/")
_MOST_PATHS = 5000  # to compare more would take too long


class Dependencies:
    """Log of this process's reads from now on. It cannot be stopped: a process inspects one task and ends.

    Installed packages and the standard library count by the names in their directories, which contain the versions.
    Files that only native code opens are seen if they are still mapped into memory.
    """

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._variables: set[str] = set()
        self._network = False
        paths = sysconfig.get_paths()
        self._packages = {paths["purelib"], paths["platlib"], *site.getsitepackages(), site.getusersitepackages()}
        own = (*self._packages, paths["stdlib"], paths["platstdlib"], str(Path(__file__).parents[2]))
        self._installed = tuple(f"{Path(directory)}{os.sep}" for directory in own)
        sys.addaudithook(self._audit)
        self._record_variables()

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            writes = isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY
            if not writes and not (isinstance(mode, str) and mode[:1] in "wax"):
                self._add(path)
        elif event in ("os.listdir", "os.scandir"):
            if not sys._getframe(1).f_code.co_filename.startswith(_IMPORT_SYSTEM):
                self._add("." if arguments[0] is None else arguments[0])
        elif event == "socket.connect":
            self._network |= isinstance(arguments[1], tuple)

    def _add(self, path: Any) -> None:
        if isinstance(path, str | bytes):
            self._paths.add(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100  (before the directory changes)

    def _record_variables(self) -> None:
        """Record each variable that is looked up by its name."""
        kind: Any = type(os.environ)
        look_up = kind.__getitem__

        def recorded(environ: Any, name: Any) -> Any:
            if isinstance(name, str):
                self._variables.add(name)
            return look_up(environ, name)

        kind.__getitem__ = recorded

    def found(self) -> dict[str, list[str]] | None:
        """Return the paths and the names of the variables, for ``ContentCache.put``; None if something was read from a
        network, or very many files."""
        if self._network:
            return None
        files = {str(file) for module in [*sys.modules.values()] if (file := getattr(module, "__file__", None))}
        paths = self._paths | {os.path.abspath(file) for file in files} | self._mapped()  # noqa: PTH100
        paths = {path for path in paths if not path.startswith((*self._installed, *_NO_FILES))}
        paths = {path for path in paths if "__pycache__" not in path}
        if len(paths) > _MOST_PATHS:
            return None
        return {"paths": sorted(paths | self._packages), "variables": sorted(self._variables)}

    def _mapped(self) -> set[str]:
        """Return the files of data that are mapped into memory."""
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        named = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
        system = ("/usr/", f"{sys.base_prefix}/")
        named = {path for path in named if path.startswith("/") and not path.startswith(system)}
        return {path for path in named if not re.search(r"\.so(\.|$)| \(deleted\)$", path)}
