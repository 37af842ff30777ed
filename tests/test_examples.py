"""The examples run as a newcomer runs them, and every one of their LLM calls is tagged."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.openai_server import OpenAIServer, running_server

FOLDER = Path(__file__).resolve().parent.parent / "examples"
# Workflow and first stages of each; `research_agents.py` is run by the demo and its tests.
EXAMPLES = {
    "react_agent.py": ("react", ["model", "model"]),
    "plan_and_execute.py": ("plan-and-execute", ["plan", "execute", "summarize"]),
    "reflexion.py": ("reflexion", ["write", "reflect", "write", "reflect", "write"]),
    "supervisor.py": ("supervisor", ["supervisor", "geographer/model", "geographer/model", "supervisor"]),
}


@pytest.fixture
def server() -> Iterator[OpenAIServer]:
    with running_server() as server:
        yield server


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_runs_and_its_calls_are_tagged(
    name: str, server: OpenAIServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow_id, stages = EXAMPLES[name]
    monkeypatch.setattr(sys, "argv", [name, "--base-url", server.url, "--model", "m"])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    printed = capsys.readouterr().out

    assert {tags.workflow_id for tags in server.tags} == {workflow_id}
    assert [tags.stage for tags in server.tags][: len(stages)] == stages
    assert all(stage in printed for stage in stages)


def test_every_example_is_run() -> None:
    assert {*EXAMPLES, "research_agents.py"} == {path.name for path in FOLDER.glob("*.py")}
