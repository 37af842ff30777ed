"""Whether a method answered as plain decoding did: token by token, in final answers, and in tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.serving.protocol import ServedRun

MAX_CHANGES_LISTED = 50

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

Outputs = Mapping[int, Sequence[int]]
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of an answer, as far as it can be read; `name` is None where it is no JSON object with a name."""

    name: str | None
    arguments: tuple[tuple[str, str], ...]


def read_tool_calls(text: str) -> list[ToolCall]:
    """The tool calls of an answer in the form that Qwen and Hermes models write; a broken one has no name."""
    found = []
    for body in _TOOL_CALL.findall(text):
        try:
            call: Any = json.loads(body)
            arguments = call.get("arguments", {})
            pairs = sorted((str(name), json.dumps(value, sort_keys=True)) for name, value in arguments.items())
            found.append(ToolCall(str(call["name"]), tuple(pairs)))
        except (ValueError, AttributeError, KeyError):
            found.append(ToolCall(None, ()))
    return found


def compare_outputs(plain: Outputs, other: Outputs, runs: Sequence[ServedRun], decode: Decode) -> Figures:
    """Compare the answers that both engines finished.

    Args:
        plain, other: answers as token ids by `call_id`. Prompts come from the traces, so a changed answer changes no
            later prompt.
        runs: that were played; the last call of each is its final answer.
        decode: token ids to text.

    Returns:
        Counts, and each change with call, run and the token at which the answers part. The traces carry no schemas of
        their tools: the fields and values of plain decoding's own call are what a call is held against.
    """
    calls = {call.call_id: call for run in runs for call in run.calls}
    last = {run.calls[-1].call_id for run in runs}
    compared = sorted(plain.keys() & other.keys())
    changed = [call_id for call_id in compared if list(plain[call_id]) != list(other[call_id])]
    tools = [(read_tool_calls(decode(plain[call_id])), read_tool_calls(decode(other[call_id]))) for call_id in compared]
    pairs = [pair for ours, theirs in tools for pair in zip(ours, theirs, strict=False)]
    final = [call_id for call_id in compared if call_id in last]
    return {
        "num_calls": len(compared),
        "num_identical_calls": len(compared) - len(changed),
        "num_final_answers": len(final),
        "num_equal_final_answers": sum(decode(plain[i]).strip() == decode(other[i]).strip() for i in final),
        "num_tool_calls": sum(max(len(ours), len(theirs)) for ours, theirs in tools),
        "num_equal_tool_names": sum(ours.name == theirs.name is not None for ours, theirs in pairs),
        "num_equal_argument_names": sum(_names(ours) == _names(theirs) for ours, theirs in pairs if ours.name),
        "num_equal_arguments": sum(ours == theirs for ours, theirs in pairs if ours.name),
        "changes": [
            {
                "run_id": calls[call_id].run_id,
                "node": calls[call_id].node,
                "call": call_id,
                "token": first_difference(plain[call_id], other[call_id]),
                "num_tokens": len(plain[call_id]),
            }
            for call_id in changed[:MAX_CHANGES_LISTED]
        ],
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs; the shorter length where one begins with the other."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _names(call: ToolCall) -> tuple[str | None, tuple[str, ...]]:
    return call.name, tuple(name for name, _ in call.arguments)
