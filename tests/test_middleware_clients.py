"""Clients that do not end in the openai package, threads that a node starts by itself, and where the hook sits."""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from langchain.chat_models import init_chat_model
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from openai import OpenAI
from tests.openai_server import OpenAIServer

from agentspec.middleware import (
    AgentSpecMiddleware,
    inject,
    instrument_httpx,
    instrument_openai,
    instrument_threads,
    uninstrument_httpx,
    uninstrument_threads,
)

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CLIENTS = ("httpx", "httpx2")


@pytest.fixture
def with_httpx() -> Iterator[list[str]]:
    yield instrument_httpx()
    uninstrument_httpx()


@pytest.fixture
def with_threads() -> Iterator[None]:
    instrument_threads()
    yield
    uninstrument_threads()


def run(node: Callable[[], object], spec: AgentSpecMiddleware | None = None) -> None:
    def call(state: MessagesState) -> dict[str, Any]:
        node()
        return {}

    graph = StateGraph(MessagesState).add_node("a", call).add_edge(START, "a").compile()
    (spec or AgentSpecMiddleware(workflow_id="wf")).wrap(graph).invoke({"messages": [HumanMessage("hi")]})


def is_tagged(server: OpenAIServer) -> list[bool]:
    return ["vllm_xargs" in body for body in server.bodies]


# --- the hook point


def test_the_openai_client_still_has_the_hook_point_that_we_know() -> None:
    """Fails when a new openai package moves it: then `inject.py` needs a look, and the bound in pyproject.toml too."""
    assert inject.hook_points() is not None, f"openai {openai.__version__} has no known hook point"
    assert instrument_openai()


@pytest.mark.parametrize("name", ["SyncAPIClient", "AsyncAPIClient"])
def test_every_request_of_the_openai_client_passes_the_hook_point(name: str) -> None:
    methods = vars(vars(openai._base_client)[name])

    for method in ("get", "post", "patch", "put", "delete"):
        assert "self.request(" in inspect.getsource(methods[method])


def test_the_parts_of_a_stream_that_we_follow_are_there(server: OpenAIServer) -> None:
    with OpenAI(base_url=server.url, api_key="x") as client:
        messages: Any = BODY["messages"]
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)

        assert hasattr(stream, "_iterator")
        list(stream)
        raw = client.chat.completions.with_raw_response.create(model="m", messages=messages)
        assert type(raw).__name__ == "LegacyAPIResponse"
        assert json.loads(raw.http_response.content)["object"] == "chat.completion"


def test_init_chat_model_is_tagged(server: OpenAIServer) -> None:
    llm = init_chat_model("openai:m", base_url=server.url, api_key="x")
    run(lambda: llm.invoke("hi"))

    assert [tags.stage for tags in server.tags] == ["a"]


# --- httpx


def test_both_httpx_packages_are_instrumented(with_httpx: list[str]) -> None:
    assert with_httpx == list(CLIENTS)
    assert instrument_httpx() == list(CLIENTS)


@pytest.mark.usefixtures("with_httpx")
@pytest.mark.parametrize("name", CLIENTS)
def test_a_clients_own_request_is_tagged_and_measured(name: str, server: OpenAIServer) -> None:
    module = pytest.importorskip(name)
    server.drafting = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}
    spec = AgentSpecMiddleware(workflow_id="wf", group_header=True)
    answers: list[Any] = []

    def node() -> None:
        with module.Client() as client:
            answers.append(client.post(f"{server.url}/chat/completions", json=BODY, headers={"x-mine": "1"}).json())

    run(node, spec)
    (row,) = spec.stats()

    assert [(tags.workflow_id, tags.stage) for tags in server.tags] == [("wf", "a")]
    assert {key: value for key, value in server.bodies[0].items() if key != "vllm_xargs"} == BODY
    assert server.headers[0]["x-mine"] == "1"
    assert server.headers[0]["x-agentspec-group"]
    assert answers[0]["choices"][0]["message"]["content"] == "an answer"
    assert (row.num_calls, row.output_tokens, row.accepted_tokens) == (1, 3, 6)


