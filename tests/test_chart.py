"""The Helm chart as Helm and Kubernetes read it: over a matrix of values, wrong ones, and every pod's policy."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart import (
    CHART,
    PROJECT,
    TOOLS,
    VALUES,
    Manifest,
    containers_of,
    find,
    kustomize,
    pod_of,
    render,
    run_tool,
    template,
)

from agentspec.sidecar.options import read_options
from agentspec.sidecar.server_options import ServerOptions
from agentspec.sidecar.store.options import RedisOptions

pytestmark = pytest.mark.deploy

KUBERNETES = ("1.29.0", "1.30.0", "1.31.0", "1.32.0", "1.33.0", "1.34.0", "1.35.0", "1.36.0", "1.37.0")
CUSTOM_KINDS = {"PodMonitor", "PrometheusRule", "ScaledObject"}
"""Kinds of the Prometheus operator and of KEDA: Kubernetes has no schema for them."""

SIDECAR: Manifest = {"mode": "sidecar", "sidecar": {"image": {"repository": "registry.example/agentspec-sidecar"}}}
REDIS: Manifest = {
    "redis": {
        "url": "rediss://redis:6379",
        "username": "agentspec",
        "passwordSecret": "redis-user",
        "caSecret": "redis-ca",
        "certificateSecret": "redis-client",
        "keySecret": "history-key",
    }
}
MATRIX: dict[str, list[Manifest]] = {
    "redis": [{}, REDIS],
    "mode": [
        {},
        SIDECAR,
        {**SIDECAR, "mode": "hybrid"},
        {**SIDECAR, "sidecar": {**SIDECAR["sidecar"], "native": False}},
    ],
    "autoscaling": [{}, {"autoscaling": {"kind": "hpa"}}],
    "network": [{}, {"networkPolicy": {"egress": []}}, {"networkPolicy": {"enabled": False}}],
    "ranks": [{}, {"vllm": {"dataParallelSize": 3, "tokenSecret": "hub", "cacheClaim": "models"}}],
}


@pytest.fixture(autouse=True)
def _tools() -> None:
    assert TOOLS.is_dir(), "run `make deploy-test`: it fetches helm, kubectl and others"


def values(**changes: Any) -> Manifest:
    """The fewest values of a release, and changes to them."""
    return {"model": "org/model", "image": {"repository": "registry.example/agentspec-vllm"}, **changes}


def combinations() -> list[Manifest]:
    """The fewest values with every combination of the matrix."""
    combined = []
    for parts in itertools.product(*MATRIX.values()):
        merged = values()
        for part in parts:
            merged |= part
        combined.append(merged)
    return combined


def test_every_file_of_values_lints_strictly() -> None:
    complaints = {file.name: run_tool("helm", "lint", "--strict", CHART, "--values", file) for file in VALUES}

    assert {name: run.stdout for name, run in complaints.items() if run.code} == {}


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_objects_are_valid_in_each_supported_kubernetes(kubernetes: str, tmp_path: Path) -> None:
    manifests = [manifest for file in VALUES for manifest in render(file, f"--kube-version={kubernetes}")]
    standard = [manifest for manifest in manifests if manifest["kind"] not in CUSTOM_KINDS]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(standard))

    run = run_tool("kubernetes-validate", "--strict", "-k", kubernetes, tmp_path / "all.yaml")

    assert (run.code, run.stderr) == (0, "")


def test_every_combination_of_values_is_valid(tmp_path: Path) -> None:
    manifests = [manifest for merged in combinations() for manifest in render(merged)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(manifests))

    run = run_tool("kubernetes-validate", "--strict", "-k", "1.29.0", tmp_path / "all.yaml")

    assert (run.code, run.stderr) == (0, "")


def test_older_kubernetes_is_refused() -> None:
    run = template(values(), "--kube-version=1.28.0")

    assert run.code != 0
    assert ">=1.29.0" in run.stderr


def all_pods() -> list[Manifest]:
    """Every pod of every combination and file, hooks and tests too."""
    rendered = [
        *map(render, combinations()),
        *map(render, VALUES),
        kustomize("overlays/gpu"),
        kustomize("overlays/cpu"),
    ]
    return [pod for manifests in rendered for pod in map(pod_of, manifests) if pod is not None]


def test_every_pod_fulfils_the_restricted_policy() -> None:
    for pod in all_pods():
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert {"hostNetwork", "hostPID", "hostIPC"}.isdisjoint(pod)
        assert all("hostPath" not in volume for volume in pod.get("volumes", []))
        for container in containers_of(pod):
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["runAsNonRoot"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "privileged" not in security


def test_no_container_has_a_cpu_limit_or_an_image_that_changes() -> None:
    for pod in all_pods():
        for container in containers_of(pod):
            assert "cpu" not in container["resources"].get("limits", {})
            assert re.search(r":(?!latest$)[\w.-]+$|@sha256:[0-9a-f]{64}$", container["image"]), container["image"]


def test_secrets_are_files_and_never_in_the_environment_or_the_output() -> None:
    for merged in (values(vllm={"tokenSecret": "hub"}), *(yaml.safe_load(file.read_text()) for file in VALUES)):
        manifests = render(merged)
        assert "Secret" not in {manifest["kind"] for manifest in manifests}
        for pod in filter(None, map(pod_of, manifests)):
            for container in containers_of(pod):
                assert "envFrom" not in container
                assert all("valueFrom" not in variable for variable in container.get("env", []))


def test_native_sidecar_starts_before_vllm_and_ends_after_it() -> None:
    pod = pod_of(find(render(values(**SIDECAR)), "Deployment"))

    assert pod is not None
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["grpc"]["port"] == 9461
    assert [container["name"] for container in pod["containers"]] == ["vllm"]


def test_sidecar_and_vllm_share_a_socket_in_memory_by_their_group() -> None:
    pod = pod_of(find(render(values(**SIDECAR)), "Deployment"))

    assert pod is not None
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "agentspec-socket"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    mounts = [mount for container in containers_of(pod) for mount in container["volumeMounts"]]
    assert [mount["mountPath"] for mount in mounts if mount["name"] == "agentspec-socket"] == ["/run/agentspec"] * 2


def additional_config(manifests: list[Manifest]) -> Any:
    """What vLLM is given as `--additional-config`."""
    pod = pod_of(find(manifests, "Deployment"))
    assert pod is not None
    vllm = next(container for container in pod["containers"] if container["name"] == "vllm")
    (text,) = [arg for arg in vllm["args"] if arg.startswith("--additional-config=")]
    return json.loads(text.partition("=")[2])


@pytest.mark.parametrize("file", VALUES, ids=lambda file: file.stem)
def test_engine_takes_the_options_that_the_chart_writes(file: Path) -> None:
    options = additional_config(render(file))["agentspec"]

    assert read_options(options).namespace == options["namespace"]


def test_sidecar_takes_the_flags_that_the_chart_writes() -> None:
    pod = pod_of(find(render(values(**SIDECAR)), "Deployment"))

    assert pod is not None
    (sidecar,) = pod["initContainers"]
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in sidecar["args"][1:])
    options = ServerOptions.model_validate({name.replace("-", "_"): value for name, value in flags.items()})
    assert (options.health_port, str(options.socket)) == (9461, "/run/agentspec/draft.sock")


def redis_options(manifests: list[Manifest], name: str) -> dict[str, Any]:
    """What a container is told of Redis."""
    if name == "vllm":
        told = additional_config(manifests)["agentspec"]
    else:
        pod = pod_of(find(manifests, "Deployment"))
        assert pod is not None
        flags = [arg.removeprefix("--").split("=", 1) for arg in pod["initContainers"][0]["args"][1:]]
        told = {flag.replace("-", "_"): value for flag, value in flags}
    return {option: value for option, value in told.items() if option.startswith("redis")}


@pytest.mark.parametrize(
    ("mode", "sharer"), [("embedded", "vllm"), ("hybrid", "agentspec-sidecar"), ("sidecar", "agentspec-sidecar")]
)
def test_only_who_shares_histories_is_told_of_redis_and_has_its_secrets(mode: str, sharer: str, tmp_path: Path) -> None:
    manifests = render(values(**({} if mode == "embedded" else {**SIDECAR, "mode": mode}), **REDIS))
    pod = pod_of(find(manifests, "Deployment"))
    assert pod is not None
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "redis"]
    files = {
        item["path"]: source["secret"]["name"]
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    mounts = {
        container["name"]: [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "redis"]
        for container in containers_of(pod)
    }

    assert files == {
        "password": "redis-user",
        "ca.crt": "redis-ca",
        "tls.crt": "redis-client",
        "tls.key": "redis-client",
        "key": "history-key",
    }
    assert [name for name, paths in mounts.items() if paths == ["/run/secrets/redis"]] == [sharer]
    assert mode == "embedded" or not redis_options(manifests, "vllm")
    for file in files:
        (tmp_path / file).write_text("0" * 64)
    told = {
        name: value.replace("/run/secrets/redis", str(tmp_path))
        for name, value in redis_options(manifests, sharer).items()
    }
    options = RedisOptions.model_validate(told)
    assert {name for name in RedisOptions.model_fields if getattr(options, name) is not None} == set(
        RedisOptions.model_fields
    )


BAD_VALUES = {
    "redis.passwordSecret: is given, but redis.url is not": values(redis={"passwordSecret": "a"}),
    "redis.url: certificates are given, so it needs TLS": values(redis={"url": "redis://a:1", "caSecret": "a"}),
    "agentspec.options.redis: the chart sets it": values(agentspec={"options": {"redis": "redis://a:1"}}),
    "sidecar.options.redis_key_file: the chart sets it": values(
        mode="hybrid", sidecar={**SIDECAR["sidecar"], "options": {"redis_key_file": "/k"}}
    ),
    "model: name the model": values(model=""),
    "image.repository: name the image": values(image={}),
    "image.tag: `latest` changes": values(image={"repository": "a", "tag": "latest"}),
    "sidecar.image.repository: name the image": values(mode="sidecar"),
    "mode: the sidecar has an image or options but is not used": values(sidecar={"options": {"max_models": 2}}),
    "sidecar.options.tcp: TCP needs tls_cert": values(
        mode="sidecar", sidecar={**SIDECAR["sidecar"], "options": {"tcp": "0.0.0.0:9470"}}
    ),
    "sidecar.options.socket: the chart sets it": values(
        mode="sidecar", sidecar={**SIDECAR["sidecar"], "options": {"socket": "/run/x"}}
    ),
    "agentspec.options.metrics_port: the chart sets it": values(agentspec={"options": {"metrics_port": 1}}),
    "autoscaling.prometheusUrl: KEDA reads": values(autoscaling={"kind": "keda"}),
    "autoscaling.minReplicas: must not be above": values(autoscaling={"kind": "hpa", "minReplicas": 5}),
}


@pytest.mark.parametrize("sentence", BAD_VALUES)
def test_contradiction_is_refused_with_what_to_change(sentence: str) -> None:
    run = template(BAD_VALUES[sentence])

    assert run.code != 0
    assert sentence in run.stderr


REJECTED: dict[str, list[Any]] = {
    "mode": ["redis", 1],
    "model": [7],
    "replicas": [-1, "two"],
    "image.tag": ["a b"],
    "image.digest": ["sha256:12"],
    "image.pullPolicy": ["Sometimes"],
    "imagePullSecrets": [["registry"]],
    "vllm.args": ["--max-num-seqs 8"],
    "vllm.dataParallelSize": [0, 65],
    "vllm.port": [0, 65536],
    "vllm.startupSeconds": [0],
    "vllm.drainSeconds": [0],
    "vllm.resources": [{"limits": {"cpu": 4}}, {"limit": {}}],
    "vllm.cacheSize": ["0", "much"],
    "vllm.env": [[{"name": "HF_TOKEN", "value": "hf_x"}], [{"name": "A", "valueFrom": {}}]],
    "vllm.gpus": [1],
    "agentspec.namespace": ["", "a/b", "a" * 257],
    "agentspec.options": [{"Policy": "off"}, {"policy": ["off"]}],
    "agentspec.metricsPort": [0],
    "agentspec.otlpEndpoint": ["collector:4317"],
    "redis.url": ["redis", "http://a:1", "redis://user:word@a:1", "unix:///redis.sock"],
    "redis.passwordSecret": ["A b"],
    "sidecar.historyBytes": ["0", "-1", "lots"],
    "sidecar.healthPort": [70000],
    "sidecar.native": ["yes"],
    "sidecar.resources": [{"limits": {"cpu": "1"}}],
    "securityId": [0],
    "topologySpread": [[{"topologyKey": "zone"}]],
    "service.type": ["ExternalName"],
    "disruptionBudget.maxUnavailable": [0, "0%"],
    "autoscaling.kind": ["vpa"],
    "autoscaling.waitingRequests": [0],
    "monitoring.intervalSeconds": [0],
    "test.image": ["curl:latest"],
    "redis": [{"host": "x"}],
}


@pytest.mark.parametrize(("path", "value"), [(path, value) for path in REJECTED for value in REJECTED[path]])
def test_schema_rejects_a_bad_value_and_names_it(path: str, value: Any) -> None:
    section, _, name = path.partition(".")
    merged = values()
    merged[section] = {**merged.get(section, {}), name: value} if name else value

    run = template(merged)

    assert run.code != 0
    assert "don't meet the specifications of the schema" in run.stderr
    assert (name or section) in run.stderr


def test_notes_tell_two_commands_that_reach_what_was_made() -> None:
    run = run_tool("helm", "install", "agentspec", CHART, "--dry-run=client", "--values", VALUES[0], "-n", "team")
    assert run.code == 0, run.stderr
    notes = run.stdout.partition("NOTES:")[2]
    commands = [shlex.split(line) for line in notes.splitlines() if line.startswith("  kubectl")]
    manifests = render(VALUES[0])
    names = {(manifest["kind"].lower(), manifest["metadata"]["name"]) for manifest in manifests}
    service = find(manifests, "Service")["spec"]["ports"][0]["port"]

    wait, forward = commands
    assert wait[:5] == ["kubectl", "--namespace", "team", "rollout", "status"]
    assert forward[:4] == ["kubectl", "--namespace", "team", "port-forward"]
    assert {tuple(wait[5].split("/")), tuple(forward[4].split("/"))} <= names
    assert forward[5] == f"8000:{service}"


@pytest.mark.parametrize("page", ["deploy/helm/agentspec/README.md", "deploy/README.md"])
def test_install_command_of_a_page_renders(page: str) -> None:
    text = (PROJECT / page).read_text().replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^helm install .*$", text, re.MULTILINE)]

    assert commands
    for command in commands:
        run = run_tool("helm", "template", *command[2:])
        assert run.code == 0, run.stderr


def test_another_chart_can_take_in_the_sidecar(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    dependency = {"name": "agentspec", "version": "0.1.0", "repository": f"file://{CHART}"}
    chart = {"apiVersion": "v2", "name": "mine", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(chart))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"agentspec": values(**SIDECAR)}))
    snippet = re.search(r"```yaml\n(.*?)```", (CHART / "README.md").read_text(), re.DOTALL)
    assert snippet is not None
    (tmp_path / "templates/pod.yaml").write_text(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: mine\nspec:\n  containers: []\n"
        + "".join(f"  {line}\n" for line in snippet[1].splitlines()).replace("nindent 4", "nindent 6")
    )

    run_tool("helm", "dependency", "build", tmp_path)
    run = run_tool("helm", "template", "mine", tmp_path, "--show-only", "templates/pod.yaml")

    assert run.code == 0, run.stderr
    pod = yaml.safe_load(run.stdout)["spec"]
    assert pod["initContainers"][0]["name"] == pod["volumes"][0]["name"].replace("socket", "sidecar")
