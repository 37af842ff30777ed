"""CPU time and bytes that the middleware adds to one LLM call, beside the same program without it."""

from __future__ import annotations

import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import openai
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from openai._models import FinalRequestOptions  # what the hook point gets

from agentspec.benchmarks.figures import Figures
from agentspec.middleware import AgentSpecMiddleware
from agentspec.middleware.inject import open_call

# Tools offered, messages so far: a plain node, a small agent, the one that the goals are set for, a large one.
SHAPES = ((0, 2), (5, 10), (20, 40), (60, 200))
NUM_NODES = 5
NUM_ROUNDS = 60
REFERENCE_SHAPE = (20, 40)
_URL = "http://127.0.0.1:1/v1"
_CALLS_PER_ROUND = 20
_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "done"}}],
    "usage": {"prompt_tokens": 900, "completion_tokens": 30, "total_tokens": 930},
    "metrics": {"speculative_decoding": {"num_draft_tokens": 20, "num_accepted_draft_tokens": 12, "num_spec_steps": 6}},
}

Graph = CompiledStateGraph[Any, Any, Any, Any]


@dataclass(frozen=True, slots=True)
class MiddlewareBench:
    """What one kind of LLM call costs; times are CPU time in µs.

    All figures of a shape are taken in turns, so that whatever else runs on the machine disturbs them alike; compare
    two machines, or two moments, by the ratios.

    Attributes:
        num_rounds: turns; the median counts.
    """

    num_rounds: int = NUM_ROUNDS

    def run(self, shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Figures]:
        """Measure each shape.

        Args:
            shapes: tools and messages of the call, at least 2 messages.

        Returns:
            For each shape: `inject_us` from the hook point on to the request that carries tags; `added_us` the wrapped
            graph less the plain one, a call: injection, callbacks, reading the answer, figures; `plain_us` of the
            plain graph, a call; `reference_us` encoding the request body of `REFERENCE_SHAPE` as JSON; `inject_ratio`
            and `added_ratio` to that; `tag_bytes` of the request body.
        """
        return [self._measure(num_tools, num_messages) for num_tools, num_messages in shapes]

    def meta(self) -> Figures:
        """Conditions of the run."""
        return {
            "num_rounds": self.num_rounds,
            "num_nodes": NUM_NODES,
            "clock": "CPU time, medians of interleaved rounds",
            "openai": openai.__version__,
            "machine": platform.platform(),
            "python": platform.python_version(),
        }

    def _measure(self, num_tools: int, num_messages: int) -> Figures:
        body, reference = request_body(num_tools, num_messages), request_body(*REFERENCE_SHAPE)
        spec = AgentSpecMiddleware(workflow_id="bench", base_urls=[_URL])
        inject_us, tag_bytes = [], []
        options = FinalRequestOptions.construct(method="post", url="/chat/completions", json_data=body)

        with _client() as client:

            def inject() -> None:
                opened = open_call(client, options, is_stream=False)
                if opened is None:
                    raise RuntimeError("the call got no tags")
                tag_bytes.append(len(opened.call.xargs["agentspec"]))

            def node(state: MessagesState) -> dict[str, Any]:
                inject_us.append(_cpu_us(inject))
                return {}

            plain = _asking_graph(client, body)
            wrapped, injecting = spec.wrap(plain), spec.wrap(_chain([node]))
            reference_us, plain_us, added_us = [], [], []
            for _ in range(self.num_rounds + 1):
                reference_us.append(_cpu_us(lambda: json.dumps(reference)))
                injecting.invoke({"messages": []})
                plain_us.append(_cpu_us(lambda: plain.invoke({"messages": []}), 1) / NUM_NODES)
                added_us.append(_cpu_us(lambda: wrapped.invoke({"messages": []}), 1) / NUM_NODES - plain_us[-1])
        # The first round fills caches.
        times = {"inject": inject_us, "added": added_us, "plain": plain_us, "reference": reference_us}
        medians = {name: statistics.median(values[1:]) for name, values in times.items()}
        return {
            "num_tools": num_tools,
            "num_messages": num_messages,
            **{f"{name}_us": value for name, value in medians.items()},
            "inject_ratio": medians["inject"] / medians["reference"],
            "added_ratio": medians["added"] / medians["reference"],
            "tag_bytes": max(tag_bytes),
        }


def request_body(num_tools: int, num_messages: int) -> dict[str, Any]:
    """A chat completion request with a system prompt of 360 characters and about 240 in each other message."""
    properties = {"path": {"type": "string"}, "limit": {"type": "integer"}}
    functions = [
        {
            "name": f"tool_{i}",
            "description": "Does it. " * 9,
            "parameters": {"type": "object", "properties": properties},
        }
        for i in range(num_tools)
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helper. " * 20}]
    messages += [
        {"role": "user" if i % 2 else "assistant", "content": f"text {i} " * 30} for i in range(1, num_messages)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    return {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}


def _client() -> openai.OpenAI:
    """A client whose requests are answered from memory."""
    # The HTTP library below the client: httpx up to openai 2, httpx2 since 3.
    http: Any = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])
    transport = http.MockTransport(lambda _request: http.Response(200, json=_ANSWER))
    return openai.OpenAI(base_url=_URL, api_key="x", http_client=openai.DefaultHttpxClient(transport=transport))


def _asking_graph(client: openai.OpenAI, body: dict[str, Any]) -> Graph:
    llm = ChatOpenAI(model="m", api_key="x", base_url=_URL)  # type: ignore[arg-type]  # SecretStr
    asking = llm.model_copy(update={"client": client.chat.completions, "root_client": client})
    bound = asking.bind_tools(body["tools"]) if "tools" in body else asking

    def node(state: MessagesState) -> dict[str, Any]:
        bound.invoke(body["messages"])
        return {}

    return _chain([node] * NUM_NODES)


def _chain(nodes: Sequence[Any]) -> Graph:
    builder = StateGraph(MessagesState)
    names = [f"node_{i}" for i in range(len(nodes))]
    for name, node in zip(names, nodes, strict=True):
        builder.add_node(name, node)
    for previous, name in zip([START, *names], names, strict=False):
        builder.add_edge(previous, name)
    return builder.compile()


def _cpu_us(call: Callable[[], object], num_calls: int = _CALLS_PER_ROUND) -> float:
    """CPU time of this process in µs a call: LangGraph may run a node in another thread."""
    begin = time.process_time_ns()
    for _ in range(num_calls):
        call()
    return (time.process_time_ns() - begin) / 1000 / num_calls
