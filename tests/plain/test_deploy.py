"""deploy/ is usable as far as can be seen without a cluster: its files are read as those would read
them."""

import json
import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from coserve.cli.commands.cluster import app
from coserve.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
VERSION = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def read(name: str) -> dict[str, Any]:
    found = yaml.safe_load((DEPLOY / name).read_text())
    assert isinstance(found, dict)
    return found


def instructions() -> list[str]:
    """Of the container file, continued lines joined."""
    text = re.sub(
        r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.MULTILINE
    ).replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip()]


def test_the_container_file_installs_what_is_pinned():
    words = [line.split()[0] for line in instructions()]
    assert words[0] == "FROM"
    assert set(words) <= {
        "FROM",
        "ARG",
        "RUN",
        "WORKDIR",
        "COPY",
        "USER",
        "ENV",
        "VOLUME",
        "EXPOSE",
    }
    installs = "".join(line for line in instructions() if "pip install" in line)
    assert "--constraint constraints.txt" in installs
    assert "[cluster,postgresql]" in installs
    for line in instructions():
        if line.startswith("COPY"):
            assert all((ROOT / name).exists() for name in line.split()[1:-1]), line


def test_the_user_of_the_container_can_write_to_its_volume():
    (user,) = (line.split()[1] for line in instructions() if line.startswith("USER"))
    (volume,) = (line.split()[1] for line in instructions() if line.startswith("VOLUME"))
    made = [line for line in instructions() if line.startswith("RUN") and f"--owner {user}" in line]
    assert any(volume in line.split() for line in made)


def test_the_ray_service_is_one():
    service = read("rayservice.yaml")
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["rayVersion"] == VERSION
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    containers = [each["template"]["spec"]["containers"][0] for each in groups]
    assert len({each["image"] for each in containers}) == 1
    for group, container in zip(groups, containers, strict=True):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in group["template"]["spec"]["volumes"]}
        assert set(container["resources"]["requests"]) == set(container["resources"]["limits"])
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_its_application_is_a_server():
    serve = yaml.safe_load(read("rayservice.yaml")["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    given = dict(application["args"])
    given.pop("placement")
    assert ServerConfig(**given).host == "0.0.0.0"
    module, name = application["import_path"].split(":")
    assert f"def {name}(" in (ROOT / (module.replace(".", "/") + ".py")).read_text()


@pytest.mark.parametrize(
    "read_groups",
    [
        lambda: read("rayservice.yaml")["spec"]["rayClusterConfig"]["workerGroupSpecs"],
        lambda: [read("values.yaml")["worker"]],
    ],
)
def test_workers_offer_devices(read_groups: Any):
    source = (ROOT / "coserve" / "cluster" / "ray" / "machine.py").read_text()
    device = re.search(r'^DEVICE = "(\w+)"$', source, re.MULTILINE)[1]
    for group in read_groups():
        text = group["rayStartParams"]["resources"]
        assert json.loads(json.loads(text)) == {
            device: 1
        }  # KubeRay puts the outer quotes on a command line


def test_the_values_are_of_the_same_machines():
    values = read("values.yaml")
    service = read("rayservice.yaml")["spec"]["rayClusterConfig"]
    assert values["head"]["rayVersion"] == VERSION
    image = values["image"]
    assert (
        f"{image['repository']}:{image['tag']}"
        == service["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["image"]
    )
    assert (
        values["worker"]["resources"]
        == (service["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"])
    )


def environments() -> list[dict[str, str | None]]:
    """Of every container, by either file; None: of a secret."""
    service = read("rayservice.yaml")["spec"]["rayClusterConfig"]
    groups = (service["headGroupSpec"], *service["workerGroupSpecs"])
    lists = [
        container["env"]
        for group in groups
        for container in group["template"]["spec"]["containers"]
    ]
    lists.append(read("values.yaml")["common"]["containerEnv"])
    return [{each["name"]: each.get("value") for each in one} for one in lists]


def test_all_machines_have_the_same_environment():
    first, *others = [
        {name: value for name, value in each.items() if not name.startswith("RAY_AUTH")}
        for each in environments()
    ]
    assert "COSERVE_DATABASE" in first
    assert all(other == first for other in others)


def test_ray_asks_for_a_token():
    """KubeRay makes that of a service, and gives it to the pods; the chart's is a secret."""
    assert read("rayservice.yaml")["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    environment = environments()[-1]
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"] is None


def test_workers_drain_before_they_end():
    (group,) = read("rayservice.yaml")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    for worker in (container, read("values.yaml")["worker"]):
        shell, flag, line = worker["lifecycle"]["preStop"]["exec"]["command"]
        assert (shell, flag) == ("sh", "-c")
        command = shlex.split(line.replace("$FQ_RAY_IP", "192.0.2.7"))
        assert command[:3] == ["coserve", "cluster", "drain"]
        drain = get_command(app).commands["drain"]  # type: ignore[attr-defined]  # it is a group of them
        given = drain.make_context("drain", command[3:]).params
        assert (given["here"], given["address"], given["node"]) == (True, "192.0.2.7:6379", None)
    text = (ROOT / "coserve" / "cluster" / "ray" / "joining.py").read_text()
    move_s = float(re.search(r"^MOVE_S = ([\d.]+)$", text, re.MULTILINE)[1])
    assert (
        group["template"]["spec"]["terminationGracePeriodSeconds"] > move_s + ServerConfig().drain_s
    )


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'")
@pytest.mark.filterwarnings("ignore")
def test_machines_have_the_settings_that_coserve_starts_them_with():
    from coserve.cluster.ray.machine import RAY_SETTINGS

    for environment in environments():
        assert environment.items() >= RAY_SETTINGS.items()
    module, _, name = RAY_SETTINGS["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"].partition(":")
    assert getattr(import_module(module), name)()


@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'coserve[cluster]'")
@pytest.mark.filterwarnings("ignore")
def test_ray_serve_reads_its_configuration():
    from ray.serve.schema import ServeDeploySchema

    found = ServeDeploySchema(**yaml.safe_load(read("rayservice.yaml")["spec"]["serveConfigV2"]))
    assert [each.name for each in found.applications] == ["coserve"]
