"""A supervisor that hands each question to one of two sub-agents, until it has an answer.

python examples/supervisor.py --base-url http://127.0.0.1:8000/v1 --model MODEL "How far is Oslo from Quito?"
"""

from __future__ import annotations

import argparse
import os
from typing import Any, Literal

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command
from pydantic import BaseModel, SecretStr, ValidationError

from agentspec.middleware import AgentSpecMiddleware

MAX_HANDOFFS = 4
SUPERVISOR = "You lead a geographer and a calculator. Hand the question to one of them, or finish when it is answered."


class Team(MessagesState):
    """Messages so far and how often the supervisor was asked."""

    num_handoffs: int


class Handoff(BaseModel):
    """Who works next."""

    next: Literal["geographer", "calculator", "finish"]


@tool
def distance(start: str, end: str) -> str:
    """Look up the distance between two cities."""
    return f"{start} to {end}: {4000 + 37 * (len(start) + len(end))} km"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build_graph(model: BaseChatModel, spec: AgentSpecMiddleware) -> CompiledStateGraph[Team, None, Team, Team]:
    """The team, with every LLM call tagged: each sub-agent is a role with a history of its own."""
    supervisor = model.with_structured_output(Handoff, method="json_schema")
    geographer = create_agent(model, [distance], system_prompt="You know distances.", name="geographer")
    calculator = create_agent(model, [add], system_prompt="You know sums.", name="calculator")

    def supervise(state: Team) -> Command[Literal["geographer", "calculator", "__end__"]]:
        num_handoffs = state.get("num_handoffs", 0) + 1
        try:
            handoff = supervisor.invoke([SystemMessage(SUPERVISOR), *state["messages"]])
        except (ValidationError, ValueError):  # a small model may answer with half a JSON
            handoff = None
        update = {"num_handoffs": num_handoffs}
        if not isinstance(handoff, Handoff) or handoff.next == "finish" or num_handoffs > MAX_HANDOFFS:
            return Command(goto="__end__", update=update)
        return Command(goto=handoff.next, update=update)

    def working(agent: Any) -> Any:
        def work(state: Team) -> dict[str, Any]:
            answer = agent.invoke({"messages": state["messages"]}, {"recursion_limit": 12})["messages"][-1]
            return {"messages": [HumanMessage(str(answer.text), name=agent.name)]}

        return work

    builder = StateGraph(Team)
    builder.add_node("supervisor", supervise)
    builder.add_node("geographer", working(geographer))
    builder.add_node("calculator", working(calculator))
    builder.add_edge(START, "supervisor")
    builder.add_edge("geographer", "supervisor")
    builder.add_edge("calculator", "supervisor")
    return spec.wrap(builder.compile())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="name that the server gives to its model")
    parser.add_argument("question", nargs="?", default="How far is Oslo from Quito?")
    arguments = parser.parse_args()
    api_key = SecretStr(os.environ.get("OPENAI_API_KEY", "none"))
    model = ChatOpenAI(base_url=arguments.base_url, model=arguments.model, api_key=api_key, temperature=0)
    spec = AgentSpecMiddleware(workflow_id="supervisor", base_urls=[arguments.base_url])
    result = build_graph(model, spec).invoke(Team(messages=[HumanMessage(arguments.question)], num_handoffs=0))
    print(result["messages"][-1].text)
    spec.report()


if __name__ == "__main__":
    main()
