"""What is under `deploy/`: the chart, as Helm renders it, and the manifests fit Kubernetes, each other and us."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from pointsman import config
from pointsman.control.discovery.kubernetes import POOLS

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="of the extra `deploy`")
if importlib.util.find_spec("helm_python") is None:
    pytest.skip("helm_python is of the extra `deploy`", allow_module_level=True)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "pointsman"

Document = dict[str, Any]

DEFAULTS: Document = {"name": "pointsman", "namespace": "default", "values": {}}
OPEN: Document = {
    "name": "edge",
    "namespace": "ai",
    "values": {
        "config": '[gateway]\nmax_attempts = 2\n\n[[gateway.kubernetes]]\ninference_pool = "fleet"\n',
        "keys": {"required": False},
        "rbac": {"namespaces": ["engines", "more-engines"]},
        "podDisruptionBudget": {"enabled": False},
        "shutdownGraceSeconds": 12,
        "drainDeadlineSeconds": 600,
    },
}
FULL: Document = {
    "name": "gw",
    "namespace": "ai",
    "values": {
        "config": '[gateway]\n\n[[gateway.kubernetes]]\nnamespace = "*"\nselector = "app in (a, b)"\n',
        "fullnameOverride": "door",
        "image": {"repository": "registry.example/pointsman", "tag": "main"},
        "imagePullSecrets": [{"name": "pull"}],
        "keys": {"secret": "our-keys"},
        "serviceAccount": {"name": "door-man", "annotations": {"a": "b"}},
        "rbac": {"clusterWide": True},
        "service": {"type": "LoadBalancer", "port": 443, "annotations": {"a": "b"}},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "extraEnv": [{"name": "ENGINE_KEY", "value": "x"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "ai"},
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
            }
        ],
        "priorityClassName": "high",
    },
}
RELEASES = {"defaults": DEFAULTS, "open": OPEN, "full": FULL}
REFUSED: dict[str, Document] = {
    "'replica' not allowed": {"replica": 3},
    "at '/keys': additional properties": {"keys": {"secrets": "x"}},
    "at '/replicas': got string": {"replicas": "3"},
    "at '/config': minLength": {"config": ""},
    "at '/service/port': minimum": {"service": {"port": 0}},
    "at '/drainDeadlineSeconds': got number": {"drainDeadlineSeconds": 0.5},
}
"""Values that the chart's schema refuses, by what is said about them."""

OLDEST = "1.25"


@cache
def helm() -> dict[str, Any]:
    """Return what Helm makes of everything that is tried here, all at once: its library takes a second to load."""
    wanted = [*RELEASES.values(), *({**DEFAULTS, "values": each} for each in REFUSED.values())]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("helm_render.py")), str(CHART)],
        input=json.dumps(wanted),
        capture_output=True,
        check=True,
        text=True,
    )
    answered: dict[str, Any] = json.loads(done.stdout)
    names = [*RELEASES, *REFUSED]
    answered["answers"] = dict(zip(names, answered["answers"], strict=True))
    return answered


def rendered(release: str) -> list[Document]:
    texts = helm()["answers"][release]["rendered"]
    return [
        document
        for template, text in texts.items()
        if not template.endswith(("NOTES.txt", ".tpl"))
        for document in yaml.safe_load_all(text)
        if document
    ]


