"""Renders the chart as Helm and Kustomize do, with the tools that `make deploy-test` fetches."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

PROJECT = Path(__file__).resolve().parent.parent
CHART = PROJECT / "deploy/helm/agentspec"
KUSTOMIZE = PROJECT / "deploy/kustomize"
TOOLS = PROJECT / "build/deploy/bin"
VALUES = sorted(CHART.glob("ci/*.yaml"))

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """How a command ended.

    Attributes:
        code: its exit code.
        stdout: what it printed.
        stderr: what it complained of.
    """

    code: int
    stdout: str
    stderr: str


def run_tool(name: str, *args: str | Path, stdin: str = "") -> Run:
    """Run one of the fetched tools in the project's folder; 60 seconds at most."""
    command = [str(TOOLS / name), *map(str, args)]
    done = subprocess.run(command, cwd=PROJECT, input=stdin, capture_output=True, text=True, check=False, timeout=60)
    return Run(done.returncode, done.stdout, done.stderr)


def template(values: Path | Manifest, *flags: str) -> Run:
    """`helm template` of a release named agentspec; values as a file or as what is in one."""
    if isinstance(values, Path):
        return run_tool("helm", "template", "agentspec", CHART, "--values", values, *flags)
    return run_tool("helm", "template", "agentspec", CHART, "--values", "-", *flags, stdin=yaml.safe_dump(values))


def parse(run: Run) -> list[Manifest]:
    """The objects that a command printed.

    Raises:
        RuntimeError: the command failed; holds its complaint.
    """
    if run.code != 0:
        raise RuntimeError(run.stderr)
    return [manifest for manifest in yaml.safe_load_all(run.stdout) if manifest]


def render(values: Path | Manifest, *flags: str) -> list[Manifest]:
    """The objects of a release."""
    return parse(template(values, *flags))


def kustomize(folder: str) -> list[Manifest]:
    """The objects of a Kustomize folder."""
    return parse(run_tool("kubectl", "kustomize", KUSTOMIZE / folder))


def find(manifests: list[Manifest], kind: str) -> Manifest:
    """The only object of a kind."""
    (found,) = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def pod_of(manifest: Manifest) -> Manifest | None:
    """The pod's specification in a Pod or in what makes pods; None: it makes none."""
    if manifest["kind"] == "Pod":
        return dict(manifest["spec"])
    pod_template = manifest.get("spec", {}).get("template") if manifest["kind"] != "ScaledObject" else None
    return dict(pod_template["spec"]) if pod_template else None


def containers_of(pod: Manifest) -> list[Manifest]:
    """Its containers, init containers too."""
    return [*pod.get("initContainers", []), *pod["containers"]]


def without_helm(manifests: list[Manifest]) -> list[Manifest]:
    """The same without the labels that only Helm sets, in order of kind."""
    for manifest in manifests:
        labels = [manifest["metadata"]["labels"]]
        if "template" in manifest.get("spec", {}):
            labels.append(manifest["spec"]["template"]["metadata"]["labels"])
        for each in labels:
            each.pop("helm.sh/chart", None)
            each.pop("app.kubernetes.io/managed-by", None)
    return sorted(manifests, key=lambda manifest: str(manifest["kind"]))
