"""What configs/ has for clusters and monitoring: against the fields that their programs take, and against the
metrics that are declared.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from orchestrator.cluster.connection import HEALTH_CHECKS
from orchestrator.cluster.private_ray import TESTED
from orchestrator.history.metrics.declared import METRICS
from orchestrator.launch.submit import RUN_KEY
from tests.small_configs import CONFIGS, DEPLOYMENTS

DASHBOARD = json.loads((CONFIGS / "grafana-dashboard.json").read_text())
DECLARED = {metric.prometheus for metric in METRICS.values()}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONFIGS / name).read_text())
    return found


def closed(required: str, **fields: Any) -> dict[str, Any]:
    """An object with these fields and no others."""
    return {
        "type": "object",
        "required": required.split(),
        "additionalProperties": False,
        "properties": fields,
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": TEXT}
DURATION = {"type": "string", "pattern": r"^\d+[smhd]$"}


def array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


# The fields that we use of ray.io/v1 in KubeRay 1.7 (all are in 1.5.1), and of a pod.
AMOUNTS = closed("requests limits", requests=TEXTS, limits=TEXTS)
CONTAINER = closed(
    "name image",
    name=TEXT,
    image=TEXT,
    env=array(closed("name value", name=TEXT, value=TEXT)),
    ports=array(closed("containerPort", name={"type": "string", "maxLength": 15}, containerPort=WHOLE)),
    resources=AMOUNTS,
    volumeMounts=array(closed("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = closed(
    "name",
    name=TEXT,
    persistentVolumeClaim=closed("claimName", claimName=TEXT),
    emptyDir=closed("", medium={"enum": ["Memory"]}, sizeLimit=TEXT),
)
POD = closed(
    "containers", terminationGracePeriodSeconds=WHOLE, containers=array(CONTAINER), volumes=array(VOLUME)
)
TEMPLATE = closed("spec", spec=POD)
WORKERS = closed(
    "groupName template",
    groupName=TEXT,
    replicas=WHOLE,
    minReplicas=WHOLE,
    maxReplicas=WHOLE,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
CLUSTER = closed(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=closed("mode", mode={"enum": ["token", "disabled"]}),
    headGroupSpec=closed("template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=array(WORKERS),
)
JOB = closed(
    "entrypoint rayClusterSpec",
    entrypoint=TEXT,
    metadata=TEXTS,
    runtimeEnvYAML=TEXT,
    backoffLimit=WHOLE,
    shutdownAfterJobFinishes={"type": "boolean"},
    ttlSecondsAfterFinished=WHOLE,
    rayClusterSpec=CLUSTER,
)


def resource(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=closed("name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}),
        spec=spec,
    )


# The fields that we use of a task of SkyPilot 0.10, of its resources, and of a storage.
SKYPILOT = closed(
    "run",
    name=TEXT,
    num_nodes=WHOLE,
    workdir=TEXT,
    resources=closed(
        "",
        cpus=TEXT,
        memory=TEXT,
        use_spot={"type": "boolean"},
        job_recovery=closed("", max_restarts_on_errors=WHOLE),
    ),
    file_mounts={
        "type": "object",
        "additionalProperties": closed(
            "name mode", name=TEXT, mode={"enum": ["MOUNT", "MOUNT_CACHED", "COPY"]}
        ),
    },
    envs={
        "type": "object",
        "patternProperties": {"^[a-zA-Z_][a-zA-Z0-9_]*$": TEXT},
        "additionalProperties": False,
    },
    setup=TEXT,
    run=TEXT,
)
# A file of rules of Prometheus 2 and 3.
RULE = closed(
    "alert expr",
    alert={"type": "string", "pattern": "^[A-Za-z]+$"},
    expr=TEXT,
    **{"for": DURATION},
    labels=closed("severity", severity={"enum": ["warning", "critical"]}),
    annotations=closed("summary description", summary=TEXT, description=TEXT),
)
ALERTS = closed("groups", groups=array(closed("name rules", name=TEXT, rules=array(RULE))))
SCHEMAS = {
    "kuberay-raycluster.yaml": resource("RayCluster", CLUSTER),
    "kuberay-rayjob.yaml": resource("RayJob", JOB),
    "skypilot.yaml": SKYPILOT,
    "prometheus-alerts.yaml": ALERTS,
}
assert SCHEMAS.keys() == DEPLOYMENTS


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_file_has_the_fields_of_its_program(name: str) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(read(name))


def clusters() -> Iterator[dict[str, Any]]:
    yield read("kuberay-raycluster.yaml")["spec"]
    yield read("kuberay-rayjob.yaml")["spec"]["rayClusterSpec"]


@pytest.mark.parametrize("spec", list(clusters()), ids=["cluster", "job"])
def test_a_cluster_is_the_tested_ray_with_a_token_and_all_that_doctor_looks_for(spec: dict[str, Any]) -> None:
    assert spec["rayVersion"].startswith(f"{TESTED}.")
    assert spec["authOptions"] == {"mode": "token"}
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == HEALTH_CHECKS
        mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        assert set(mounted) == {"/data", "/dev/shm"}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert "persistentVolumeClaim" in volumes[mounted["/data"]]
        assert volumes[mounted["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert pod["terminationGracePeriodSeconds"] >= 60


def test_a_rayjob_trains_where_a_volume_lies_and_has_time_to_save() -> None:
    spec = read("kuberay-rayjob.yaml")["spec"]
    program, command, _, storage = shlex.split(spec["entrypoint"])
    assert (program, command, storage) == ("orchestrator", "train", "run.storage=/data/runs")
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}
    assert spec["metadata"][RUN_KEY].startswith("/data/runs/")


def test_skypilot_runs_the_command_that_continues_with_our_health_checks() -> None:
    task = read("skypilot.yaml")
    assert HEALTH_CHECKS.items() <= task["envs"].items()
    assert 'orchestrator train "$JOB" run.storage=/data/runs' in task["run"]
    assert "/data" in task["file_mounts"]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n", "-c", script], check=True)


# ------------------------------------------------------------ metrics
def expressions() -> Iterator[str]:
    for group in read("prometheus-alerts.yaml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in DASHBOARD["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", expression))


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_alerts_and_dashboard_use_declared_metrics_only(expression: str) -> None:
    assert names_in(expression)
    assert names_in(expression) <= DECLARED
    assert [expression.count(mark) for mark in "([{"] == [expression.count(mark) for mark in ")]}"]
    # a counter only grows, so what is asked of it is by how much
    for name in names_in(expression):
        assert name.endswith("_total") == (f"increase({name}" in expression)


def test_an_undeclared_name_is_seen() -> None:
    assert names_in('sum(ray_orchestrator_lost{run="a"})') - DECLARED == {"ray_orchestrator_lost"}


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for expression in expressions() for name in names_in(expression)}
    assert DECLARED - shown == {"ray_orchestrator_consumed_samples"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    panels = DASHBOARD["panels"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert {panel["type"] for panel in panels} == {"stat", "timeseries"}
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        assert panel["title"]
        assert panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
    places = {
        (x, y)
        for p in panels
        for g in [p["gridPos"]]
        for x in range(g["x"], g["x"] + g["w"])
        for y in range(g["y"], g["y"] + g["h"])
    }
    assert len(places) == sum(panel["gridPos"]["w"] * panel["gridPos"]["h"] for panel in panels), (
        "panels overlap"
    )
