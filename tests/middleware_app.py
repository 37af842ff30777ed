"""The ground of the middleware's tests: a server, a model that asks it, and graphs of nodes that ask the model."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from tests.openai_server import Body, OpenAIServer, running_server
from typing_extensions import TypedDict

from agentspec.middleware import AgentSpecMiddleware
from agentspec.sidecar.tags import Tags

Graph = CompiledStateGraph[Any, Any, Any, Any]


class State(TypedDict, total=False):
    q: str
    out: Annotated[list[str], operator.add]


@dataclass
class App:
    """A server, a model that asks it, and the middleware under test."""

    server: OpenAIServer
    llm: ChatOpenAI
    spec: AgentSpecMiddleware
    runner: asyncio.Runner

    @property
    def bodies(self) -> list[Body]:
        return self.server.bodies

    @property
    def tags(self) -> list[Tags]:
        return self.server.tags

    @property
    def stages(self) -> list[str]:
        return [tags.stage for tags in self.tags]

    def run(self, *nodes: tuple[str, Any]) -> None:
        self.spec.wrap(chain_of(*nodes)).invoke({"q": "hi"})


def model(server: OpenAIServer, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", base_url=server.url, api_key="x", **options)  # type: ignore[arg-type]  # SecretStr


def chain_of(*nodes: tuple[str, Any], **compile_options: Any) -> Graph:
    builder = StateGraph(State)
    for name, node in nodes:
        builder.add_node(name, node)
    for previous, (name, _) in zip([START, *(name for name, _ in nodes)], nodes, strict=False):
        builder.add_edge(previous, name)
    return builder.compile(**compile_options)


def asking(llm: ChatOpenAI) -> Any:
    def node(state: State) -> State:
        llm.invoke([SystemMessage("You help."), HumanMessage(state["q"])])
        return {"out": ["done"]}

    return node


def asking_graph(app: App) -> Graph:
    return chain_of(("a", asking(app.llm)))


def asking_async(llm: ChatOpenAI) -> Any:
    async def node(state: State) -> State:
        await llm.ainvoke(state["q"])
        return {"out": ["done"]}

    return node


@contextmanager
def running_app() -> Iterator[App]:
    """An app with one event loop for all: langchain-openai keeps its async HTTP client for the whole process."""
    with running_server() as server, asyncio.Runner() as runner:
        yield App(server, model(server), AgentSpecMiddleware(workflow_id="wf"), runner)