def manifests() -> list[Document]:
    return [
        document
        for path in sorted(DEPLOY.glob("manifests/**/*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def deployed(name: str) -> list[Document]:
    return manifests() if name == "manifests" else rendered(name)


def only(kind: str, documents: list[Document]) -> Document:
    [found] = [each for each in documents if each["kind"] == kind]
    return found


def container(documents: list[Document]) -> Document:
    [found] = only("Deployment", documents)["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment(documents: list[Document]) -> dict[str, str]:
    return {each["name"]: each.get("value", "secret") for each in container(documents)["env"]}


every_deployment = pytest.mark.parametrize("name", ["manifests", *RELEASES])


@every_deployment
@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
def test_everything_fits_the_schemas_of_kubernetes(name: str, version: str) -> None:
    checked = []
    for each in deployed(name):
        if each["kind"] != "PodMonitor":  # it is the Prometheus operator's, and has no schema there
            kubernetes_validate.validate(each, version, strict=True)
            checked.append(each["kind"])
    assert {"ConfigMap", "Deployment", "Service", "ServiceAccount"} <= set(checked)


def test_a_misspelt_key_would_not_fit() -> None:
    document = only("Deployment", manifests())
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(document, OLDEST, strict=True)


@every_deployment
def test_the_configuration_loads_in_the_environment_of_its_container(
    name: str, tmp_path: Path
) -> None:
    documents = deployed(name)
    file = tmp_path / "pointsman.toml"
    file.write_text(only("ConfigMap", documents)["data"]["pointsman.toml"])
    loaded = config.load(file, [], environment(documents)).gateway
    assert len(loaded.kubernetes) == 1
    assert loaded.watch
    assert (loaded.keys_file == "") == (name == "open")


@every_deployment
def test_the_gateway_is_started_with_the_file_and_the_folders_that_are_mounted(name: str) -> None:
    documents = deployed(name)
    spec = only("Deployment", documents)["spec"]["template"]["spec"]
    gateway, env = container(documents), environment(documents)
    mounts = {each["name"]: each["mountPath"] for each in gateway["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert gateway["args"] == ["serve", "--config", f"{mounts['config']}/pointsman.toml"]
    assert (
        volumes["config"]["configMap"]["name"] == only("ConfigMap", documents)["metadata"]["name"]
    )
    assert env["TL_GATEWAY__STATE_DIR"] == mounts["state"]
    if "keys" in mounts:
        assert env["TL_GATEWAY__KEYS_FILE"] == f"{mounts['keys']}/keys.jsonl"
        [pepper] = [each for each in gateway["env"] if each["name"] == "TL_GATEWAY_PEPPER"]
        secret = pepper["valueFrom"]["secretKeyRef"]["name"]
        assert volumes["keys"]["secret"]["secretName"] == secret


@every_deployment
def test_ports_probes_and_service_meet(name: str) -> None:
    documents = deployed(name)
    gateway, env = container(documents), environment(documents)
    ports = {each["name"]: each["containerPort"] for each in gateway["ports"]}
    assert env["TL_GATEWAY__LISTEN"] == f":{ports['http']}"
    assert env["TL_GATEWAY__HEALTH_LISTEN"] == f":{ports['health']}"
    paths = {
        probe: gateway[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")
    }
    assert {each["port"] for each in paths.values()} == {"health"}
    assert [each["path"] for each in paths.values()] == ["/healthz", "/healthz", "/readyz"]
    [port] = only("Service", documents)["spec"]["ports"]
    assert port["targetPort"] == "http", "health and metrics are not for clients"


@every_deployment
def test_a_gateway_may_drain_to_its_end_and_is_taken_away_after_its_successor_came(
    name: str,
) -> None:
    documents = deployed(name)
    spec, env = only("Deployment", documents)["spec"], environment(documents)
    drains = [env[f"TL_GATEWAY__{key}"] for key in ("SHUTDOWN_GRACE_S", "DRAIN_DEADLINE_S")]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > sum(map(int, drains))
    probe = container(documents)["readinessProbe"]
    assert int(drains[0]) > probe["periodSeconds"] * probe["failureThreshold"]
    assert spec["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


@every_deployment
def test_selectors_find_the_pods_and_nothing_runs_as_root(name: str) -> None:
    documents = deployed(name)
    template = only("Deployment", documents)["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    selectors = [
        only("Service", documents)["spec"]["selector"],
        *(
            each["spec"]["selector"]["matchLabels"]
            for each in documents
            if each["kind"] in ("Deployment", "PodDisruptionBudget", "PodMonitor")
        ),
    ]
    assert all(selector.items() <= labels for selector in selectors)
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    security = container(documents)["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("name", "kind", "namespaces"),
    [
        ("manifests", "Role", [None]),
        ("defaults", "Role", ["default"]),
        ("open", "Role", ["engines", "more-engines"]),
        ("full", "ClusterRole", [None]),
    ],
)
def test_the_account_may_read_what_discovery_asks_for_and_nothing_else(
    name: str, kind: str, namespaces: list[str | None]
) -> None:
    documents = deployed(name)
    account = only("ServiceAccount", documents)["metadata"]["name"]
    template = only("Deployment", documents)["spec"]["template"]
    assert template["spec"]["serviceAccountName"] == account
    roles = [each for each in documents if each["kind"] == kind]
    bindings = [each for each in documents if each["kind"] == f"{kind}Binding"]
    assert [each["metadata"].get("namespace") for each in roles] == namespaces
    assert [each["metadata"].get("namespace") for each in bindings] == namespaces
    for role, binding in zip(roles, bindings, strict=True):
        assert binding["roleRef"]["kind"] == kind
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        assert [each["name"] for each in binding["subjects"]] == [account]
        allowed = {
            (group, resource): rule["verbs"]
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        }
        pools = [(each.partition("/")[0], "inferencepools") for each in POOLS]
        assert allowed == {each: ["get", "list", "watch"] for each in [("", "pods"), *pools]}


def test_the_manifests_are_what_the_chart_renders_by_default() -> None:
    written = {each["kind"]: each for each in manifests() if each["kind"] != "PodMonitor"}
    made = {each["kind"]: each for each in rendered("defaults")}
    for each in made.values():
        for label in ("app.kubernetes.io/version", "app.kubernetes.io/managed-by", "helm.sh/chart"):
            del each["metadata"]["labels"][label]
        if each["kind"] in ("Role", "RoleBinding"):
            del each["metadata"]["namespace"]
    toml = [each["ConfigMap"]["data"].pop("pointsman.toml") for each in (written, made)]
    assert written == made
    assert tomllib.loads(toml[0]) == tomllib.loads(toml[1])


def test_the_version_of_the_chart_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    image = container(manifests())["image"]
    assert chart["appVersion"] == project["version"] == image.rpartition(":")[2]


@pytest.mark.parametrize("why", REFUSED)
def test_values_that_make_no_sense_are_refused_with_their_place(why: str) -> None:
    assert why in helm()["answers"][why]["error"]


def test_helm_has_nothing_to_object_to() -> None:
    warning = 2
    assert [each for each in helm()["lint"] if each["severity"] >= warning] == []


def test_the_notes_say_what_is_missing_or_open() -> None:
    def notes(release: str) -> str:
        text = helm()["answers"][release]["rendered"]["pointsman/templates/NOTES.txt"]
        assert isinstance(text, str)
        return text

    assert "create secret generic pointsman-keys" in notes("defaults")
    assert "EVERYBODY" in notes("open")
    assert "http://door.ai:443/v1" in notes("full")


def test_the_image_is_built_from_files_that_exist_and_runs_as_the_same_user() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [
        name
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert "src" in copied
    assert all((ROOT / name).exists() for name in copied)
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(kept)
    security = only("Deployment", manifests())["spec"]["template"]["spec"]["securityContext"]
    assert f"USER {security['runAsUser']}:{security['runAsGroup']}" in lines


def test_the_image_has_extras_that_exist_and_discovery_among_them() -> None:
    [extras] = re.findall(r'"\.\[([\w,]+)\]"', (DEPLOY / "Dockerfile").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "k8s" in extras.split(",")
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()
