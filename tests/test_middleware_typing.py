"""The public API as a type checker sees it: `make lint` checks this file, and each claim is a type that it finds."""

from __future__ import annotations

import inspect
from typing import Any, TypedDict, assert_type

import pytest
from langgraph.graph.state import CompiledStateGraph

import agentspec.middleware
from agentspec.middleware import AgentSpecMiddleware, AgentSpecToolMiddleware, Block, BlockGrammar, StageStats


class Question(TypedDict):
    text: str


Graph = CompiledStateGraph[Question, None, Question, Question]


def types_of_the_api(spec: AgentSpecMiddleware, graph: Graph) -> None:
    """Never called: what a type checker reads."""
    assert_type(spec.wrap(graph), Graph)
    assert_type(spec.stats(), tuple[StageStats, ...])
    assert_type(spec.stats()[0].acceptance_rate, float | None)
    AgentSpecMiddleware(workflow_id=7)  # type: ignore[arg-type]
    AgentSpecMiddleware("positional")  # type: ignore[call-arg]
    AgentSpecToolMiddleware(graph)  # type: ignore[arg-type]
    BlockGrammar("no block")  # type: ignore[arg-type]
    spec.wrap("no graph")  # type: ignore[type-var]


@pytest.mark.parametrize("name", agentspec.middleware.__all__)
def test_everything_public_is_documented_and_annotated(name: str) -> None:
    found: Any = getattr(agentspec.middleware, name)
    signature = inspect.signature(found)

    assert inspect.getdoc(found)
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in signature.parameters.values())


def test_settings_are_named() -> None:
    parameters = inspect.signature(AgentSpecMiddleware).parameters.values()

    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}
    assert Block("plan", start="a", end="b").start == "a"
