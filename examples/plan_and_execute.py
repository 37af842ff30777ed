"""Plan and execute: one planner, then one worker per step, side by side (`Send`), then a summary.

python examples/plan_and_execute.py --base-url http://127.0.0.1:8000/v1 --model MODEL "Move a shop to the web"
"""

from __future__ import annotations

import argparse
import operator
import os
from typing import Annotated, Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Send
from pydantic import SecretStr

from agentspec.middleware import AgentSpecMiddleware

MAX_STEPS = 4
PLANNER = "You are a planner. You answer with one step per line and nothing else."
WORKER = "You are a worker. You answer with what you did for your step, in two sentences."
WRITER = "You are a writer. You answer with one paragraph that sums the work up."


class Work(TypedDict, total=False):
    """State of the graph; `step` is that of one worker."""

    goal: str
    steps: list[str]
    step: str
    results: Annotated[list[str], operator.add]
    summary: str


def build_graph(model: BaseChatModel, spec: AgentSpecMiddleware) -> CompiledStateGraph[Work, None, Work, Work]:
    """The graph, with every LLM call tagged: all workers are one stage, so they draft from one history."""

    def ask(role: str, task: str) -> str:
        return str(model.invoke([SystemMessage(role), HumanMessage(task)]).text).strip()

    def plan(state: Work) -> dict[str, Any]:
        lines = ask(PLANNER, f"Plan at most {MAX_STEPS} steps for: {state['goal']}").splitlines()
        return {"steps": [line.strip() for line in lines if line.strip()][:MAX_STEPS] or [state["goal"]]}

    def send(state: Work) -> list[Send]:
        return [Send("execute", {"goal": state["goal"], "step": step}) for step in state["steps"]]

    def execute(state: Work) -> dict[str, Any]:
        return {"results": [ask(WORKER, f"Goal: {state['goal']}\nYour step: {state['step']}")]}

    def summarize(state: Work) -> dict[str, Any]:
        return {"summary": ask(WRITER, "\n".join(state["results"]))}

    builder = StateGraph(Work)
    builder.add_node("plan", plan)
    builder.add_node("execute", execute)
    builder.add_node("summarize", summarize)
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", send, ["execute"])
    builder.add_edge("execute", "summarize")
    builder.add_edge("summarize", END)
    return spec.wrap(builder.compile())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="name that the server gives to its model")
    parser.add_argument("goal", nargs="?", default="Move a small shop to the web")
    arguments = parser.parse_args()
    api_key = SecretStr(os.environ.get("OPENAI_API_KEY", "none"))
    model = ChatOpenAI(base_url=arguments.base_url, model=arguments.model, api_key=api_key, temperature=0)
    spec = AgentSpecMiddleware(workflow_id="plan-and-execute", base_urls=[arguments.base_url])
    print(build_graph(model, spec).invoke({"goal": arguments.goal})["summary"])
    spec.report()


if __name__ == "__main__":
    main()
