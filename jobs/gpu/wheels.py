"""Create, or install, a folder of wheels for a machine that has torch and no network.

    python -m jobs.gpu.wheels make FOLDER [--python 3.12] [--without numpy ...]
    python jobs/gpu/wheels.py install FOLDER TARGET

Run the first on a connected machine in the project's environment: ``make gpu-wheels``. The folder then contains pip and
what the launcher needs besides torch, in the versions of constraints.txt. The second is part of ``make gpu``. It
installs into a directory for PYTHONPATH: torch, and numpy if present, remain those of the machine's Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# oldest last: pip uses the first that a package provides
PLATFORMS = tuple(f"manylinux{suffix}_x86_64" for suffix in ("_2_28", "_2_27", "_2_17", "2014", "_2_12", "_2_5", "1"))
MAX_BYTES = 63 * 2**20
SOURCE_ONLY = ("antlr4-python3-runtime",)  # published without a wheel, so one is built here


def needed(python: str) -> list[str]:
    """Return the pinned requirements, NAME==VERSION, of the launcher and of precision=float8, without torch."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = {canonicalize_name(name): exact for name, _, exact in (line.partition("==") for line in lines if line)}
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [*project["dependencies"], *project["optional-dependencies"]["float8"]]
    versions: dict[str, str] = {"pip": version("pip")}
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if not applies or name == "torch" or name in versions:
            continue
        versions[name] = pinned[name]
        waiting += requires(name) or []
    # checkpoints need numpy, and torch does not depend on it
    versions.setdefault("numpy", pinned[canonicalize_name("numpy")])
    return sorted(f"{name}=={exact}" for name, exact in versions.items())


def make(folder: Path, python: str, without: list[str]) -> None:
    """Fill ``folder`` with wheels. ``without``: packages already installed on the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    abi = f"cp{python.replace('.', '')}"
    where = ["--python-version", python, "--implementation", "cp", "--abi", abi, "--abi", "abi3", "--abi", "none"]
    where += [word for platform in PLATFORMS for word in ("--platform", platform)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wanted = [requirement for requirement in needed(python) if requirement.partition("==")[0] not in without]
    source = [requirement for requirement in wanted if requirement.startswith(SOURCE_ONLY)]
    binary = [requirement for requirement in wanted if requirement not in source]
    subprocess.run(
        [*pip, "download", "-q", "--no-deps", "--only-binary=:all:", *where, "-d", folder, *binary], check=True
    )
    if source:
        subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", folder, *source], check=True)
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels for Python {python}, {size / 2**20:.1f} MiB, in {folder}")
    if size > MAX_BYTES:
        sys.exit(f"that is more than {MAX_BYTES / 2**20:.0f} MiB")


def install(folder: Path, target: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        sys.exit(
            f"{folder} has no wheels.\n  Make it on a machine with a network: make gpu-wheels; or set GPU_WHEELS=."
        )
    try:
        torch = version("torch")
    except PackageNotFoundError:
        sys.exit(f"{sys.executable} has no torch.\n  Set PYTHON= to the one that has it.")
    names = [wheel.name.split("-")[0] for wheel in wheels]
    names = [name for name in names if name != "pip" and not (name == "numpy" and _is_installed(name))]
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], check=False, capture_output=True).returncode:
        (carried,) = folder.glob("pip-*.whl")
        pip = [sys.executable, f"{carried}/pip"]
    options = ["--no-index", "--no-deps", "--disable-pip-version-check", "--upgrade", "--find-links", folder]
    subprocess.run([*pip, "install", "-q", *options, "--target", target, *names], check=True)
    _describe_this_tree(target)
    print(f"torch {torch}; {len(names)} packages in {target}", flush=True)


def _describe_this_tree(target: Path) -> None:
    """Create package metadata for the launcher, which runs from this tree and looks up its own version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = target / f"{project['name']}-{project['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making = verbs.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("--python", default="3.12")
    making.add_argument("--without", nargs="*", default=[])
    installing = verbs.add_parser("install")
    installing.add_argument("folder", type=Path)
    installing.add_argument("target", type=Path)
    chosen = parser.parse_args(arguments)
    if chosen.verb == "make":
        make(chosen.folder, chosen.python, chosen.without)
    else:
        install(chosen.folder, chosen.target)


if __name__ == "__main__":
    main(sys.argv[1:])
