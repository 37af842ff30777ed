"""Programs of other people's libraries, which `test_middleware_versions.py` runs in an environment that has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from tests.middleware_app import App, asking, chain_of, running_app

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries


@pytest.fixture
def app() -> Iterator[App]:
    with running_app() as app:
        yield app


def ask(graph: Any) -> None:
    graph.invoke({"messages": [HumanMessage("hi")]}, {"configurable": {"thread_id": "1"}, "recursion_limit": 12})


@tool
def lookup(x: str) -> str:
    """Look something up."""
    return "found " + x


def test_supervisor_and_its_agents_are_stages_of_one_query(app: App) -> None:
    library = pytest.importorskip("langgraph_supervisor")
    writer = create_agent(app.llm, [], name="writer", system_prompt="Write.")
    graph = library.create_supervisor([writer], model=app.llm, prompt="Hand over.").compile(name="team")

    ask(app.spec.wrap(graph))

    assert len(app.tags) == len(app.bodies) >= 3
    stages = set(app.stages)
    assert any(stage.startswith("supervisor") for stage in stages)
    assert any(stage.startswith("writer") for stage in stages)
    assert len({tags.query_id for tags in app.tags}) == 1
    assert {tags.workflow_id for tags in app.tags} == {"wf"}


def test_agents_of_a_swarm_are_stages_of_one_query(app: App) -> None:
    library = pytest.importorskip("langgraph_swarm")
    to_bob = library.create_handoff_tool(agent_name="bob")
    alice = create_agent(app.llm, [to_bob], name="alice", system_prompt="Hand over.")
    bob = create_agent(app.llm, [], name="bob", system_prompt="Answer.")
    graph = library.create_swarm([alice, bob], default_active_agent="alice").compile()

    ask(app.spec.wrap(graph))

    assert app.stages == ["alice/model", "bob/model"]
    assert len({tags.query_id for tags in app.tags}) == 1


def test_a_deep_agent_is_tagged(app: App) -> None:
    library = pytest.importorskip("deepagents")
    agent = library.create_deep_agent(model=app.llm, tools=[lookup], system_prompt="Work.")

    ask(app.spec.wrap(agent))

    assert len(app.tags) == len(app.bodies) >= 1
    assert {(tags.workflow_id, tags.stage) for tags in app.tags} == {("wf", "model")}
    assert all("lookup" in (tags.tools or ()) for tags in app.tags)


def test_litellm_by_its_openai_route_is_tagged(app: App) -> None:
    library = pytest.importorskip("litellm")

    def node(state: Any) -> Any:
        library.completion(
            model="openai/m", api_base=app.server.url, api_key="x", messages=[{"role": "user", "content": state["q"]}]
        )
        return {"out": ["done"]}

    app.run(("drafting", node))

    assert app.stages == ["drafting"]


def test_langchain_litellm_is_tagged(app: App) -> None:
    library = pytest.importorskip("langchain_litellm")
    llm = library.ChatLiteLLM(model="openai/m", api_base=app.server.url, api_key="x")

    app.spec.wrap(chain_of(("drafting", asking(llm)))).invoke({"q": "hi"})

    assert app.stages == ["drafting"]
