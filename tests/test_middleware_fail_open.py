"""Whatever of ours raises, at whatever place: the user's call goes out, with the user's content."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from openai import OpenAI
from tests.openai_server import OpenAIServer

import agentspec.middleware
from agentspec.middleware import AgentSpecMiddleware

PREFIX = "agentspec.middleware."
# What the user calls, or what only sets a context variable; and what is asked when a middleware is made.
NOT_IN_A_CALL = {
    *("bound", "stage", "_marked", "_check_mark", "in_batch", "instrument_openai", "uninstrument_openai"),
    *("in_model_call", "in_tool_call", "hook_points", "new_batch_id"),
    *("check_name", "check_grammars", "check_prompt_versions", "check_switch", "check_hash_key", "endpoints"),
    *("instrument_httpx", "uninstrument_httpx", "instrument_threads", "uninstrument_threads"),
    *("_sync_send", "_async_send", "_submit", "_start", "_patch", "_modules", "_tagging_class", "table"),
}
# The shells around the user's call, each of which holds its boundaries, and what runs no code of ours in a call.
SHELLS = {
    *("inject._Instrumentation", "langgraph.AgentSpecMiddleware", "tool_calls.AgentSpecToolMiddleware"),
    *("fail_open.FailOpen", "grammar.Block", "grammar.BlockGrammar"),
}
SHELL_METHODS = {
    *("calls.TaggedCall.failing", "calls.TaggedCall.finish", "calls.TaggedCall.fail"),
    *("inject.OpenCall.answered", "inject.OpenCall.sending"),
    *("inject._followed", "inject._followed_async", "inject._closing", "inject._note"),
    *("http_clients._opened", "http_clients._answered", "threads._carried"),
    *("settings.PromptVersions.__init__", "feedback.Feedback.__init__", "scope.add_tool_call"),
    *("feedback.Feedback.stats", "scope.ScopeHandler.__init__", "telemetry._Instruments.__init__"),
}


def our_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(PREFIX) and module is not None]


def places() -> Iterator[tuple[str, Any, str]]:
    """Name, owner and attribute of each function that may run within a call."""
    for module in our_modules():
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != module.__name__ or name in NOT_IN_A_CALL:
                continue
            short = f"{module.__name__.removeprefix(PREFIX)}.{name}"
            if inspect.isfunction(value) or hasattr(value, "cache_clear"):
                yield short, module, name
            elif inspect.isclass(value) and short not in SHELLS:
                for method, function in vars(value).items():
                    is_ours = inspect.isfunction(function) and (not method.startswith("__") or method == "__init__")
                    if is_ours and "_tagging" not in method:
                        yield f"{short}.{method}", value, method


PLACES = {name: (owner, attribute) for name, owner, attribute in places() if name not in SHELL_METHODS}


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError


@pytest.fixture(scope="module")
def client(module_server: OpenAIServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=module_server.url, api_key="x", max_retries=0) as client:
        yield client


def new_spec() -> AgentSpecMiddleware:
    return AgentSpecMiddleware(workflow_id="wf", grammars="chat", hash_ids=True, group_header=True)


def run(server: OpenAIServer, client: OpenAI, spec: AgentSpecMiddleware) -> tuple[list[Any], list[Any]]:
    """What the server got, without our tags, and what the caller got: a plain call, a stream, LangChain, a tool."""
    server.clear()
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    messages: Any = [{"role": "user", "content": "hi"}]
    answers: list[Any] = []

    @tool
    def consult(x: str) -> str:
        """Ask the model."""
        return str(llm.invoke(x).content)

    def node(state: MessagesState) -> dict[str, Any]:
        answers.append(client.chat.completions.create(model="m", messages=messages).choices[0].message.content)
        stream = client.chat.completions.create(model="m", messages=messages, stream=True)
        answers.extend(chunk.choices[0].delta.content for chunk in stream)
        answers.append(llm.invoke("hi").content)
        answers.append(consult.invoke({"x": "hi"}))
        return {}

    graph = StateGraph(MessagesState).add_node("a", node).add_edge(START, "a").compile()
    spec.wrap(graph).invoke({"messages": [HumanMessage("hi")]}, {"configurable": {"thread_id": "t"}})
    bodies = [{key: value for key, value in body.items() if key != "vllm_xargs"} for body in server.bodies]
    return bodies, answers


@pytest.fixture(scope="module")
def whole_run(module_server: OpenAIServer, client: OpenAI) -> tuple[list[Any], list[Any]]:
    return run(module_server, client, new_spec())


def test_the_places_are_found() -> None:
    assert {"calls.tag_call", "caller.Caller.tags", "scope.RunScope.count_call", "tags._prompt_hash"} <= set(PLACES)
    assert len(PLACES) > 60
    assert agentspec.middleware.__name__ + "." == PREFIX


@pytest.mark.parametrize("name", sorted(PLACES))
def test_wherever_it_raises_the_calls_go_out_and_come_back(
    name: str,
    module_server: OpenAIServer,
    client: OpenAI,
    whole_run: tuple[list[Any], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = new_spec()
    owner, attribute = PLACES[name]
    original = vars(owner)[attribute]
    monkeypatch.setattr(owner, attribute, broken)
    for module in our_modules():  # who imported it by name
        if vars(module).get(attribute) is original:
            monkeypatch.setattr(module, attribute, broken)

    assert run(module_server, client, spec) == whole_run
