"""A team of research agents in LangGraph, many topics at once, on any OpenAI-compatible server.

    python examples/research_agents.py --base-url http://127.0.0.1:8000/v1 --model MODEL

Each agent plans, searches (a tool call by JSON schema), writes and reviews, and goes back to searching until the review
finds nothing or `MAX_ROUNDS` is reached. AgentSpec comes in by one line, see `build_graph`.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypedDict, cast

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import Field, SecretStr, ValidationError

from agentspec.middleware import AgentSpecMiddleware

MAX_ROUNDS = 2
MAX_CALLS = 1 + 3 * MAX_ROUNDS  # LLM calls of one agent
MAX_TOKENS = 80
PLANNER = "You are the planner of a research team. You answer with a numbered list of questions and nothing else."
SEARCHER = "You are the searcher of a research team. You call the tool search_library with a short query."
WRITER = "You are the writer of a research team. You answer with a numbered list of findings and nothing else."
REVIEWER = "You are the reviewer of a research team. You answer with a numbered list of weaknesses and nothing else."


class Research(TypedDict):
    """State of one agent."""

    topic: str
    plan: str
    sources: Annotated[list[str], operator.add]
    report: str
    review: str
    num_rounds: int


Graph = CompiledStateGraph[Research, None, Research, Research]


@tool
def search_library(
    query: Annotated[str, Field(max_length=48)],
    kind: Literal["study", "survey", "review"],
    max_results: Annotated[int, Field(ge=1, le=3)],
) -> list[str]:
    """Find sources in the library; the same query always finds the same ones."""
    first = sum(query.encode())
    numbers = range(first, first + 7 * max_results, 7)
    return [f"{kind} of {1990 + number % 35} with {20 + number % 400} cases" for number in numbers]


def build_graph(model: BaseChatModel) -> Graph:
    """Compile the program, with every LLM call tagged for AgentSpec.

    Args:
        model: answers every stage; it must support forced tool calls.
    """
    caller = model.bind_tools([search_library], tool_choice="search_library", strict=True)

    async def plan(state: Research) -> dict[str, Any]:
        return {"plan": await _ask(model, PLANNER, f"Write three research questions about {state['topic']}.")}

    async def search(state: Research) -> dict[str, Any]:
        need = state["review"] or state["plan"]
        message = await caller.ainvoke(_messages(SEARCHER, f"Topic: {state['topic']}\n{_first_line(need)}"))
        try:
            return {"sources": search_library.invoke(message.tool_calls[0]["args"])}
        except (IndexError, ValidationError):  # a small model may run out of tokens within the call
            return {
                "sources": search_library.invoke({"query": state["topic"][:48], "kind": "review", "max_results": 1})
            }

    async def write(state: Research) -> dict[str, Any]:
        goal = f"Question: {_first_line(state['plan'])}\nSource: {state['sources'][-1]}"
        report = await _ask(model, WRITER, f"Write three findings about {state['topic']}.\n{goal}")
        return {"report": report, "num_rounds": state["num_rounds"] + 1}

    async def review(state: Research) -> dict[str, Any]:
        report = f"Report about {state['topic']}:\n{state['report']}"
        return {"review": await _ask(model, REVIEWER, f"{report}\n\nWrite two weaknesses of this report.")}

    def next_stage(state: Research) -> str:
        return END if state["num_rounds"] >= MAX_ROUNDS or not state["review"] else "search"

    builder = StateGraph(Research)
    builder.add_node("plan", plan)
    builder.add_node("search", search)
    builder.add_node("write", write)
    builder.add_node("review", review)
    builder.add_edge(START, "plan")
    builder.add_edge("plan", "search")
    builder.add_edge("search", "write")
    builder.add_edge("write", "review")
    builder.add_conditional_edges("review", next_stage, ["search", END])
    graph = builder.compile()
    graph = AgentSpecMiddleware(workflow_id="research").wrap(graph)  # the whole integration
    return graph  # noqa: RET504  # a newcomer looks for the line above


async def research(graph: Graph, topics: Sequence[str]) -> list[Research]:
    """Run one agent per topic, all at once.

    Args:
        graph: from `build_graph`.
        topics: one for each agent; it also names the agent's thread.
    """

    async def run(topic: str) -> Research:
        start = Research(topic=topic, plan="", sources=[], report="", review="", num_rounds=0)
        return cast(Research, await graph.ainvoke(start, {"configurable": {"thread_id": topic}}))

    return list(await asyncio.gather(*(run(topic) for topic in topics)))


async def _ask(model: BaseChatModel, role: str, task: str) -> str:
    return str((await model.ainvoke(_messages(role, task))).text).strip()


def _messages(role: str, task: str) -> list[SystemMessage | HumanMessage]:
    return [SystemMessage(role), HumanMessage(task)]


def _first_line(text: str) -> str:
    return text.partition("\n")[0].removeprefix("1. ")


def chat_model(base_url: str, model: str, **options: Any) -> ChatOpenAI:
    """The model as these agents use it: greedy, with short answers."""
    api_key = SecretStr(os.environ.get("OPENAI_API_KEY", "none"))
    return ChatOpenAI(
        base_url=base_url, model=model, api_key=api_key, temperature=0, max_completion_tokens=MAX_TOKENS, **options
    )


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="name that the server gives to its model")
    parser.add_argument("topics", nargs="*", default=["heat pumps in cold climates", "bees in cities"])
    arguments = parser.parse_args()
    graph = build_graph(chat_model(arguments.base_url, arguments.model))
    for result in asyncio.run(research(graph, arguments.topics)):
        print(f"# {result['topic']}\n{result['plan']}\n\n{result['report']}\n\n{result['review']}\n")


if __name__ == "__main__":
    main()
