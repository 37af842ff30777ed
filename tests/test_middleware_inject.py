"""The hook into the openai client: what it does to requests, where tags go, and what happens when it breaks."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import openai._base_client
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from openai import AsyncOpenAI, OpenAI
from openai._models import FinalRequestOptions
from pydantic import BaseModel
from tests.openai_server import OpenAIServer

from agentspec.middleware import (
    AgentSpecMiddleware,
    caller,
    calls,
    destinations,
    inject,
    instrument_openai,
    langgraph,
    scope,
    uninstrument_openai,
)
from agentspec.middleware.fail_open import FailOpen, fail_open

MESSAGES: Any = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]


class Plan(BaseModel):
    """A plan."""

    title: str


@pytest.fixture
def client(server: OpenAIServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="x", max_retries=1) as client:
        yield client


def graph_of(node: Callable[[], object]) -> CompiledStateGraph[Any, Any, Any, Any]:
    async def run_async(state: MessagesState) -> dict[str, Any]:
        result = node()
        if inspect.isawaitable(result):
            await result
        return {}

    def run(state: MessagesState) -> dict[str, Any]:
        node()
        return {}

    builder = StateGraph(MessagesState)
    builder.add_node("a", run_async if inspect.iscoroutinefunction(node) else run)
    builder.add_edge(START, "a")
    return builder.compile()


def run(node: Callable[[], object], spec: AgentSpecMiddleware | None = None) -> None:
    graph = (spec or AgentSpecMiddleware(workflow_id="wf")).wrap(graph_of(node))
    if inspect.iscoroutinefunction(node):
        asyncio.run(graph.ainvoke({"messages": []}))
    else:
        graph.invoke({"messages": []})


def ask(client: OpenAI, **options: Any) -> None:
    client.chat.completions.create(model="m", messages=MESSAGES, **options)


# --- requests


def test_every_way_to_call_the_client_is_tagged(server: OpenAIServer, client: OpenAI) -> None:
    def node() -> None:
        ask(client)
        list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))
        client.chat.completions.parse(model="m", messages=MESSAGES, response_format=Plan)
        client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
        client.with_options(timeout=5).post("/responses", cast_to=object, body={"model": "m", "input": "hi"})
        client.post(f"{server.url}/completions", cast_to=object, body={"model": "m", "prompt": "hi"})

    run(node)

    assert [tags.call_index for tags in server.tags] == [1, 2, 3, 4, 5, 6]
    assert {(tags.stage, tags.call_id) for tags in server.tags} == {("a", "")}
    assert [tags.block for tags in server.tags] == ["", "", "tool_call/Plan", "", "", ""]


def test_the_async_client_is_tagged(server: OpenAIServer) -> None:
    async def node() -> None:
        async with AsyncOpenAI(base_url=server.url, api_key="x") as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
            async for _ in await client.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                pass

    run(node)

    assert [tags.stage for tags in server.tags] == ["a", "a"]


def test_requests_that_generate_no_text_are_left_alone(server: OpenAIServer, client: OpenAI) -> None:
    run(lambda: client.post("/embeddings", cast_to=object, body={"model": "m", "input": "hi"}))

    assert server.bodies == [{"model": "m", "input": "hi"}]


def test_the_clients_own_retry_sends_the_same_tags(server: OpenAIServer, client: OpenAI) -> None:
    server.num_failures_left = 1
    run(lambda: ask(client))
    first, second = server.sent

    assert first == second


def test_a_raw_call_after_a_langchain_call_does_not_inherit_its_call_id(server: OpenAIServer, client: OpenAI) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr

    def node() -> None:
        llm.invoke("hi")
        ask(client)

    run(node)

    assert [bool(tags.call_id) for tags in server.tags] == [True, False]


def test_the_users_extra_body_is_merged_and_not_changed(server: OpenAIServer, client: OpenAI) -> None:
    extra_body = {"top_k": 5, "vllm_xargs": {"mine": 1, "agentspec": '{"stage":"by hand"}'}}
    before = json.dumps(extra_body)
    run(lambda: ask(client, extra_body=extra_body))
    body = server.bodies[0]

    assert json.dumps(extra_body) == before
    assert (body["top_k"], body["vllm_xargs"]["mine"]) == (5, 1)
    assert (server.tags[0].stage, server.tags[0].workflow_id) == ("by hand", "wf")


def test_request_options_used_twice_are_tagged_anew(server: OpenAIServer, client: OpenAI) -> None:
    body = {"model": "m", "messages": MESSAGES}
    options = FinalRequestOptions.construct(method="post", url="/chat/completions", json_data=body)
    run(lambda: [client.request(object, options) for _ in range(2)])

    assert [tags.call_index for tags in server.tags] == [1, 2]


def test_a_models_extra_body_is_merged(server: OpenAIServer) -> None:
    extra_body = {"top_k": 5, "vllm_xargs": {"mine": 1, "agentspec_stage": "flat"}}
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x", extra_body=extra_body)  # type: ignore[arg-type]
    run(lambda: llm.invoke("hi"))
    body = server.bodies[0]

    assert (body["top_k"], body["vllm_xargs"]["mine"]) == (5, 1)
    assert (server.tags[0].stage, server.tags[0].workflow_id) == ("flat", "wf")


def test_xargs_that_are_no_object_are_left_to_the_server(server: OpenAIServer, client: OpenAI) -> None:
    run(lambda: ask(client, extra_body={"vllm_xargs": "wrong"}))

    assert server.bodies[0]["vllm_xargs"] == "wrong"


# --- when it breaks


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        (calls, "current_caller"),
        (calls, "may_be_tagged"),
        (calls, "payload_tags"),
        (calls, "merge_xargs"),
        (caller.Caller, "tags"),
        (scope.RunScope, "__init__"),
        (scope.RunScope, "count_call"),
        (AgentSpecMiddleware, "_open_scope"),
    ],
)
def test_whatever_breaks_the_call_goes_out_unchanged(
    owner: Any, function: str, server: OpenAIServer, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(client)
    before = fail_open.num_failures["ZeroDivisionError"]
    monkeypatch.setattr(owner, function, lambda *args, **kwargs: 1 / 0)
    run(lambda: ask(client))
    plain, untagged = server.bodies

    assert untagged == plain
    assert fail_open.num_failures["ZeroDivisionError"] == before + 1


def test_when_the_agent_middleware_breaks_its_model_call_goes_out_unchanged(
    server: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    monkeypatch.setattr(langgraph, "_loop_position", lambda messages: 1 / 0)
    create_agent(llm, [], middleware=[AgentSpecMiddleware()]).invoke({"messages": [HumanMessage("hi")]})

    assert ["vllm_xargs" in body for body in server.bodies] == [False]


def test_failures_are_counted_and_logged_once_a_minute_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    boundary = FailOpen(clock=lambda: now_s)

    for now_s in (0.0, 1.0, 59.0, 61.0):  # noqa: B007 - read by the clock
        with boundary:
            raise KeyError("text of a prompt")

    assert boundary.num_failures == {"KeyError": 4}
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "text of a prompt" not in caplog.text
    assert "test_middleware_inject.py" in caplog.text


def test_cancellation_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt), FailOpen():
        raise KeyboardInterrupt


# --- destinations


def test_a_server_that_is_not_named_gets_no_tags(server: OpenAIServer, client: OpenAI) -> None:
    for base_urls in (["http://gpu.test:8000"], [server.url]):
        run(lambda: ask(client), AgentSpecMiddleware(base_urls=base_urls))

    assert ["vllm_xargs" in body for body in server.bodies] == [False, True]


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://gpu:8000/v1/", True),
        ("http://gpu:8000", True),
        ("http://gpu:80/v1/", False),
        ("http://gpu:8000000/v1/", False),
        ("http://gpu.evil.test:8000/v1/", False),
        ("https://engine.test/v1/", True),
        ("https://engine.test:443/", True),
        ("http://engine.test/", False),
        ("https://api.openai.com/v1/", False),
    ],
)
def test_only_named_servers_get_tags(url: str, allowed: bool) -> None:
    named = destinations.endpoints(["http://gpu:8000/v1", "https://engine.test"])

    assert destinations.may_be_tagged(url, named) is allowed


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://127.0.0.1:8000/v1/", True),
        ("http://vllm.prod.svc.cluster.local/v1/", True),
        ("https://myopenai.company.test/v1/", True),
        ("http://ec2-1-2-3-4.compute.amazonaws.com:8000/v1/", True),
        ("https://api.openai.com/v1/", False),
        ("https://eu.api.openai.com/v1/", False),
        ("https://me.openai.azure.com/openai/", False),
        ("https://bedrock-runtime.us-east-1.amazonaws.com/openai/v1/", False),
        ("https://openrouter.ai/api/v1/", False),
    ],
)
def test_without_named_servers_hosted_providers_get_no_tags(url: str, allowed: bool) -> None:
    assert destinations.may_be_tagged(url, None) is allowed


# --- patching


@pytest.fixture
def uninstrumented() -> Iterator[None]:
    uninstrument_openai()
    yield
    uninstrument_openai()
    instrument_openai()


def patched() -> Callable[..., Any]:
    return openai._base_client.SyncAPIClient.request


@pytest.mark.usefixtures("uninstrumented")
def test_instrumenting_twice_patches_once() -> None:
    original = patched()

    assert instrument_openai()
    once = patched()
    assert instrument_openai()
    assert patched() is once
    uninstrument_openai()
    assert patched() is original


@pytest.mark.usefixtures("uninstrumented")
def test_a_patch_laid_over_ours_survives_uninstrumenting(monkeypatch: pytest.MonkeyPatch) -> None:
    instrument_openai()
    ours = patched()

    def others(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    monkeypatch.setattr(openai._base_client.SyncAPIClient, "request", others)
    uninstrument_openai()
    assert patched() is others

    instrument_openai()
    assert patched() is others
    monkeypatch.undo()


@pytest.mark.usefixtures("uninstrumented")
@pytest.mark.parametrize("change", ["gone", "renamed"])
def test_a_moved_hook_point_is_warned_of_once_and_nothing_is_patched(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inject, "_instrumentation", inject._Instrumentation())
    if change == "gone":
        monkeypatch.delattr(openai._base_client, "AsyncAPIClient")
    else:
        monkeypatch.setattr(openai._base_client.SyncAPIClient, "request", lambda self, call: call)
    before = patched()

    assert not instrument_openai()
    assert not instrument_openai()
    assert patched() is before
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("uninstrumented")
def test_uninstrumented_a_wrapped_graph_runs_untagged(server: OpenAIServer, client: OpenAI) -> None:
    spec = AgentSpecMiddleware()
    uninstrument_openai()
    run(lambda: ask(client), spec)

    assert ["vllm_xargs" in body for body in server.bodies] == [False]
