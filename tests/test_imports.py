"""Order of imports, what the command line must not import, and who reads torchrun's variables."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import launcher

PACKAGE = Path(launcher.__file__).parent
HEAVY = {"torch", "wandb", "submitit", "sklearn", "numpy"}

# Each line may import the lines above it and itself, but not its neighbours on the line. Lazy imports and those for
# types count too. The finer lines are of launcher/train.
LAYERS = (
    ("launcher",),  # names, versions: public names are imported on first use
    ("errors",),
    ("quantities",),
    ("tracebacks",),
    ("process",),
    ("heartbeat",),
    ("targets",),
    ("loss",),
    ("task",),
    ("config",),
    ("rundir",),
    ("plan",),
    ("record",),
    ("trackers",),
    (
        "launch", "train.world", "train.context", "train.precision", "train.optimizers", "train.schedules",
        "train.eval_metrics", "train.measure", "train.data", "train.parallel", "train.callback_set",
        "train.sites", "train.engine",
        "train.metrics", "train.checkpoint", "train.evaluation", "train.training_loop", "train.trainer",
        "train.inspection", "train.worker", "train.run_engine", "train.opened_run",
    ),
    ("tasks",),
    ("runs",),
    ("sweeps",),
    ("report",),
    ("api",),
    ("cli",),
    # above all of the core, and without knowledge of each other
    tuple(f"extensions.{place.name}" for place in sorted((PACKAGE / "extensions").iterdir()) if place.is_dir()),
    ("__main__",),
)  # fmt: skip
TRAIN = (
    ("train.world", "train.context"),
    ("train.precision", "train.optimizers", "train.eval_metrics"),
    ("train.schedules",),
    ("train.measure", "train.data"),
    ("train.parallel",),
    ("train.callback_set",),
    ("train.sites",),
    ("train.checkpoint.file_format",),
    ("train.checkpoint.weights",),
    ("train.checkpoint.initial",),
    ("train.engine",),
    ("train.metrics",),
    ("train.checkpoint",),
    ("train.evaluation",),
    ("train.training_loop",),
    ("train.trainer", "train.run_engine", "train.opened_run"),
    ("train.inspection", "train.worker"),
)
# (importing module, imported module): what breaks the order. Keep it empty. The root's own __init__, which names the
# public API and imports each name when it is first used, is in no layer.
EXCEPTIONS = set[tuple[str, str]]()


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a file's syntax tree, its own first."""
    return [*ast.walk(ast.parse(path.read_text()))]


