"""Images of apptainer made of this machine's own files, and a stand-in for apptainer where it is not installed.

An image has an interpreter with the packages of the tests, and directories in which this machine's files are mounted.
The stand-in does what `apptainer exec` does to a task: mounts in a namespace of their own, a root that is the image's,
its environment, a process that stays outside and forwards signals. It refuses what apptainer refuses.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

RUNTIME = shutil.which("apptainer") or shutil.which("singularity")
PYTHON = "/opt/image/bin/python3"  # exists in images only
_DIRECTORIES = ("dev", "proc", "sys", "tmp", "var/tmp", "root", "etc", "usr", "opt/image/bin", ".singularity.d/env")
_ETC = ("group", "hosts", "ld.so.cache", "nsswitch.conf", "passwd", "resolv.conf")

STAND_IN = Path(__file__).with_name("apptainer_stand_in.py")


def mounts() -> str:
    """Return the value of ``container-mounts`` for what the image's interpreter needs of this machine."""
    places = dict.fromkeys(["/usr", sys.base_prefix, sys.prefix, str(ROOT)])
    return ",".join(f"{place}:{place}:ro" for place in places)


def make_image(file: Path) -> None:
    """Write an image, a .sif file."""
    root = file.with_suffix(".root")
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(Path("/", name).readlink())
    for name in _ETC:
        if Path("/etc", name).exists():
            shutil.copy(Path("/etc", name), root / "etc")
    prefix = root / "opt/image"
    (prefix / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", prefix)
    (prefix / "bin/python3").symlink_to(Path(sys.executable).resolve())
    (root / ".singularity.d/env/90-environment.sh").write_text(f"export PATH={Path(PYTHON).parent}:$PATH\n")
    build = ["tar", "--create", f"--file={file}", f"--directory={root}", "."]
    if RUNTIME is not None:
        build = [RUNTIME, "build", str(file), str(root)]
    subprocess.run(build, check=True, capture_output=True)
    shutil.rmtree(root)


def install(directory: Path) -> None:
    """Write the stand-in as ``apptainer`` into ``directory``, unless this machine has the real one."""
    if RUNTIME is None:
        program = directory / "apptainer"
        program.write_text(f"#!{sys.executable} -ISE\n{STAND_IN.read_text()}")
        program.chmod(0o755)
