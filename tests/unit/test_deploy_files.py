"""Deploy files agree with each other and with what they deploy. (Their schemas: `make check-images`.)"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.configuration import check_names
from deploy.dockerfile import BadDockerfile, Instruction, StageRun, parse_stages
from gateway.metrics import GatewayMetrics

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
DOCKERFILES = sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))


def documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]


def containers() -> list[dict[str, Any]]:
    templates = [d["spec"]["template"]["spec"] for d in documents() if "template" in d.get("spec", {})]
    return [container for spec in templates for container in (*spec["containers"], *spec.get("initContainers", []))]


@pytest.mark.parametrize("role", ["control", "pages"])
def test_kubernetes_configuration_equals_the_roles_file(role: str) -> None:
    maps = [d for d in documents() if d["kind"] == "ConfigMap" and d["metadata"]["name"] == f"kvalet-{role}"]
    written = (ROOT / f"deploy/redis/{role}.conf").read_text().strip()
    assert [m["data"]["valkey.conf"].strip() for m in maps] == [written]


def test_kubernetes_variables_are_settings_that_exist() -> None:
    names = {entry["name"]: "" for container in containers() for entry in container.get("env", [])}
    assert any(name.startswith("KVALET_") for name in names)
    check_names(names)


def test_compose_variables_are_settings_that_exist() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    names = {name: "" for service in compose["services"].values() for name in service.get("environment", {})}
    assert any(name.startswith("KVALET_") for name in names)
    check_names(names)


def test_workers_that_get_a_gpu_use_it() -> None:
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    backends = [
        service["environment"].get("KVALET_BACKEND")
        for service in compose["services"].values()
        if "devices" in service.get("deploy", {}).get("resources", {}).get("reservations", {})
    ]
    backends += [
        {entry["name"]: entry.get("value") for entry in container["env"]}.get("KVALET_BACKEND")
        for container in containers()
        if "nvidia.com/gpu" in container["resources"]["limits"]
    ]
    assert backends == ["cuda", "cuda"]


def test_kubernetes_containers_run_without_privileges() -> None:
    contexts = [container["securityContext"] for container in containers()]
    assert all(c["allowPrivilegeEscalation"] is False and c["capabilities"] == {"drop": ["ALL"]} for c in contexts)


def test_kubernetes_workers_have_longer_to_end_than_to_drain() -> None:
    deployments = [d for d in documents() if d["kind"] == "Deployment" and d["metadata"]["name"].startswith("worker")]
    pods = [d["spec"]["template"]["spec"] for d in deployments]
    variables = [{e["name"]: e.get("value") for e in pod["containers"][0]["env"]} for pod in pods]
    assert len(pods) > 0
    assert all(
        pod["terminationGracePeriodSeconds"] > int(environment["KVALET_DRAIN_GRACE_S"])
        for pod, environment in zip(pods, variables, strict=True)
    )


def test_dashboard_and_scaler_ask_for_metrics_that_exist() -> None:
    exported = {
        name
        for family in GatewayMetrics().registry.collect()
        for name in (family.name, f"{family.name}_bucket", f"{family.name}_total")
    }
    dashboard = json.loads((ROOT / "deploy/grafana/kvalet.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    scaled = [d["spec"] for d in documents() if d["kind"] == "ScaledObject"]
    scalers = [trigger["metadata"]["valueLocation"] for spec in scaled for trigger in spec["triggers"]]
    asked = set(re.findall(r"kvalet_\w+", " ".join((*queries, *scalers))))
    assert len(asked) > 8
    assert asked <= exported


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_sources_are_let_through_by_dockerignore(path: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copies = [i.value.split()[:-1] for i in parse_stages(path.read_text())[0] if i.name == "COPY"]
    lock = re.compile(r"^requirements/.*\.lock$")
    sources = {lock.sub("requirements/*.lock", source) for words in copies for source in words}
    assert sources
    assert sources <= allowed


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_dockerfile_final_stage_does_not_run_as_root(path: Path) -> None:
    users = [i.value for i in parse_stages(path.read_text())[-1] if i.name == "USER"]
    assert users == ["10001:10001"]


def test_locked_requirements_have_hashes_and_no_addresses() -> None:
    for path in (ROOT / "requirements").glob("*.lock"):
        lines = path.read_text().splitlines()
        options = ("-i", "--index", "--find", "--extra")
        assert not [line for line in lines if "://" in line or line.startswith(options)], path
        pinned = [line for line in lines if line and not line.startswith(" ")]
        assert all("==" in line and line.endswith("\\") for line in pinned), path


def test_stage_that_copies_an_untracked_source_is_refused(tmp_path: Path) -> None:
    run = StageRun(tmp_path, ROOT, ["pyproject.toml"], {})
    with pytest.raises(BadDockerfile, match="untracked"):
        run.run([Instruction("COPY", "untracked ./")], timeout_s=5)


def test_stage_whose_step_fails_is_refused_with_its_output(tmp_path: Path) -> None:
    run = StageRun(tmp_path, ROOT, [], {"PATH": "/usr/bin:/bin"})
    with pytest.raises(BadDockerfile, match="no such luck"):
        run.run([Instruction("RUN", "echo no such luck; false")], timeout_s=5)


def test_stage_paths_stay_below_its_root(tmp_path: Path) -> None:
    run = StageRun(tmp_path, ROOT, ["pyproject.toml"], {"PATH": "/usr/bin:/bin"})
    steps = "FROM x\nWORKDIR /src\nCOPY pyproject.toml ./\nRUN mkdir -p /opt/a && cp pyproject.toml /opt/a/\n"
    run.run(parse_stages(steps)[0], timeout_s=5)
    assert (tmp_path / "opt/a/pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text()