def imports(path: Path) -> Iterator[str]:
    """Modules that ``path`` imports anywhere, those of the launcher as exactly as they are named."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in MODULES else node.module


def own_imports(module: str) -> set[str]:
    return {name for name in imports(MODULES[module]) if name in MODULES}


def place_of(module: str, layers: tuple[tuple[str, ...], ...]) -> tuple[int, str]:
    """The line of ``module``, and under which name it is there."""
    inside = module.removeprefix("launcher.")
    for number, layer in enumerate(layers):
        for name in layer:
            if inside == name or inside.startswith(f"{name}."):
                return number, name
    raise AssertionError(f"{module} has no place in the order of imports: add it to LAYERS")


def has_code(module: str) -> bool:
    """False for a package whose __init__ holds a docstring and nothing else."""
    path = MODULES[module]
    return path.stem != "__init__" or len(ast.parse(path.read_text()).body) > 1


CODE = [module for module in MODULES if has_code(module) and module != "launcher"]


def test_imports_point_downwards() -> None:
    pairs = [(module, other) for module in CODE for other in own_imports(module) if has_code(other)]
    for module, other in pairs:
        number, name = place_of(module, LAYERS)
        its_number, its_name = place_of(other, LAYERS)
        train = name.startswith("train.") and its_name.startswith("train.")
        allowed = its_number < number or its_name == name or train or (module, other) in EXCEPTIONS
        assert allowed, f"{module} imports {other}"
        if train:
            mine, theirs = place_of(module, TRAIN), place_of(other, TRAIN)
            assert theirs[0] < mine[0] or theirs == mine, f"{module} imports {other}"


def test_tests_of_the_core_import_no_extension() -> None:
    """An extension goes with the folder of its tests. Jobs as their users start them are run as installed."""
    tests, beside = Path(__file__).parent, {"extensions", "system", "gpu", "equivalence"}
    files = [file for file in tests.rglob("*.py") if file.relative_to(tests).parts[0] not in beside]
    wrong = [(str(file), name) for file in files for name in imports(file) if name.startswith("launcher.extensions")]
    assert wrong == []


def test_there_is_no_cycle() -> None:
    """Lazily or for types neither."""
    imported = {module: own_imports(module) for module in CODE}
    state: dict[str, int] = defaultdict(int)

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert state[module] != 1, " -> ".join((*way[way.index(module) :], module))
        if state[module] == 0:
            state[module] = 1
            for other in sorted(imported.get(module, ())):
                visit(other, (*way, module))
            state[module] = 2

    for module in CODE:
        visit(module, ())


def test_the_core_names_no_extension() -> None:
    """Not in a string either, which could be imported: entry points name them."""
    for module in CODE:
        if not module.startswith("launcher.extensions"):
            words = {str(node.value) for node in nodes(MODULES[module]) if isinstance(node, ast.Constant)}
            assert not [word for word in words if re.search(r"launcher[./]extensions[./]\w", word)], module
            assert not [word for word in words if re.search(r"cluster=hosts|^hosts$", word)], module


def test_no_two_modules_share_a_name() -> None:
    names: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        if path.stem not in ("__init__", "__main__"):
            names[path.stem].append(module)
    assert {name: modules for name, modules in names.items() if len(modules) > 1} == {}


def test_no_two_modules_define_the_same_public_name() -> None:
    """But ``main``, which each program has."""
    definition = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, definition) and not node.name.startswith("_") and node.name != "main":
                names[node.name].append(module)
    assert {name: modules for name, modules in names.items() if len(modules) > 1} == {}


def test_no_module_is_too_long() -> None:
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    assert {module: count for module, count in lines.items() if count > 700} == {}


def test_nothing_imports_jobs_or_tests() -> None:
    for path in MODULES.values():
        assert not [name for name in imports(path) if name.split(".")[0] in ("jobs", "tests")]


def test_what_jobs_import_exists() -> None:
    """Benchmarks and checks on GPUs import most of it in functions, which few tests call."""
    missing: list[str] = []
    for path in (PACKAGE.parent / "jobs").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("launcher", "jobs"):
                module = importlib.import_module(str(node.module))
                for name in (each.name for each in node.names):
                    if not hasattr(module, name) and find_spec(f"{node.module}.{name}") is None:
                        missing.append(f"{path.name}: {node.module}.{name}")
    assert missing == []


def test_only_world_reads_torchruns_variables() -> None:
    """In the workers; the agent sets them, a drill finds a rank by its process's environment, and a command that
    torchrun has started refuses to run."""
    readers = ("train.world", "launch.agent", "process", "extensions.drill.processes")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
    for module, path in MODULES.items():
        if module.removeprefix("launcher.") in readers:
            continue
        strings = {node.value for node in nodes(path) if isinstance(node, ast.Constant)}
        assert not strings & names, path


@pytest.mark.parametrize(
    "code",
    [
        "import launcher",
        "import launcher.api, launcher.launch.local, launcher.launch.agent, launcher.report.live",
        "import launcher; launcher.Loss, launcher.Config, launcher.compose",
        "from launcher.cli import run; assert run(['--help']) == 0",
        "import launcher.extensions.doctor.doctor_command, launcher.extensions.doctor.examination",
        "from launcher.cli import run; assert run(['runs', '--dir', '.']) == 0",
        "import launcher.extensions.drill.drill_command, launcher.extensions.drill.backends",
        "import launcher.extensions.verify.verify_command",
        "import launcher.cli.runs, launcher.extensions.page.report_command",
        "from launcher.cli import run; assert run(['plan']) == 0",
        "from launcher.cli import run; assert run(['plan', '--json']) == 0",
        "from launcher.cli import run; assert run(['plan', 'batch.globl_size=3']) == 2",
    ],
)
def test_the_control_side_imports_nothing_heavy(code: str, tmp_path: Path) -> None:
    check = f"{code}\nimport sys\nprint('HEAVY', sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_only_the_report_needs_what_the_report_is_made_of(tmp_path: Path) -> None:
    """Not even its modules, until there is something to report: `launch runs` answers without them."""
    modules = "{'plotly', 'orjson', 'jinja2'}"
    code = "from launcher.cli import run; import sys; run(['--help']); run(['runs'])"
    check = f"{code}; assert not {modules} & set(sys.modules), 'imported too early'"
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, check=True)


def test_a_look_at_a_task_needs_no_compiler(tmp_path: Path) -> None:
    """Every `launch train` and `launch plan` waits for it, and torch's compiler takes as long to import as torch."""
    look = "probe(InspectionRequest.of(compose(['strategy=fsdp']), '.'))"
    modules = "from launcher.config.hydra import compose; from launcher.plan.task_inspection import InspectionRequest"
    code = f"import sys; {modules}; from launcher.train.inspection.task_probe import probe; print({look})"
    check = f"{code}; print(sorted({{'torch._dynamo', 'torch.distributed.tensor'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_public_names_exist() -> None:
    for name in launcher.__all__:
        assert getattr(launcher, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        launcher.Engin  # noqa: B018  # pyright: ignore


def test_the_engine_shares_no_private_attribute() -> None:
    """Neither with a class that inherits from it, such as RunEngine, nor with the loop, the trainer or an extension."""
    own = ast.parse(MODULES["launcher.train.engine.engine"].read_text())
    private = {
        node.attr for node in ast.walk(own) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"
    }
    private = {name for name in private if name.startswith("_")}
    for module in {*CODE} - {"launcher.train.engine.engine"}:
        for part in ast.parse(MODULES[module].read_text()).body:
            bases = {ast.unparse(base) for base in part.bases} if isinstance(part, ast.ClassDef) else set[str]()
            others = {"self", "cls"} - ({"self"} if "Engine" in bases else set())
            for node in ast.walk(part):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in others:
                    assert node.attr not in private, f"{module}:{node.lineno}: {ast.unparse(node)}"
