"""The middleware's own tests in environments of their own: the oldest supported versions, and the newest with others'
libraries beside them."""

from __future__ import annotations

import os
import re
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
ROOTS = ("proto", "sidecar", "middleware", "serving_patch", "benchmarks", "examples")
# What the tests need beside LangGraph: the tag schema with which they read what was sent, and pytest.
TEST_REQUIREMENTS = ("hypothesis", "numpy", "opentelemetry-sdk", "pydantic", "pytest", "pytest-timeout", "rich")
SIDECAR_REQUIREMENTS = (
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-prometheus",
    "prometheus-client",
)


@dataclass(frozen=True, slots=True)
class Environment:
    """Packages, and the tests that run with them.

    Attributes:
        packages: as pip takes them.
        files: of the tests.
        not_there: tests of what these versions do not have.
    """

    packages: tuple[str, ...]
    files: tuple[str, ...]
    not_there: tuple[str, ...] = ()


MIDDLEWARE_TESTS = ("agents", "clients", "fail_open", "feedback", "grammar", "graphs", "inject", "shapes", "tags")
OWN = tuple(f"tests/test_middleware_{name}.py" for name in MIDDLEWARE_TESTS)
ENVIRONMENTS = {
    "oldest": Environment(
        packages=(
            *("langgraph==1.0.2", "langgraph-prebuilt==1.0.2", "langgraph-checkpoint<4", "langchain==1.0.3"),
            *("langchain-core==1.0.4", "langchain-openai==1.0.1", "openai==1.109.1"),
        ),
        files=OWN,
        # They name neither the agent of a run nor the purpose of a call: such calls are tagged by their node.
        not_there=(
            "test_calls_of_built_in_middlewares_are_stages_of_their_own",
            "test_the_tool_selectors_own_call_is_a_stage_of_its_own",
            "test_an_agent_inside_a_tool_has_its_own_role_below_the_tools_node",
        ),
    ),
    "newest": Environment(
        packages=(
            *("langgraph", "langchain", "langchain-openai", "openai"),
            *("langgraph-supervisor", "langgraph-swarm", "deepagents", "litellm", "langchain-litellm"),
        ),
        files=(*OWN, "tests/test_middleware_third_party.py"),
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_middleware_works_with_versions(name: str, tmp_path: Path) -> None:
    environment = ENVIRONMENTS[name]
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv/bin/python")
    packages = (*environment.packages, *TEST_REQUIREMENTS, *SIDECAR_REQUIREMENTS)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=900)
    deselected = [f"--deselect={file}::{test}" for file in environment.files for test in environment.not_there]

    ran = subprocess.run(
        [python, "-m", "pytest", "-W", "default", "-m", "not slow", *environment.files, *deselected],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(ROOTS), "PYTHONWARNINGS": ""},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )

    assert ran.returncode == 0, ran.stdout[-4000:]
    summary = ran.stdout.splitlines()[-1]
    assert "skipped" not in summary
    assert int(re.search(r"(\d+) passed", summary)[1]) > 150  # type: ignore[index]  # it is there, or the test fails
