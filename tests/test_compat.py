"""Names that jobs queued by the previous release use."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import compat
from launcher.launch.slurm import node


def test_a_pickle_of_the_previous_release_names_the_same_function() -> None:
    assert pickle.loads(b"clauncher.cluster.slurm.node\nrun_node\n.") is node.run_node


@pytest.mark.parametrize(("old", "new"), [(old, new) for old, new in compat.MOVED.items() if new is not None])
def test_an_old_name_is_the_module_of_the_new_one(old: str, new: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(new)
    assert importlib.import_module(new).__name__ == new


def test_an_old_name_runs_as_a_program(tmp_path: Path) -> None:
    """plan.json of `launch run` has this command."""
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv, __name__)")
    command = [sys.executable, "-P", "-m", "launcher.cluster.script", str(script), "--x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"{[str(script), '--x']} __main__"


def test_there_is_no_other_old_name() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("launcher.cluster.ledger")
