"""The rarer shapes of a LangGraph program: what runs side by side, is cached, falls back, is nested or is served."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
from langchain.chat_models import init_chat_model
from langchain_core.caches import InMemoryCache as LlmCache
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableParallel
from langgraph.cache.memory import InMemoryCache as NodeCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.pregel import Pregel
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy
from tests.middleware_app import App, State, asking, asking_async, asking_graph, chain_of, model, running_app

from agentspec.middleware import AgentSpecMiddleware


@pytest.fixture(scope="module")
def module_app() -> Iterator[App]:
    with running_app() as app:
        yield app


@pytest.fixture
def app(module_app: App) -> App:
    module_app.server.clear()
    return module_app


# --- side by side in one node


async def _gather(app: App) -> None:
    await asyncio.gather(*(app.llm.ainvoke(f"{i}") for i in range(3)))


async def _create_tasks(app: App) -> None:
    for running in [asyncio.create_task(app.llm.ainvoke(f"{i}")) for i in range(3)]:
        await running


async def _to_thread(app: App) -> None:
    await asyncio.gather(*(asyncio.to_thread(app.llm.invoke, f"{i}") for i in range(3)))


async def _abatch(app: App) -> None:
    await app.llm.abatch(["0", "1", "2"], {"max_concurrency": 2})


async def _parallel(app: App) -> None:
    await RunnableParallel({f"part_{i}": app.llm for i in range(3)}).ainvoke("hi")


async def _copied_context(app: App) -> None:
    context = copy_context()
    thread = threading.Thread(target=lambda: context.run(lambda: [app.llm.invoke(f"{i}") for i in range(3)]))
    thread.start()
    thread.join()


@pytest.mark.parametrize("ask", [_gather, _create_tasks, _to_thread, _abatch, _parallel, _copied_context])
def test_calls_side_by_side_in_one_node_are_tagged(app: App, ask: Callable[[App], Any]) -> None:
    async def node(state: State) -> State:
        await ask(app)
        return {}

    app.runner.run(app.spec.wrap(chain_of(("a", node))).ainvoke({"q": "hi"}))

    assert app.stages == ["a"] * 3
    assert sorted(tags.call_index for tags in app.tags) == [1, 2, 3]
    assert len({tags.task_id for tags in app.tags}) == 1


def test_a_sync_node_of_an_async_run_is_tagged(app: App) -> None:
    app.runner.run(app.spec.wrap(asking_graph(app)).ainvoke({"q": "hi"}))

    assert app.stages == ["a"]


def test_runs_of_a_subgraph_side_by_side_count_their_iterations_apart(app: App) -> None:
    inner = chain_of(("draft", asking_async(app.llm)), ("draft_again", asking_async(app.llm)))

    async def node(state: State, config: RunnableConfig) -> State:
        await asyncio.gather(*(inner.ainvoke({"q": f"{i}"}, config) for i in range(3)))
        return {}

    app.runner.run(app.spec.wrap(chain_of(("writer", node))).ainvoke({"q": "hi"}))

    assert sorted((tags.stage, tags.iteration) for tags in app.tags) == [
        *[("writer/draft", 1)] * 3,
        *[("writer/draft_again", 1)] * 3,
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_keeps_its_max_concurrency(app: App, is_async: bool) -> None:
    running, most = 0, 0
    lock = threading.Lock()

    def enter(change: int) -> None:
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    async def async_node(state: State) -> State:
        enter(1)
        await app.llm.ainvoke(state["q"])
        enter(-1)
        return {}

    def node(state: State) -> State:
        enter(1)
        app.llm.invoke(state["q"])
        enter(-1)
        return {}

    graph = app.spec.wrap(chain_of(("a", async_node if is_async else node)))
    inputs, config = [State(q=f"q{i}") for i in range(12)], RunnableConfig(max_concurrency=3)
    if is_async:
        app.runner.run(graph.abatch(inputs, config))
    else:
        graph.batch(inputs, config)

    assert most <= 3
    assert app.stages == ["a"] * 12
    assert len({tags.query_id for tags in app.tags}) == 12
    assert len({tags.batch_id for tags in app.tags if tags.batch_id}) == 1


def test_abatch_as_completed_is_tagged(app: App) -> None:
    graph = app.spec.wrap(chain_of(("a", asking_async(app.llm))))

    async def drain() -> list[Any]:
        return [result async for result in graph.abatch_as_completed([State(q=f"q{i}") for i in range(4)])]

    assert len(app.runner.run(drain())) == 4
    assert app.stages == ["a"] * 4


# --- caches, retries, fallbacks


def test_langchains_cache_of_answers_still_hits(app: App) -> None:
    graph = app.spec.wrap(chain_of(("a", asking(model(app.server, cache=LlmCache())))))
    for _ in range(3):
        graph.invoke({"q": "hi"})

    assert app.stages == ["a"]


def test_langgraphs_cache_of_nodes_still_hits(app: App) -> None:
    builder = StateGraph(State)
    builder.add_node("a", asking(app.llm), cache_policy=CachePolicy(ttl=60))
    builder.add_edge(START, "a")
    graph = app.spec.wrap(builder.compile(cache=NodeCache()))
    for question in ("hi", "hi", "other"):
        graph.invoke({"q": question})

    assert [body["messages"][-1]["content"] for body in app.bodies] == ["hi", "other"]
    assert app.stages == ["a", "a"]


def _with_retry(app: App) -> Runnable[Any, Any]:
    return model(app.server, max_retries=0).with_retry(stop_after_attempt=2, wait_exponential_jitter=False)


def _with_fallbacks(app: App) -> Runnable[Any, Any]:
    return model(app.server, max_retries=0).with_fallbacks([model(app.server)])


@pytest.mark.parametrize("make", [_with_retry, _with_fallbacks])
def test_a_second_attempt_is_tagged_as_the_first_one(app: App, make: Callable[[App], Runnable[Any, Any]]) -> None:
    llm = make(app)
    app.server.num_failures_left = 1
    app.run(("a", lambda state: llm.invoke(state["q"]) and {}))

    assert [(tags.stage, tags.call_index) for tags in app.tags] == [("a", 1), ("a", 2)]
    assert len({tags.call_id for tags in app.tags}) == 2


def test_a_model_that_is_chosen_at_run_time_is_tagged(app: App) -> None:
    chosen: Any = init_chat_model(configurable_fields=("model", "model_provider", "base_url", "api_key"))
    options = {"model": "m", "model_provider": "openai", "base_url": app.server.url, "api_key": "x"}
    llm = chosen.with_retry(stop_after_attempt=2).with_config({"configurable": options})
    app.run(("a", lambda state: llm.invoke(state["q"]) and {}))

    assert app.stages == ["a"]


# --- nested graphs and state


def test_a_subgraph_with_a_thread_of_its_own_belongs_to_the_run(app: App) -> None:
    inner = chain_of(("draft", asking(app.llm)), checkpointer=InMemorySaver())
    config: RunnableConfig = {"configurable": {"thread_id": "inner"}}
    graph = chain_of(
        ("plan", asking(app.llm)),
        ("writer", lambda state: inner.invoke({"q": state["q"]}, config) and {}),
        checkpointer=InMemorySaver(),
    )
    app.spec.wrap(graph).invoke({"q": "hi"}, {"configurable": {"thread_id": "outer"}})

    # LangGraph starts a new namespace for a new thread: the path of the node around it is not known there.
    assert [(tags.stage, tags.thread_id) for tags in app.tags] == [("plan", "outer"), ("draft", "inner")]
    assert [tags.workflow_id for tags in app.tags] == ["wf", "wf"]
    assert len({tags.query_id for tags in app.tags}) == 1


def test_a_graph_three_levels_deep_is_tagged_by_its_path(app: App) -> None:
    innermost = chain_of(("write", asking(app.llm)))
    app.run(("book", chain_of(("chapter", innermost))))

    assert app.stages == ["book/chapter/write"]


def test_the_async_functional_api_is_tagged(app: App) -> None:
    @task
    async def section(number: int) -> str:
        return str((await app.llm.ainvoke(f"section {number}")).content)

    @entrypoint()
    async def essay(topic: str) -> list[str]:
        await app.llm.ainvoke(topic)
        return list(await asyncio.gather(section(1), section(2)))

    app.runner.run(app.spec.wrap(essay).ainvoke("cats"))

    assert sorted(app.stages) == ["essay", "essay/section", "essay/section"]


def test_a_run_that_failed_goes_on_from_its_checkpoint(app: App) -> None:
    graph = app.spec.wrap(
        chain_of(("a", asking(app.llm)), ("b", asking(model(app.server, max_retries=0))), checkpointer=InMemorySaver())
    )
    config: RunnableConfig = {"configurable": {"thread_id": "failed"}}
    app.server.num_failures_left = 0
    graph.invoke({"q": "hi"}, config, interrupt_before=["b"])
    app.server.num_failures_left = 1
    with pytest.raises(Exception, match="asked to fail"):
        graph.invoke(None, config)
    graph.invoke(None, config)

    assert app.stages == ["a", "b", "b"]
    assert len({tags.query_id for tags in app.tags}) == 1
    assert not graph.get_state(config).next


def test_nothing_of_ours_is_in_a_checkpoint(app: App) -> None:
    saver = InMemorySaver()
    graph = app.spec.wrap(chain_of(("a", asking(app.llm)), checkpointer=saver))
    graph.invoke({"q": "hi"}, {"configurable": {"thread_id": "t"}})

    assert "agentspec" not in repr(list(saver.list(None)))


# --- a server of graphs


async def make_graph(config: RunnableConfig, app: App) -> CompiledStateGraph[Any, Any, Any, Any]:
    """What a server calls for each run."""
    spec = AgentSpecMiddleware(workflow_id="served", base_urls=[app.server.url])
    return spec.wrap(chain_of(("a", asking_async(app.llm)), ("b", asking_async(app.llm)), name="served-graph"))


def test_a_server_that_makes_a_graph_for_each_run_gets_tagged_runs(app: App) -> None:
    config: RunnableConfig = {"configurable": {"thread_id": "t-1"}, "metadata": {"query_id": "q-1"}}

    async def serve() -> list[Any]:
        graph = await make_graph(config, app)
        # What a server does with it: its own checkpointer and store, its config, then a stream of several modes.
        served = graph.copy({"checkpointer": InMemorySaver(), "store": InMemoryStore()}).with_config(tags=["served"])
        modes: Any = ["values", "messages", "updates", "debug", "custom"]
        parts = [part async for part in served.astream({"q": "hi"}, config, stream_mode=modes, subgraphs=True)]
        assert (await served.aget_state(config)).next == ()
        return parts

    parts = app.runner.run(serve())

    assert {part[1] for part in parts} >= {"values", "messages", "updates", "debug"}
    assert [(tags.stage, tags.thread_id, tags.query_id) for tags in app.tags] == [
        ("a", "t-1", "q-1"),
        ("b", "t-1", "q-1"),
    ]


def test_what_a_server_shows_of_a_graph_is_the_same_wrapped(app: App) -> None:
    inner = chain_of(("draft", asking(app.llm)))
    plain = chain_of(("writer", inner), name="shown")
    wrapped = app.spec.wrap(plain)

    assert wrapped.get_name() == plain.get_name() == "shown"
    assert wrapped.get_graph(xray=True).to_json() == plain.get_graph(xray=True).to_json()
    for schema in ("get_input_jsonschema", "get_output_jsonschema", "get_context_jsonschema"):
        assert getattr(wrapped, schema)() == getattr(plain, schema)()
    assert [name for name, _ in wrapped.get_subgraphs(recurse=True)] == ["writer"]
    assert isinstance(wrapped, Pregel)


def test_a_wrapped_graph_is_part_of_a_langchain_pipeline(app: App) -> None:
    pipeline: Any = RunnableLambda(lambda text: State(q=str(text))) | app.spec.wrap(asking_graph(app))
    pipeline.invoke("hi")

    assert [(tags.workflow_id, tags.stage) for tags in app.tags] == [("wf", "a")]
