"""docker/: what its files name is there. That the images build and train is seen by building them and by `smoke`."""

from __future__ import annotations

import ast
import os
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers import ROOT

DOCKER = ROOT / "docker"
DOCKERFILES = [DOCKER / "Dockerfile", DOCKER / "slurm/Dockerfile"]


def instructions(dockerfile: Path) -> list[str]:
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line for line in text.splitlines() if line]


def compose() -> dict[str, Any]:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def installed_commands() -> set[str]:
    """Return the names of this project's own programs on the images' PATH."""
    scripts = [DOCKER / "install.sh", DOCKER / "slurm/install.sh"]
    lines = "\n".join(path.read_text() for path in scripts)
    found = re.findall(r"^ *install -m 755 (.*) /usr/local/bin/(\w*)$", lines, re.MULTILINE)
    return {"launch"} | {Path(word).name for words, _ in found for word in words.split()}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=str)
def test_the_base_is_an_argument_and_what_is_copied_is_there(dockerfile: Path) -> None:
    first, second, *others = instructions(dockerfile)
    assert first.startswith("ARG BASE_IMAGE=")
    assert second == "FROM ${BASE_IMAGE}"
    for line in others:
        words = line.split()
        if words[0] == "COPY":
            assert all((ROOT / source).exists() for source in words[1:-1]), line
        for path in re.findall(r"/opt/build/(\S+)", line if words[0] == "RUN" else ""):
            assert os.access(ROOT / path, os.X_OK), path
    assert re.match(r'CMD \["(launch|cluster)"', others[-1])


def test_the_training_image_has_no_rights_and_installs_torch_before_the_code() -> None:
    lines = instructions(DOCKERFILES[0])
    order = ["install.sh system", "COPY pyproject.toml", "install.sh dependencies", "COPY . ", "install.sh launcher"]
    places = [next(at for at, line in enumerate(lines) if wanted in line) for wanted in [*order, "USER launcher"]]
    assert places == sorted(places)


def test_the_training_image_can_compile_and_use_gpus_and_infiniband() -> None:
    installed = (DOCKER / "install.sh").read_text().split()
    assert {"g++", "libc6-dev", "python3-dev", "ibverbs-providers", "libibverbs1", "librdmacm1"} <= set(installed)
    (env,) = [line for line in instructions(DOCKERFILES[0]) if line.startswith("ENV")]
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(env.split())


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=str)
def test_labels_say_what_the_package_says(dockerfile: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="(.*)"', dockerfile.read_text()))
    assert labels.pop("description")
    assert labels == {
        "title": "launcher" if dockerfile.parent == DOCKER else "launcher-slurm",
        "version": project["version"],
        "revision": "${REVISION}",
        "licenses": project["license"],
    }
    assert "ARG REVISION=unknown" in dockerfile.read_text()


def test_the_context_holds_what_the_build_needs_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines, "everything stays out but"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    assert {"launcher", "conf", "docker", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"} <= kept


def test_the_compose_files_services_run_what_is_there() -> None:
    said = compose()
    cluster = (DOCKER / "slurm/cluster").read_text()
    for name, service in said["services"].items():
        program, *arguments = service["command"]
        assert program in installed_commands() | {"sleep"}, name
        if program == "cluster":
            assert re.search(rf"^    {arguments[0]}\)$", cluster, re.MULTILINE), f"{name}: no such role"
        for volume in service["volumes"]:
            assert volume.split(":")[0] in said["volumes"]
        assert service["hostname"] == name
        build = service.get("build")
        assert build is None or (DOCKER / build["context"] / build["dockerfile"]).is_file()
    nodes = said["services"]["controller"]["environment"]["NODES"].split()
    assert nodes == [name for name in said["services"] if name.startswith("node")]


def test_only_the_login_runs_as_an_ordinary_user_and_it_has_no_key() -> None:
    services = compose()["services"]
    assert {name for name, service in services.items() if service.get("user") == "launcher"} == {"login"}
    assert not [volume for volume in services["login"]["volumes"] if volume.startswith("munge:")]
    everybody = [name for name, service in services.items() if "home:/home" in service["volumes"]]
    assert set(everybody) == set(services) - {"controller"}, "runs lie where the nodes see them"


def test_the_smoke_command_names_installed_distributions() -> None:
    (names,) = re.findall(r"for name in (\(.*?\))", (DOCKER / "smoke").read_text())
    assert all(metadata.version(name) for name in ast.literal_eval(names))


def test_no_key_of_munges_stays_in_a_layer() -> None:
    for script in (DOCKER / "install.sh", DOCKER / "slurm/install.sh"):
        text = script.read_text()
        assert text.index("rm -f /etc/munge/munge.key") > text.index("apt-get install")


@pytest.mark.parametrize("name", ["install.sh", "smoke", "slurm/install.sh", "slurm/cluster", "slurm/smoke-slurm"])
def test_scripts_stop_at_the_first_error(name: str) -> None:
    path = DOCKER / name
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in path.read_text()


def test_the_template_of_slurm_conf_has_its_places() -> None:
    lines = (DOCKER / "slurm/slurm.conf").read_text().splitlines()
    assert "SlurmctldHost=@CONTROLLER@" in lines
    assert "@NODES@" in lines
    assert {"ProctrackType=proctrack/linuxproc", "ReturnToService=2"} <= set(lines)


def test_what_the_wheel_is_made_of_is_in_the_context() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {*wheel["packages"], *wheel["force-include"], project["project"]["readme"], "pyproject.toml"}
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert needed <= let_in
