"""A ReAct agent with tools: `create_agent`, wrapped in one line.

python examples/react_agent.py --base-url http://127.0.0.1:8000/v1 --model MODEL "What is 17 times 23?"
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from langchain.agents import create_agent
from langchain_core.language_models import BaseChatModel
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph.state import CompiledStateGraph
from pydantic import SecretStr

from agentspec.middleware import AgentSpecMiddleware

PROMPT = "You answer with the help of your tools. When you know the answer, say it in one line."
POPULATIONS = {"lisbon": 567_000, "oslo": 717_000, "quito": 1_763_000}


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool
def population(city: str) -> str:
    """Look up how many people live in a city."""
    number = POPULATIONS.get(city.lower())
    return f"no entry for {city}" if number is None else f"{number:,}"


def build_agent(model: BaseChatModel, spec: AgentSpecMiddleware) -> CompiledStateGraph[Any, Any, Any, Any]:
    """The agent, with every LLM call tagged."""
    return spec.wrap(create_agent(model, [multiply, population], system_prompt=PROMPT, name="react"))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="name that the server gives to its model")
    parser.add_argument("question", nargs="?", default="How many people live in Oslo?")
    arguments = parser.parse_args()
    api_key = SecretStr(os.environ.get("OPENAI_API_KEY", "none"))
    model = ChatOpenAI(base_url=arguments.base_url, model=arguments.model, api_key=api_key, temperature=0)
    spec = AgentSpecMiddleware(workflow_id="react", base_urls=[arguments.base_url])
    result = build_agent(model, spec).invoke({"messages": [("user", arguments.question)]}, {"recursion_limit": 12})
    print(result["messages"][-1].text)
    spec.report()


if __name__ == "__main__":
    main()
