"""The examples run as a newcomer runs them, and every one of their LLM calls is tagged."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_openai import ChatOpenAI
from tests.openai_server import OpenAIServer, running_server

from agentspec.benchmarks.counters import read_samples
from agentspec.benchmarks.server import SERVED_NAME, ServerOptions, VllmServer
from agentspec.middleware import AgentSpecMiddleware

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


@pytest.mark.vllm
@pytest.mark.slow
def test_an_example_with_32_runs_at_once_on_vllm_shows_what_drafts_brought(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec_of_file = importlib.util.spec_from_file_location("plan_and_execute", FOLDER / "plan_and_execute.py")
    assert spec_of_file is not None
    assert spec_of_file.loader is not None
    example = importlib.util.module_from_spec(spec_of_file)
    monkeypatch.setitem(sys.modules, "plan_and_execute", example)  # its graph's state is looked up there
    spec_of_file.loader.exec_module(example)
    goals = [{"goal": f"Plan number {number}: move a small shop to the web"} for number in range(32)]
    with VllmServer("agentspec", ServerOptions(model_path, tmp_path, 32, 8)) as vllm:
        vllm.start()
        vllm.wait_until_ready()
        spec = AgentSpecMiddleware(workflow_id="plan-and-execute", base_urls=[vllm.base_url])
        llm = ChatOpenAI(base_url=vllm.base_url, model=SERVED_NAME, api_key="x", temperature=0, max_tokens=48)  # type: ignore[arg-type,call-arg]
        results = example.build_graph(llm, spec).batch(goals, {"max_concurrency": 32})
        (metrics_url,) = vllm.agentspec_metrics_urls
        labels = [dict(items) for name, items in read_samples(metrics_url) if name == "agentspec_accepted_tokens_total"]

    assert len(results) == 32
    assert all(bool(result["summary"]) for result in results)
    stages = {stats.stage: stats for stats in spec.stats()}
    assert set(stages) == {"plan", "execute", "summarize"}
    assert stages["plan"].num_calls == stages["summarize"].num_calls == 32
    assert {label["stage"] for label in labels if label["workflow"] == "plan-and-execute"} == set(stages)
    assert sum(stats.accepted_tokens for stats in stages.values()) > 100
