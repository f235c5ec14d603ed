"""A user's mistakes: one message, exit status 2, nothing started and nothing left behind."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from launcher import cli
from launcher.cli.overrides import with_config
from launcher.cli.train import best_trial
from launcher.errors import UserError
from tests.conftest import Launch
from tests.helpers import launch_command
from tests.infra.made_runs import make_run

PROJECT = Path(__file__).parents[1] / "user_project"
SMALL = ("task.width=16", "task.heads=1", "task.depth=1", "task.seq_len=16")


def files_in(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if "__pycache__" not in path.parts]


def refused(launch: Launch, tmp_path: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """The one message of a refused call."""
    before = files_in(tmp_path)
    done = launch(*arguments, env=env)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.count("launch: error: ") == 1
    assert files_in(tmp_path) == before, "nothing may be half-started"
    return done.stderr


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("batch.globl_size=3", ["batch.globl_size=3: there is no such key", "did you mean 'batch.global_size'?"]),
        ("foo=1", ["foo=1: there is no such key", "Groups: cluster, strategy"]),
        ("train.whatever=1", ["train.whatever=1: there is no such key", "Keys: train.steps"]),
        (
            "strategy=dpp",
            ["strategy=dpp: there is no such option", "did you mean 'ddp'?", "Allowed: auto, ddp, fsdp, hsdp, single"],
        ),
        ("cluser=local", ["cluser=local: there is no such key", "did you mean 'cluster'?"]),
        ("batch.micro_size=many", ["batch.micro_size=many: must be a whole number, or auto."]),
        ("train.steps=2.5", ["train.steps: must be a whole number"]),
        ("batch.ramp=16", ["batch.ramp: must be a list"]),
        ("callbacks=[mine.Watch]", ["callbacks: must be a list, one {...} for each", "[{_target_: my_module.MyCall"]),
        ("callbacks=mine.Watch", ["callbacks: must be a list, one {...} for each callback: [{_target_: my_module"]),
        ("optimizer.groups=[embed]", ["optimizer.groups: must be a list, one {...} for each group: [{match: "]),
        ("batch.ramp=[[10,many]]", ["batch.ramp: must be whole numbers, not 'many'"]),
        ("train.compile=perhaps", ["train.compile: must be true or false"]),
        ("batch.global_size=-64", ["batch.global_size=-64: must be at least 1"]),
        ("batch.global_size=100000000", ["samples, fewer than one window"]),
        (
            "task.widht=3",
            ["task.widht=3: launcher.tasks.bytes_gpt.BytesGPT has no such argument", "did you mean 'task.width'?"],
        ),
        ("task.width=33", ["task.width=33: must be a multiple of task.heads=2"]),
        ("task._target_=nosuch.Task", ["no module 'nosuch'", "Searched:"]),
        ("task._target_=spech.tasks.Tagger", ["no module 'spech'", "did you mean 'speech'?"]),
        ("task._target_=speech.task.Tagger", ["no module 'speech.task'", "did you mean 'speech.tasks'?"]),
        (
            "task._target_=launcher.task.digits.Digits",
            ["no module 'launcher.task.digits'", "mean 'launcher.tasks.digits'?"],
        ),
        ("task._target_=speech.Task", ["has no 'Task'", "did you mean 'tasks'?", "Its modules: broken, "]),
        ("task._target_=speech.tasks.Taggr", ["has no 'Taggr'", "did you mean 'Tagger'?"]),
        ("task._target_=speech.tasks.NoLoss", ["has no method loss"]),
        ("task._target_=Tagger", ["must be a dotted path"]),
        (
            "task._target_=speech.broken.Task",
            ["error: task._target_=speech.broken.Task: ZeroDivisionError", "broken.py"],
        ),
        ("task=llama task.dtype=fp8", ["task.dtype=fp8: launcher.extensions.hf.llama.Llama takes fp32 or bf16 here"]),
        ("precision=16", ["precision=16: there is no such option", "Allowed: auto, bf16, float8, fp16, fp32"]),
        ("task.width=[1", ["error: task.width=[1: cannot be read as an override: no viable alternative at input '[1'"]),
        ("train.steps=3 foo=bar=baz{", ["error: foo=bar=baz{: cannot be read as an override"]),
        ('task.width="x', ['error: task.width="x: cannot be read as an override: a quote is left open']),
        ("=3", ["error: =3: has no key"]),
        (
            "-m train.steps=1,2 batch.global_size=8}",
            ["batch.global_size=8}: cannot be read as an override: extraneous"],
        ),
        ("wandb=online", ["wandb: is a group of keys, not a key", "Write wandb.mode=online."]),
        ("train=5", ["train: is a group of keys, not a key", "Keys: train.steps"]),
        ("train.steps=5,6", ["train.steps=5,6: is several values", "add -m", "train.steps=[5,6]"]),
        ("precision=float16", ["precision=float16: there is no such option", "did you mean 'fp16'?"]),
        ("strategy.sync=often", ["strategy.sync: must be one of auto, every,", "not 'often'"]),
        ("wandb.tags={a:1}", ["wandb.tags: must be a list"]),
        ("batch.ramp=[5]", ["batch.ramp: must be a list of lists"]),
        ("~train.steps", ["~train.steps: a key cannot be removed", "train.steps=VALUE"]),
        ("~batch.ramp", ["~batch.ramp: a key cannot be removed"]),
        ("cluster.sbatch=5", ["cluster.sbatch: is a mapping", "cluster.sbatch.OPTION=VALUE"]),
        ("run.name=${nope}", ["run.name: refers to a key that does not exist: ${nope}"]),
        ("task=my.Task", ["task=my.Task: there is no such option", "task._target_=MODULE.CLASS"]),
        ("cluster.env.FOO=1", ["cluster.env.FOO=1: there is no such key", "whole environment of the job"]),
        ("hydra.foo=3", ["hydra.foo: there is no such key"]),
        ("--config-dir nowhere", ["--config-dir=nowhere: there is no such directory"]),
        ("--config-dir", ["--config-dir: has no value"]),
        ("--config-name nothing", ["--config-name=nothing: there is no such configuration file"]),
        ("--config-path nowhere", ["--config-path: there is no such directory"]),
        ("+experiment=mine", ["experiment=mine: there is no such key", "--config-dir DIR"]),
        ("+taks=bad --config-dir bad", ["taks=bad: there is no such key", "did you mean 'task'?"]),
        ("+=5", ["=5: there is no such key", "Groups: cluster, strategy"]),
        ("++train.foo=3", ["train.foo=3: there is no such key"]),
        ("--quite", ["--quite: there is no such flag", "did you mean '--quiet'?"]),
        ("train.steps", ["train.steps: is not an override", "key=value"]),
        ("task.width=${oc.env:NOPE}", ["NOPE"]),
        ("--config-dir bad task=bad", ["bad.yaml"]),
        ("wandb.mode=online", ["wandb.mode=online: there is no key for api.wandb.ai", "wandb.mode=offline"]),
        ("run.dir=/proc/nowhere", ["run.dir: /proc/nowhere", "cannot be made"]),
    ],
)
def test_one_clear_message(launch: Launch, tmp_path: Path, argument: str, words: list[str]) -> None:
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    (tmp_path / "speech" / "broken.py").write_text("ratio = 1 / 0\n")
    (tmp_path / "bad" / "task").mkdir(parents=True)
    (tmp_path / "bad" / "task" / "bad.yaml").write_text("a: [1\nb: {\n")
    text = refused(
        launch, tmp_path, "train", *argument.split(), env={"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    )
    for word in words:
        assert word in text
    assert "Traceback" not in text


def test_unwritable_directory(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be made" in refused(launch, tmp_path, "train", "run.dir=file/runs")


def test_a_taken_name_is_refused_before_the_task_is_inspected(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("raise SystemExit('a data set of an hour is read here')\n")
    make_run(tmp_path / "runs", "own")
    text = refused(launch, tmp_path, "train", "task._target_=slow.Task", "run.name=own")
    assert "run.name=own" in text
    assert "`launch resume own` continues that run." in text


def test_unknown_verb(launch: Launch, tmp_path: Path) -> None:
    assert "did you mean 'train'?" in refused(launch, tmp_path, "trian")


def test_script_that_is_not_there(launch: Launch, tmp_path: Path) -> None:
    assert "there is no such script" in refused(launch, tmp_path, "run", "--", "nothing.py")
    text = refused(launch, tmp_path, "run", "cluster.workers_per_node=1", "train.py", "--epochs=3")
    assert "no script.\n  Put `--` before train.py. Use: " in text
    address = refused(launch, tmp_path, "runs", "--dir", "s3://bucket/runs")
    assert "--dir: s3://bucket/runs: is an address" in address
    assert "is mounted.\n" in address
    text = refused(launch, tmp_path, "run", "nproc_per_node=2", "--", "nothing.py")
    assert "nproc_per_node=2: has no effect on a script.\n  Write cluster.workers_per_node=N" in text


def test_plan_as_json_is_the_plan(launch: Launch) -> None:
    done = launch("plan", "--json", "cluster.workers_per_node=4", "run.name=x")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["batch"] == {
        "global_size": 64, "micro_size": 4, "accumulation": 4, "world_size": 4, "ramp": [], "norm": "leave",
        "on_oom": "stop", "balance": "none", "sites": 1, "micro_tokens": None,
    }  # fmt: skip
    assert plan["run"]["name"] == "x"


def test_plan_of_a_strangers_task_writes_nothing(launch: Launch, tmp_path: Path) -> None:
    shutil.copytree(PROJECT / "speech", tmp_path / "speech")
    done = launch("plan", "--json", "task._target_=speech.tasks.Tagger", env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["task"]["samples"] == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speech"]


@pytest.mark.parametrize("option", ["train.epochs=1", "batch.short_window=drop"])
def test_options_that_need_the_datasets_length(launch: Launch, option: str) -> None:
    """Both were once refused: the plan was tried with a stream's length first."""
    done = launch("plan", "--json", option)
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout)["train"]["steps"]
    assert steps > 1000 if "epochs" in option else steps == 300


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = " ".join(map(shlex.quote, launch_command("plan", "--json")))
    done = subprocess.run(f"{command} | head -1", shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_plan_as_a_table(launch: Launch) -> None:
    done = launch("plan", *SMALL)
    words = ("1 host × 2 workers, cpu", "global batch", "windows", "short", "sync boundary", "with sync=every", "files")
    assert not [text for text in words if text not in done.stdout]


def test_hydras_own_flags(launch: Launch) -> None:
    assert "global_size: 128" in launch("train", "--cfg", "job", "batch.global_size=128").stdout
    shown = launch("train", "--help", "strategy=fsdp").stdout
    assert shown.startswith("launch train [key=value ...]")
    assert "  strategy   auto, ddp, fsdp, hsdp, single\n" in shown
    assert "  strategy:\n    kind: fsdp\n" in shown


def test_plans_of_one_batch_are_compared_and_the_impossible_one_is_named(launch: Launch, tmp_path: Path) -> None:
    done = launch("plan", "-m", "--json", "batch.micro_size=1,5,2", *SMALL)
    assert done.returncode == 0, done.stderr
    ranking = json.loads(done.stdout)
    assert {cell["cell"]: cell["accumulation"] for cell in ranking["cells"]} == {"micro_size=1": 32, "micro_size=2": 16}
    (impossible,) = ranking["impossible"]
    assert impossible["cells"] == ["micro_size=5"]
    assert "in units of 5" in impossible["reason"]
    assert "\n" not in impossible["reason"]
    assert "planned 3 of 3: micro_size=2" in done.stderr
    assert list(tmp_path.iterdir()) == [], "a plan writes nothing"


def test_all_stands_for_what_is_possible(launch: Launch) -> None:
    words = ("batch.global_size=12", "batch.micro_size=all", "cluster.workers_per_node=2,5")
    done = launch("plan", "-m", "strategy.sync=all", *words)
    assert done.returncode == 0, done.stderr
    cells = {
        " ".join(sorted(found)) for found in re.findall(r"(sync=\w+) workers_per_node=2 (micro_size=\d+)", done.stdout)
    }
    assert cells == {f"micro_size={size} sync={sync}" for size in (1, 2, 3, 6) for sync in ("every", "boundary")}
    assert done.stdout.count("cannot be shared by 5 ranks") == 1, "once, not for each micro-batch"
    assert "gather_once" not in done.stdout.partition("Impossible")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "batch.micro_siz=1,2"], "batch.micro_siz=1,2: there is no such key.\n  did you mean 'batch.micro_siz"),
        (["-m", "strategy=ddp,fspd"], "strategy=fspd: there is no such option"),
        (["-m", "batch.micro_size=3,5"], "No cell of this sweep can run.\n  batch.micro_size=3: batch.global_size=64"),
        (["-m", "cluster.rendezvous=a,b"], "No cell of this sweep can run.\n  cluster.rendezvous=a: has no effect"),
        (["train.predict=never"], "train.predict=never: there is no such key.\n  Leave it out"),
        (["strategy=all"], "strategy=all: stands for several values.\n  Add -m"),
    ],
)
def test_a_mistake_in_a_comparison_is_one_message(launch: Launch, arguments: list[str], message: str) -> None:
    done = launch("plan", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("launch: error: ") == 1
    assert message in done.stderr


def test_a_sweep_under_torchrun_is_refused_with_the_whole_command(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["-m", "optimizer.lr=1,2"]
    monkeypatch.setattr("sys.argv", ["launch", "train", *arguments])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"itself: launch train cluster.workers_per_node=2 -m optimizer.lr=1,2\n"):
        with_config("train", arguments, lambda *_: 1, cells=lambda *_: ())


@pytest.mark.parametrize("key", ["batch.global_size", "batch.global_tokens"])
def test_cells_that_do_not_compare_are_refused_before_any_is_traced(key: str, launch: Launch) -> None:
    done = launch("plan", "-m", f"{key}=8192,16384")
    assert done.returncode == 2
    assert done.stderr.startswith(f"launch: error: {key}=8192, 16384: differs between the cells"), done.stderr
    assert done.stdout == ""


def test_no_secret_reaches_the_plan(launch: Launch) -> None:
    done = launch("plan", "--json", env={"WANDB_API_KEY": "s3cret", "MY_TOKEN": "t0ken"})
    assert done.returncode == 0
    assert "s3cret" not in done.stdout
    assert "t0ken" not in done.stdout


def test_help_and_version(launch: Launch) -> None:
    assert "launch train" in launch("--help").stdout
    assert launch("--version").stdout.strip()
    assert launch().returncode == 2


FILES = {
    "experiment/key": ("# @package _global_\ntrain:\n  steps: 5\n  stepz: 3\n", ["line 4: train.stepz: there is no"]),
    "experiment/type": ("# @package _global_\n\ntrain:\n  steps: many\n", ["line 4: train.steps: must be a whole num"]),
    "experiment/enum": ("# @package _global_\nstrategy:\n  sync: often\n", ["line 3: strategy.sync: ", "gather_once"]),
    "experiment/scalar": ("# @package _global_\ntrain: 5\n", ["line 2: train: must have keys of its own"]),
    "experiment/choice": (
        "# @package _global_\nprecision: fp32\nstrategy: fsdp\n",
        ["line 2: precision: is a group", "- override /precision: fp32\n"],
    ),
    "experiment/yaml": ("# @package _global_\ntrain:\n  steps: [5\nx: 3\n", ["line 4: is not valid YAML"]),
    "experiment/place": ("train:\n  steps: 5\n", ["keys became those of a group 'experiment'", "# @package _global_"]),
    "experiment/option": (
        "# @package _global_\ndefaults:\n  - override /strategy: ddpp\n",
        ["line 3: strategy=ddpp: there is no such option", "did you mean 'ddp'?"],
    ),
    "experiment/group": (
        "# @package _global_\ndefaults:\n  - override /stategy: ddp\n",
        ["line 3: stategy: there is no such group to override", "did you mean 'strategy'?"],
    ),
    "experiment/relative": (
        "# @package _global_\ndefaults:\n  - strategy: ddp\n",
        ["line 3: strategy: there is no file experiment/strategy/ddp.yaml", "`- override /strategy: ddp`"],
    ),
    "experiment/dotted": ("# @package _global_\ntrain.steps: 5\n", ["line 2: train.steps: ", "train: {steps: VALUE}"]),
    "experiment/key_of": ("# @package _global_\nrun:\n  dir: ${no.key}\n", ["line 3: run.dir: refers to a key that"]),
    "experiment/variable": ("# @package _global_\nrun:\n  dir: ${oc.env:NO_X}\n", ["line 3: run.dir: ", ": NO_X"]),
    "experiment/resolver": ("# @package _global_\nrun:\n  dir: ${nope:x}\n", ["line 3: run.dir: ", "${nope:...}"]),
    "experiment/circle": ("# @package _global_\nrun:\n  dir: ${run.dir}\n", ["line 3: run.dir: refers to itself"]),
    "experiment/open": ("# @package _global_\nrun:\n  dir: ${run.name\n", ["line 3: run.dir: cannot be read"]),
    "experiment/twice": ("# @package _global_\nrun:\n  dir: a\n  dir: b\n", ["line 4: is not valid YAML", "key dir"]),
    "experiment/empty": ("", ["has no keys", "# @package _global_"]),
    "experiment/list": ("- a\n", ["has no keys"]),
    "experiment/removed": (
        "# @package _global_\nstrategy:\n  compress_parameters: int8\n",
        ["line 3: strategy.compress_parameters: there is no such key", "Use precision=bf16"],
    ),
    "strategy/mine": ("kind: ddp\nbuckets: 4\n", ["line 2: strategy.buckets: there is no", "strategy.bucket_mb"]),
}  # fmt: skip


def test_a_mistake_in_a_file_is_said_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, (text, says) in FILES.items():
        file = tmp_path / "my_conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        group, option = name.split("/")
        chosen = f"{'' if group == 'strategy' else '+'}{group}={option}"
        assert cli.run(["plan", "--config-dir", "my_conf", chosen]) == 2, name
        told = capsys.readouterr().err
        assert told.startswith(f"launch: error: my_conf/{name}.yaml"), told
        assert not [words for words in says if words not in told], told
    assert cli.run(["plan", "--config-dir", "my_conf", "experiment=key"]) == 2
    assert cli.run(["plan", "--config-dir", "my_conf", "+experiment=key", "+experiment=type"]) == 2
    assert "+experiment=[A,B]" in capsys.readouterr().err
    (tmp_path / "my_conf/experiment/latin.yaml").write_bytes(b"run:\n  name: caf\xe9\n")
    assert cli.run(["plan", "--config-dir", "my_conf", "+experiment=latin"]) == 2
    assert "my_conf/experiment/latin.yaml: is not UTF-8 text" in capsys.readouterr().err
    assert cli.run(["plan", "--config-dir", "my_conf", "experiment=key"]) == 2
    assert "+experiment=key" in capsys.readouterr().err


def test_a_mistake_is_said_alike_under_a_debugger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OmegaConf's exceptions then have causes: errors of its own that name no key."""
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    for debugger in "01":
        monkeypatch.setenv("OC_CAUSE", debugger)
        assert cli.run(["plan", "run.name=${nope}"]) == 2
        said.append(capsys.readouterr().err)
    assert said[0] == said[1]
    assert "run.name: refers to a key that does not exist: ${nope}" in said[0]


def test_flags_may_stand_between_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["plan", "task=digits", "--cfg", "job", "train.steps=7"]) == 0
    assert "steps: 7" in capsys.readouterr().out


def test_mlflows_store_beside_the_runs_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path, "a")
    store = tmp_path / "mlruns"
    store.mkdir()
    assert cli.run(["report", "--csv", str(tmp_path / "a"), str(store)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("a,")
    assert cli.run(["report", str(store)]) == 2


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        ("name: optuna\nbest_params: {optimizer.lr: 0.01, batch.accumulation: 2}\nbest_value: 0.123456789\n",
         "Best trial: 0.123457 with optimizer.lr=0.01 batch.accumulation=2"),
        ("best_evaluated_params: {a: 1}\nbest_evaluated_result: 2\n", "Best trial: 2 with a=1"),
        ("name: optuna\nsolutions: []\n", ""),
        ("[]", ""),
    ],
)  # fmt: skip
def test_the_best_trial_of_a_sweeper(tmp_path: Path, results: str, shown: str) -> None:
    (tmp_path / "optimization_results.yaml").write_text(results)
    assert best_trial(tmp_path / "optimization_results.yaml") == shown
