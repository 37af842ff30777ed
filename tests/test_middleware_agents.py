"""What reaches the server when agents run, with tools, built-in middlewares and structured output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    LLMToolSelectorMiddleware,
    ModelFallbackMiddleware,
    SummarizationMiddleware,
)
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command
from pydantic import BaseModel
from tests.middleware_app import App, State, chain_of, model, running_app

from agentspec.middleware import AgentSpecMiddleware


@pytest.fixture(scope="module")
def module_app() -> Iterator[App]:
    with running_app() as app:
        yield app


@pytest.fixture
def app(module_app: App) -> App:
    module_app.server.clear()
    return module_app


class Plan(BaseModel):
    """A plan."""

    title: str
    n: int


@tool
def lookup(x: str) -> str:
    """Look something up."""
    return "found " + x


def test_an_agent_loop_is_tagged(app: App) -> None:
    agent = app.spec.wrap(create_agent(app.llm, [lookup], system_prompt="Be terse.", name="helper"))
    agent.invoke({"messages": [HumanMessage("hi")]})

    assert [(tags.stage, tags.iteration, tags.agent_id) for tags in app.tags] == [
        ("model", 1, "helper"),
        ("model", 2, "helper"),
    ]
    assert [tags.tools for tags in app.tags] == [["lookup"]] * 2
    assert len({tags.toolset for tags in app.tags}) == len({tags.prompt_version for tags in app.tags}) == 1


def test_an_llm_call_inside_a_tool_is_named_after_the_tool(app: App) -> None:
    def tool_asking(name: str) -> Any:
        @tool(name)
        def ask(x: str) -> str:
            """Ask the model."""
            return str(app.llm.invoke(f"{name} {x}").content)

        return ask

    calls = [{"name": name, "args": {"x": "q"}, "id": f"{name}-{i}"} for i in range(3) for name in ("one", "two")]
    builder = StateGraph(MessagesState)
    builder.add_node("choose", lambda _: {"messages": [AIMessage("", tool_calls=calls)]})
    builder.add_node("tools", ToolNode([tool_asking("one"), tool_asking("two")]))
    builder.add_edge(START, "choose")
    builder.add_edge("choose", "tools")
    app.spec.wrap(builder.compile()).invoke({"messages": [HumanMessage("hi")]})

    pairs = zip(app.bodies, app.tags, strict=True)
    assert sorted((body["messages"][0]["content"].split()[0], tags.stage) for body, tags in pairs) == [
        *[("one", "tools/tool:one")] * 3,
        *[("two", "tools/tool:two")] * 3,
    ]


def test_calls_of_built_in_middlewares_are_stages_of_their_own(app: App) -> None:
    summary = SummarizationMiddleware(model=app.llm, trigger=("messages", 3), keep=("messages", 1))
    agent = app.spec.wrap(create_agent(app.llm, [], middleware=[summary]))
    agent.invoke(
        {"messages": [HumanMessage("a"), AIMessage("b"), HumanMessage("c"), AIMessage("d"), HumanMessage("e")]}
    )

    assert app.stages == ["SummarizationMiddleware.before_model/@summarization", "model"]


@pytest.mark.parametrize("is_async", [False, True])
def test_as_agent_middleware_the_model_calls_are_tagged(app: App, is_async: bool) -> None:
    spec = AgentSpecMiddleware(workflow_id="wf", agent_id="helper")
    agent = create_agent(app.llm, [lookup], system_prompt="Be terse.", middleware=[spec])
    inputs: Any = {"messages": [HumanMessage("hi", id="question-1")]}
    if is_async:
        app.runner.run(agent.ainvoke(inputs))
    else:
        agent.invoke(inputs)

    assert [(tags.stage, tags.iteration, tags.agent_id, tags.query_id) for tags in app.tags] == [
        ("model", 1, "helper", "question-1"),
        ("model", 2, "helper", "question-1"),
    ]


def test_an_agents_own_middleware_gives_its_role_inside_a_wrapped_graph(app: App) -> None:
    agent = create_agent(app.llm, [], middleware=[AgentSpecMiddleware(workflow_id="inner", agent_id="researcher")])
    graph = chain_of(("research", lambda state: agent.invoke({"messages": [HumanMessage(state["q"])]}) and {}))
    AgentSpecMiddleware(workflow_id="outer").wrap(graph).invoke({"q": "hi"})

    assert [(tags.workflow_id, tags.agent_id, tags.stage) for tags in app.tags] == [
        ("outer", "researcher", "research/model")
    ]


def test_the_request_that_an_agent_middleware_sees_is_not_touched(app: App) -> None:
    create_agent(app.llm, [lookup]).invoke({"messages": [HumanMessage("hi")]})
    create_agent(app.llm, [lookup], middleware=[AgentSpecMiddleware()]).invoke({"messages": [HumanMessage("hi")]})
    plain, tagged = app.bodies[0], app.bodies[2]

    assert {key: value for key, value in tagged.items() if key != "vllm_xargs"} == plain


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_starts_in_its_block(app: App, method: Any) -> None:
    planner = app.llm.with_structured_output(Plan, method=method)
    results: list[Any] = []

    def node(state: State) -> State:
        results.append(planner.invoke(state["q"]))
        return {}

    app.run(("plan", node))

    assert results == [Plan(title="x", n=1)]
    assert [tags.block for tags in app.tags] == ["tool_call/Plan"]
    assert app.tags[0].schema_id.startswith("Plan:")


@tool
def translate(x: str) -> str:
    """Translate something."""
    return x


def test_the_tool_selectors_own_call_is_a_stage_of_its_own(app: App) -> None:
    selector = LLMToolSelectorMiddleware(model=app.llm, always_include=["lookup"])
    agent = app.spec.wrap(create_agent(app.llm, [lookup, translate], middleware=[selector]))
    agent.invoke({"messages": [HumanMessage("hi")]})

    assert app.stages == ["model/@tool_selection", "model"] * 2
    assert app.tags[0].schema_id


def test_as_first_agent_middleware_the_calls_of_the_later_ones_are_tagged(app: App) -> None:
    selector = LLMToolSelectorMiddleware(model=app.llm, always_include=["lookup"])
    spec = AgentSpecMiddleware(workflow_id="wf")
    create_agent(app.llm, [lookup, translate], middleware=[spec, selector]).invoke({"messages": [HumanMessage("hi")]})

    assert [tags.workflow_id for tags in app.tags] == ["wf"] * 4


@pytest.mark.parametrize("is_async", [False, True])
def test_a_fallback_model_answers_in_the_same_stage(app: App, is_async: bool) -> None:
    fallback = ModelFallbackMiddleware(model(app.server, temperature=0.5))
    agent = app.spec.wrap(create_agent(model(app.server, max_retries=0), [], middleware=[fallback]))
    app.server.num_failures_left = 1
    inputs: Any = {"messages": [HumanMessage("hi")]}
    if is_async:
        app.runner.run(agent.ainvoke(inputs))
    else:
        agent.invoke(inputs)

    assert app.stages == ["model", "model"]
    assert [body.get("temperature") for body in app.bodies] == [None, 0.5]


def test_a_person_who_approves_a_tool_call_resumes_the_same_query(app: App) -> None:
    approval = HumanInTheLoopMiddleware(interrupt_on={"lookup": True})
    agent = app.spec.wrap(create_agent(app.llm, [lookup], middleware=[approval], checkpointer=InMemorySaver()))
    config: RunnableConfig = {"configurable": {"thread_id": "approval"}}
    agent.invoke({"messages": [HumanMessage("hi")]}, config)
    agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)

    assert app.stages == ["model", "model"]
    assert len({tags.query_id for tags in app.tags}) == 1


def test_an_agent_inside_a_tool_has_its_own_role_below_the_tools_node(app: App) -> None:
    researcher = create_agent(app.llm, [], name="researcher", system_prompt="Research.")

    @tool
    def research(x: str) -> str:
        """Ask the researcher."""
        return str(researcher.invoke({"messages": [HumanMessage(x)]})["messages"][-1].content)

    agent = app.spec.wrap(create_agent(app.llm, [research], name="boss"))
    agent.invoke({"messages": [HumanMessage("hi")]})

    assert [(tags.stage, tags.agent_id) for tags in app.tags] == [
        ("model", "boss"),
        ("tools/model", "researcher"),
        ("model", "boss"),
    ]
    assert len({tags.query_id for tags in app.tags}) == 1
