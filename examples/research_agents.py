"""A team of research agents in LangGraph, many topics at once, on any OpenAI-compatible server.

    python examples/research_agents.py --base-url http://127.0.0.1:8000/v1 --model MODEL

Each agent plans some questions; for one question after the other it searches (a tool call by JSON schema), writes and
reviews. It stops when a review finds nothing, or after `MAX_ROUNDS`. AgentSpec comes in by one line, see `build_graph`.
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
MAX_TOKENS = 40
PLANNER = "You are the planner of a research team. You answer with a numbered list of questions and nothing else."
SEARCHER = "You are the searcher of a research team. You call search_library with a query of a few words and a kind."
WRITER = "You are the writer of a research team. You answer with a numbered list of findings and nothing else."
REVIEWER = "You are the reviewer of a research team. You answer with one weakness of the text and nothing else."


class Research(TypedDict):
    """State of one agent."""

    topic: str
    questions: list[str]
    source: str
    sections: Annotated[list[str], operator.add]
    review: str
    num_rounds: int


Graph = CompiledStateGraph[Research, None, Research, Research]


@tool
def search_library(query: Annotated[str, Field(max_length=32)], kind: Literal["study", "survey", "review"]) -> str:
    """Find a source in the library; the same query always finds the same one."""
    number = sum(query.encode())
    return f"{kind} of {1990 + number % 35} with {20 + number % 400} cases"


def build_graph(model: BaseChatModel, *, max_rounds: int = MAX_ROUNDS) -> Graph:
    """Compile the program, with every LLM call tagged for AgentSpec.

    Args:
        model: answers every stage; it must support forced tool calls.
        max_rounds: times that each agent goes through search, write and review, >= 1.
    """
    caller = model.bind_tools([search_library], tool_choice="search_library", strict=True)

    async def plan(state: Research) -> dict[str, Any]:
        plan = await _ask(model, PLANNER, f"Write two research questions about {state['topic']}.")
        return {"questions": _list_items(plan) or [state["topic"]]}

    async def search(state: Research) -> dict[str, Any]:
        message = await caller.ainvoke(_messages(SEARCHER, f"Find a source for this question: {_question(state)}"))
        try:
            return {"source": search_library.invoke(message.tool_calls[0]["args"])}
        except (IndexError, ValidationError):  # a small model may run out of tokens within the call
            return {"source": search_library.invoke({"query": state["topic"][:32], "kind": "review"})}

    async def write(state: Research) -> dict[str, Any]:
        task = f"Write two findings about {state['topic']}.\nQuestion: {_question(state)}\nSource: {state['source']}"
        return {"sections": [await _ask(model, WRITER, task)]}

    async def review(state: Research) -> dict[str, Any]:
        task = f"Text about {state['topic']}:\n{state['sections'][-1]}\n\nWrite one weakness of this text."
        return {"review": await _ask(model, REVIEWER, task), "num_rounds": state["num_rounds"] + 1}

    def next_stage(state: Research) -> str:
        return END if state["num_rounds"] >= max_rounds or not state["review"] else "search"

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
        start = Research(topic=topic, questions=[], source="", sections=[], review="", num_rounds=0)
        return cast(Research, await graph.ainvoke(start, {"configurable": {"thread_id": topic}}))

    return list(await asyncio.gather(*(run(topic) for topic in topics)))


async def _ask(model: BaseChatModel, role: str, task: str) -> str:
    return str((await model.ainvoke(_messages(role, task))).text).strip()


def _messages(role: str, task: str) -> list[SystemMessage | HumanMessage]:
    return [SystemMessage(role), HumanMessage(task)]


def _question(state: Research) -> str:
    return state["questions"][state["num_rounds"] % len(state["questions"])]


def _list_items(text: str) -> list[str]:
    return [line.partition(". ")[2] for line in text.splitlines() if ". " in line]


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
        print(f"# {result['topic']}", *result["sections"], f"Review: {result['review']}\n", sep="\n\n")


if __name__ == "__main__":
    main()
