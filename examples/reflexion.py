"""A Reflexion-style code loop: write code, check it, reflect on what failed, write again.

    python examples/reflexion.py --base-url http://127.0.0.1:8000/v1 --model MODEL

The check only parses the code: nothing that a model wrote is run.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from typing import Any, TypedDict

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import SecretStr

from agentspec.middleware import AgentSpecMiddleware, Block, BlockGrammar

MAX_ROUNDS = 3
CODER = "You are a programmer. You answer with one Python code block and nothing else."
CRITIC = "You are a reviewer. You answer with one sentence that says what to change."
# Answers of `write` are code from their fence on; those of `reflect` have no markers.
CODE = BlockGrammar(Block("code", start="```python", end="```", anchor="line"))


class Attempt(TypedDict, total=False):
    """State of the loop."""

    task: str
    function: str
    code: str
    error: str
    reflection: str
    num_rounds: int


def build_graph(model: BaseChatModel, spec: AgentSpecMiddleware) -> CompiledStateGraph[Attempt, None, Attempt, Attempt]:
    """The loop, with every LLM call tagged: a second attempt drafts from the first one's code."""

    def ask(role: str, task: str) -> str:
        return str(model.invoke([SystemMessage(role), HumanMessage(task)]).text).strip()

    def write(state: Attempt) -> dict[str, Any]:
        task = f"Task: {state['task']}\nName the function {state['function']}."
        if state.get("reflection"):
            task += f"\nYour last code:\n{state['code']}\nWhat to change: {state['reflection']}"
        return {"code": _code(ask(CODER, task)), "num_rounds": state.get("num_rounds", 0) + 1}

    def test(state: Attempt) -> dict[str, Any]:
        return {"error": _error(state["code"], state["function"])}

    def reflect(state: Attempt) -> dict[str, Any]:
        return {"reflection": ask(CRITIC, f"Code:\n{state['code']}\nError: {state['error']}")}

    builder = StateGraph(Attempt)
    builder.add_node("write", write)
    builder.add_node("test", test)
    builder.add_node("reflect", reflect)
    builder.add_edge(START, "write")
    builder.add_edge("write", "test")
    builder.add_conditional_edges(
        "test", lambda state: "reflect" if state["error"] and state["num_rounds"] < MAX_ROUNDS else END
    )
    builder.add_edge("reflect", "write")
    return spec.wrap(builder.compile())


def _code(answer: str) -> str:
    block = re.search(r"```(?:python)?\n(.*?)(?:```|\Z)", answer, flags=re.DOTALL)
    return (block[1] if block else answer).strip()


def _error(code: str, function: str) -> str:
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}"
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return "" if function in names else f"no function {function}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True, help="name that the server gives to its model")
    parser.add_argument("task", nargs="?", default="Return the median of a list of numbers.")
    parser.add_argument("--function", default="median", help="name that the function must have")
    arguments = parser.parse_args()
    api_key = SecretStr(os.environ.get("OPENAI_API_KEY", "none"))
    model = ChatOpenAI(base_url=arguments.base_url, model=arguments.model, api_key=api_key, temperature=0)
    spec = AgentSpecMiddleware(workflow_id="reflexion", base_urls=[arguments.base_url], grammars={"write": CODE})
    result = build_graph(model, spec).invoke({"task": arguments.task, "function": arguments.function})
    print(result["code"], f"# after {result['num_rounds']} rounds: {result['error'] or 'no error'}", sep="\n")
    spec.report()


if __name__ == "__main__":
    main()
