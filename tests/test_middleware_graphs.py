"""What reaches the server when real graphs, agents and clients run: over a real socket, with the real libraries."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command, RetryPolicy, Send, interrupt
from tests.middleware_app import App, State, asking, asking_async, asking_graph, chain_of, model, running_app

from agentspec.middleware import AgentSpecMiddleware, stage


@pytest.fixture(scope="module")
def module_app() -> Iterator[App]:
    with running_app() as app:
        yield app


@pytest.fixture
def app(module_app: App) -> App:
    module_app.server.clear()
    return module_app


# --- plain graphs


def test_three_nodes_are_three_stages_of_one_query(app: App) -> None:
    app.run(*((name, asking(app.llm)) for name in ("plan", "act", "check")))

    assert app.stages == ["plan", "act", "check"]
    assert {tags.workflow_id for tags in app.tags} == {"wf"}
    assert {tags.agent_id for tags in app.tags} == {"wf"}
    assert len({tags.query_id for tags in app.tags}) == 1
    assert len({tags.call_id for tags in app.tags} | {tags.task_id for tags in app.tags}) == 6


def test_the_graph_itself_stays_untagged(app: App) -> None:
    graph = asking_graph(app)
    app.spec.wrap(graph)
    graph.invoke({"q": "hi"})
    app.llm.invoke("outside")

    assert ["vllm_xargs" in body for body in app.bodies] == [False, False]


def test_a_wrapped_graph_is_still_what_it_was(app: App) -> None:
    graph = asking_graph(app)
    wrapped = app.spec.wrap(graph)

    assert isinstance(wrapped, CompiledStateGraph)
    assert type(wrapped).__name__ == "CompiledStateGraph"
    assert wrapped.get_graph().draw_mermaid() == graph.get_graph().draw_mermaid()
    assert wrapped.get_input_jsonschema() == graph.get_input_jsonschema()


def test_copies_of_a_wrapped_graph_tag_too(app: App) -> None:
    wrapped = app.spec.wrap(asking_graph(app))
    copy = wrapped.with_config(tags=["t"]).copy({"checkpointer": InMemorySaver()})
    copy.invoke({"q": "hi"}, {"configurable": {"thread_id": "thread-1"}})

    assert [(tags.stage, tags.thread_id) for tags in app.tags] == [("a", "thread-1")]


def test_without_a_workflow_id_the_graphs_name_counts(app: App) -> None:
    for graph in (chain_of(("a", asking(app.llm)), name="triage"), asking_graph(app)):
        AgentSpecMiddleware().wrap(graph).invoke({"q": "hi"})

    assert [(tags.workflow_id, tags.agent_id) for tags in app.tags] == [("triage",) * 2, ("langgraph",) * 2]


def test_loops_count_iterations(app: App) -> None:
    builder = StateGraph(State)
    builder.add_node("write", asking(app.llm))
    builder.add_node("review", asking(app.llm))
    builder.add_edge(START, "write")
    builder.add_conditional_edges("write", lambda state: "review" if len(state["out"]) < 4 else END)
    builder.add_edge("review", "write")
    app.spec.wrap(builder.compile()).invoke({"q": "hi"})

    assert [(tags.stage, tags.iteration, tags.visit) for tags in app.tags] == [
        ("write", 1, 1),
        ("review", 1, 1),
        ("write", 2, 2),
        ("review", 2, 2),
        ("write", 3, 3),
    ]


def test_calls_of_one_node_are_counted_and_can_be_named(app: App) -> None:
    def node(state: State) -> State:
        app.llm.invoke("draft")
        app.llm.invoke("draft again")
        with stage("critique"):
            app.llm.invoke("critique")
        app.llm.invoke("verdict", config={"metadata": {"agentspec_stage": "verdict"}})
        return {}

    app.run(("write", node))

    assert [(tags.stage, tags.call_index) for tags in app.tags] == [
        ("write", 1),
        ("write", 2),
        ("critique", 1),
        ("verdict", 1),
    ]
    assert len({tags.task_id for tags in app.tags}) == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_send_fan_out_is_one_stage_with_branches(app: App, is_async: bool) -> None:
    builder = StateGraph(State)
    builder.add_node("split", lambda _: {})
    builder.add_node("worker", asking_async(app.llm) if is_async else asking(app.llm))
    builder.add_edge(START, "split")
    builder.add_conditional_edges("split", lambda _: [Send("worker", {"q": f"part {i}"}) for i in range(8)], ["worker"])
    graph = app.spec.wrap(builder.compile())
    if is_async:
        app.runner.run(graph.ainvoke({"q": "hi"}))
    else:
        graph.invoke({"q": "hi"})

    assert {(tags.stage, tags.iteration) for tags in app.tags} == {("worker", 1)}
    parts = {body["messages"][-1]["content"]: tags.branch for body, tags in zip(app.bodies, app.tags, strict=True)}
    assert parts == {f"part {branch}": branch for branch in range(8)}


@pytest.mark.parametrize("is_called", [False, True])
def test_a_subgraphs_stages_are_below_its_node(app: App, is_called: bool) -> None:
    inner = chain_of(("draft", asking(app.llm)), ("revise", asking(app.llm)))
    app.run(("writer", (lambda state: inner.invoke({"q": state["q"]})) if is_called else inner))

    assert [(tags.stage, tags.agent_id) for tags in app.tags] == [
        ("writer/draft", "wf/writer"),
        ("writer/revise", "wf/writer"),
    ]
    assert len({tags.query_id for tags in app.tags}) == 1


def test_two_runs_of_a_subgraph_in_one_node_count_their_iterations_apart(app: App) -> None:
    inner = chain_of(("draft", asking(app.llm)))
    app.run(("writer", lambda state: [inner.invoke({"q": state["q"]}) for _ in range(2)] and {}))

    assert [(tags.stage, tags.iteration, tags.visit) for tags in app.tags] == [
        ("writer/draft", 1, 1),
        ("writer/draft", 1, 2),
    ]


def test_of_nested_wraps_the_outer_counts(app: App) -> None:
    inner = AgentSpecMiddleware(workflow_id="inner").wrap(chain_of(("draft", asking(app.llm))))
    AgentSpecMiddleware(workflow_id="outer").wrap(chain_of(("writer", inner))).invoke({"q": "hi"})

    assert [(tags.workflow_id, tags.stage) for tags in app.tags] == [("outer", "writer/draft")]


def test_wrapping_twice_the_outer_counts(app: App) -> None:
    twice = AgentSpecMiddleware(workflow_id="outer").wrap(app.spec.wrap(asking_graph(app)))
    twice.invoke({"q": "hi"})

    assert [tags.workflow_id for tags in app.tags] == ["outer"]


def test_functional_api_is_tagged(app: App) -> None:
    @task
    def section(number: int) -> str:
        return str(app.llm.invoke(f"section {number}").content)

    @entrypoint()
    def essay(topic: str) -> list[str]:
        app.llm.invoke(topic)
        return [future.result() for future in [section(1), section(2)]]

    app.spec.wrap(essay).invoke("cats")

    assert sorted(app.stages) == ["essay", "essay/section", "essay/section"]


def test_a_resumed_run_keeps_its_query_and_a_new_one_does_not(app: App) -> None:
    ask_human = ("human", lambda _: {"out": [interrupt("ok?")]})
    graph = app.spec.wrap(
        chain_of(("a", asking(app.llm)), ask_human, ("b", asking(app.llm)), checkpointer=InMemorySaver())
    )
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    graph.invoke({"q": "hi"}, config)
    graph.invoke(Command(resume="yes"), config)
    graph.invoke({"q": "next"}, config)

    asked, resumed, renewed = (tags.query_id for tags in app.tags)
    assert asked == resumed
    assert renewed != asked


def test_retries_of_a_node_and_of_the_client_are_the_same_task(app: App) -> None:
    policy = RetryPolicy(initial_interval=0.01, retry_on=Exception)
    builder = StateGraph(State)
    builder.add_node("a", asking(model(app.server, max_retries=0)), retry_policy=policy)
    builder.add_edge(START, "a")
    app.server.num_failures_left = 1
    app.spec.wrap(builder.compile()).invoke({"q": "hi"})
    first, second = app.tags

    assert (first.task_id, first.iteration) == (second.task_id, second.iteration)
    assert (first.call_index, second.call_index) == (1, 2)


def test_a_stage_can_say_more_than_its_name(app: App) -> None:
    def node(state: State) -> State:
        with stage("critique", block="code", max_draft_tokens=4), stage(speculate=False, history="read"):
            app.llm.invoke("critique")
        app.llm.invoke("hi")
        return {}

    app.run(("a", node))
    said, plain = app.tags

    assert (said.stage, said.block, said.max_draft_tokens, said.speculate, said.history) == (
        *("critique", "code", 4, False, "read"),
    )
    assert (plain.stage, plain.block, plain.speculate, plain.history) == ("a", "", True, "rw")


def test_runs_of_a_named_batch_share_its_id(app: App) -> None:
    graph = app.spec.wrap(asking_graph(app))
    with app.spec.batch("nightly-7") as batch_id:
        graph.invoke({"q": "1"})
        graph.batch([{"q": "2"}, {"q": "3"}])
    graph.invoke({"q": "4"})

    assert batch_id == "nightly-7"
    assert [tags.batch_id for tags in app.tags] == ["nightly-7"] * 3 + [""]


# --- streaming


def test_streaming_is_tagged(app: App) -> None:
    async def streaming(state: State) -> State:
        return {"out": [str(chunk.content) async for chunk in app.llm.astream(state["q"])]}

    graph = app.spec.wrap(chain_of(("first", streaming), ("second", asking_async(app.llm))))

    async def stream() -> tuple[list[Any], list[Any]]:
        chunks = [chunk async for chunk in graph.astream({"q": "hi"}, stream_mode=["messages", "updates"])]
        return chunks, [event async for event in graph.astream_events({"q": "hi"}, version="v2")]

    chunks, events = app.runner.run(stream())

    assert {kind for kind, _ in chunks} == {"messages", "updates"}
    assert "on_chat_model_stream" in {event["event"] for event in events}
    assert [body["stream"] for body in app.bodies] == [True] * 4
    assert app.stages == ["first", "second"] * 2
    assert len({tags.query_id for tags in app.tags}) == 2


def test_sync_streaming_is_tagged(app: App) -> None:
    chunks = list(app.spec.wrap(asking_graph(app)).stream({"q": "hi"}, stream_mode="messages"))

    assert chunks
    assert app.stages == ["a"]


# --- many at once


def test_three_hundred_concurrent_runs_do_not_mix(app: App) -> None:
    graph = app.spec.wrap(chain_of(("a", asking_async(app.llm)), ("b", asking_async(app.llm))))
    configs: list[RunnableConfig] = [{"metadata": {"query_id": f"q{i}"}, "max_concurrency": 300} for i in range(300)]
    app.runner.run(graph.abatch([{"q": f"q{i}"} for i in range(300)], configs))

    asked = [body["messages"][-1]["content"] for body in app.bodies]
    assert [tags.query_id for tags in app.tags] == asked
    assert sorted(app.stages) == ["a"] * 300 + ["b"] * 300
    assert len({tags.call_id for tags in app.tags if tags.call_id}) == 600
    assert len({tags.batch_id for tags in app.tags if tags.batch_id}) == 1
    assert {tags.iteration for tags in app.tags} == {1}


def test_fifty_threaded_runs_do_not_mix(app: App) -> None:
    graph = app.spec.wrap(asking_graph(app))
    graph.batch([{"q": f"q{i}"} for i in range(50)], [{"metadata": {"query_id": f"q{i}"}} for i in range(50)])
    graph.invoke({"q": "alone"})

    asked = [body["messages"][-1]["content"] for body in app.bodies]
    assert [tags.query_id for tags in app.tags[:50]] == asked[:50]
    assert len({tags.batch_id for tags in app.tags[:50] if tags.batch_id}) == 1
    assert not app.tags[50].batch_id


def test_a_batch_of_model_calls_in_one_node_is_tagged(app: App) -> None:
    app.run(("a", lambda _: app.llm.batch(["1", "2", "3", "4"]) and {}))

    assert app.stages == ["a"] * 4
    assert sorted(tags.call_index for tags in app.tags) == [1, 2, 3, 4]
    assert len({tags.call_id for tags in app.tags}) == 4


def test_a_bare_thread_is_tagged_when_it_is_given_the_config(app: App) -> None:
    def node(state: State, config: RunnableConfig) -> State:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(app.llm.invoke, "hi", config).result()
        return {}

    app.run(("a", node))

    assert app.stages == ["a"]


# --- the user's own callbacks


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.num_runs = self.num_model_calls = 0

    def on_chain_start(self, serialized: dict[str, Any], inputs: Any, **kwargs: Any) -> None:
        self.num_runs += kwargs["parent_run_id"] is None

    def on_chat_model_start(self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **kwargs: Any) -> None:
        self.num_model_calls += 1


@pytest.mark.parametrize("where", ["call", "bound", "parent"])
def test_the_users_callbacks_hear_each_call_once(app: App, where: str) -> None:
    listener = Listener()
    graph: Pregel[Any, Any, Any, Any] = app.spec.wrap(asking_graph(app))
    config: RunnableConfig = {"callbacks": [listener]}
    if where == "bound":
        graph = graph.with_config(config)
    if where == "parent":
        inner = graph
        graph = chain_of(("parent", lambda state: inner.invoke({"q": state["q"]}) and {}))
    graph.invoke({"q": "hi"}, None if where == "bound" else config)

    assert (listener.num_runs, listener.num_model_calls) == (1, 1)
    assert len(app.tags) == 1
    assert app.tags[0].workflow_id == "wf"


def test_names_in_any_script_arrive(app: App) -> None:
    AgentSpecMiddleware(workflow_id="代码审查").wrap(chain_of(("规划", asking(app.llm)))).invoke({"q": "hi"})

    assert [(tags.workflow_id, tags.stage) for tags in app.tags] == [("代码审查", "规划")]
    assert app.bodies[0]["vllm_xargs"]["agentspec"].isascii()


# --- bad input


def test_a_builder_is_refused_with_a_hint_to_compile(app: App) -> None:
    builder: Any = StateGraph(State)

    with pytest.raises(TypeError, match=r"got StateGraph; call \.compile\(\) on it first"):
        app.spec.wrap(builder)


def test_something_else_is_refused(app: App) -> None:
    anything: Any = app.llm

    with pytest.raises(TypeError, match=r"expects a compiled graph .* got ChatOpenAI$"):
        app.spec.wrap(anything)