@pytest.mark.usefixtures("with_httpx")
def test_an_async_client_and_a_stream_are_tagged(server: OpenAIServer) -> None:
    spec = AgentSpecMiddleware(workflow_id="wf")
    lines: list[str] = []

    async def node(state: MessagesState) -> dict[str, Any]:
        url = f"{server.url}/chat/completions"
        async with httpx.AsyncClient() as client:
            await client.post(url, json=BODY)
            async with client.stream("POST", url, json={**BODY, "stream": True}) as response:
                lines.extend([line async for line in response.aiter_lines() if line])
        return {}

    graph = StateGraph(MessagesState).add_node("a", node).add_edge(START, "a").compile()
    asyncio.run(spec.wrap(graph).ainvoke({"messages": []}))

    assert [tags.call_index for tags in server.tags] == [1, 2]
    assert lines[-1] == "data: [DONE]"
    assert spec.stats()[0].num_calls == 2


@pytest.mark.usefixtures("with_httpx")
def test_a_request_of_the_openai_client_is_tagged_once(server: OpenAIServer) -> None:
    spec = AgentSpecMiddleware(workflow_id="wf")
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    run(lambda: llm.invoke("hi"), spec)

    assert [tags.call_index for tags in server.tags] == [1]
    assert spec.stats()[0].num_calls == 1


@pytest.mark.usefixtures("with_httpx")
def test_other_requests_are_left_alone(server: OpenAIServer) -> None:
    def node() -> None:
        with httpx.Client() as client:
            client.post(f"{server.url}/embeddings", json=BODY)
            client.post(f"{server.url}/chat/completions", content=iter([json.dumps(BODY).encode()]), headers=LENGTH)

    run(node)
    with httpx.Client() as client:
        client.post(f"{server.url}/chat/completions", json=BODY)

    assert is_tagged(server) == [False, False, False]


LENGTH = {"content-length": str(len(json.dumps(BODY)))}


def test_httpx_is_left_alone_unless_asked_for(server: OpenAIServer) -> None:
    original = httpx.Client.send
    instrument_httpx()
    uninstrument_httpx()
    run(lambda: httpx.post(f"{server.url}/chat/completions", json=BODY))

    assert httpx.Client.send is original
    assert is_tagged(server) == [False]


def test_a_module_without_clients_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'json'"):
        instrument_httpx("json")
    with pytest.raises(ImportError):
        instrument_httpx("no_such_module")


# --- threads


@pytest.mark.parametrize("is_instrumented", [False, True])
def test_bare_threads_belong_to_the_run_when_asked_for(server: OpenAIServer, is_instrumented: bool) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr

    def node() -> None:
        thread = threading.Thread(target=llm.invoke, args=("hi",))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(2) as pool:
            pool.submit(llm.invoke, "hi").result()
            list(pool.map(llm.invoke, ["hi"]))

    if is_instrumented:
        instrument_threads()
    try:
        run(node)
    finally:
        uninstrument_threads()

    assert is_tagged(server) == [is_instrumented] * 3


@pytest.mark.usefixtures("with_threads")
def test_run_in_executor_belongs_to_the_run(server: OpenAIServer) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr

    async def node(state: MessagesState) -> dict[str, Any]:
        await asyncio.get_running_loop().run_in_executor(None, llm.invoke, "hi")
        return {}

    graph = StateGraph(MessagesState).add_node("a", node).add_edge(START, "a").compile()
    asyncio.run(AgentSpecMiddleware(workflow_id="wf").wrap(graph).ainvoke({"messages": []}))

    assert [tags.stage for tags in server.tags] == ["a"]


@pytest.mark.usefixtures("with_threads")
def test_a_pool_that_outlives_a_run_does_not_belong_to_it(server: OpenAIServer) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    with ThreadPoolExecutor(1) as pool:
        run(lambda: pool.submit(llm.invoke, "hi").result())
        pool.submit(llm.invoke, "hi").result()

    assert is_tagged(server) == [True, False]


def test_threads_are_given_back(server: OpenAIServer) -> None:
    originals = threading.Thread.start, ThreadPoolExecutor.submit
    instrument_threads()
    instrument_threads()
    assert threading.Thread.start is not originals[0]
    uninstrument_threads()

    assert (threading.Thread.start, ThreadPoolExecutor.submit) == originals
