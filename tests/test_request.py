"""What the hook reads of a request of vLLM: prompt, tenant, sampling."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentspec.serving_patch.request import PromptReader, forced_tool, namespace_of, sampling_of, traceparent_of
from agentspec.sidecar.engine import Sampling


def test_placeholders_and_embeddings_are_no_prompt_text() -> None:
    def prompt(token_ids: list[int] | None, is_text: list[bool] | None = None) -> Any:
        request = SimpleNamespace(prompt_token_ids=token_ids, prompt_is_token_ids=is_text)
        reader = PromptReader(request, 100)
        while reader.num_left:
            reader.read(2)
        tokens = reader.tokens()
        assert tokens.dtype == np.int32
        assert tokens.flags.c_contiguous
        return tokens.tolist()

    assert prompt([1, 100, 2, -1, 99, 1 << 40]) == [1, 2, 99]
    assert prompt([1, 2, 3], [True, False, True]) == [1, 3]
    assert prompt(None) == []
    assert prompt([]) == []


def test_salts_and_adapters_of_one_engine_share_nothing() -> None:
    adapters = [None, SimpleNamespace(lora_name="a"), SimpleNamespace(lora_name="b")]
    names = {
        namespace_of("team", SimpleNamespace(cache_salt=salt, lora_request=adapter))
        for salt in (None, "a")
        for adapter in adapters
    }

    assert len(names) == 6
    assert all(name == "team" or name.startswith("team/") for name in names)


def test_trace_context_is_the_requests_unless_it_is_longer_than_the_contract_takes() -> None:
    headers: list[Any] = [None, {}, {"tracestate": "x"}, {"traceparent": "00-a-b-01"}, {"traceparent": "0" * 129}]

    assert ["", "", "", "00-a-b-01", ""] == [traceparent_of(SimpleNamespace(trace_headers=each)) for each in headers]


def constrained(schema: Any) -> Any:
    return SimpleNamespace(json=schema)


def required(*tools: str) -> dict[str, Any]:
    """vLLM's schema for ``tool_choice: "required"``."""
    calls = [
        {"properties": {"name": {"type": "string", "enum": [tool]}, "parameters": {}}, "required": ["name"]}
        for tool in tools
    ]
    return {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}


def test_required_call_of_the_only_tool_names_it() -> None:
    assert forced_tool(constrained(required("search"))) == "search"
    assert forced_tool(constrained(json.dumps(required("search")))) == "search"


@pytest.mark.parametrize(
    "schema",
    [
        None,
        "{",
        "[" * 100_000,
        required(),
        required("search", "edit"),
        {"type": "object", "properties": {"q": {"type": "string"}}},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"anyOf": [{"properties": {"name": {"enum": ["Bo"]}}}]}},
        {"type": "array", "items": {"anyOf": [{"properties": {"name": {"enum": [7]}, "parameters": {}}}]}},
        {"type": "array", "items": {"anyOf": [{"properties": {"name": {"enum": [["x"]]}, "parameters": {}}}]}},
        [],
        True,
    ],
)
def test_any_other_constraint_names_no_tool(schema: Any) -> None:
    assert forced_tool(constrained(schema)) == ""


def test_sampling_is_that_of_the_request() -> None:
    params = SimpleNamespace(temperature=0.5, structured_outputs=None)
    forced = SimpleNamespace(temperature=0.0, structured_outputs=constrained(required("search")))

    assert sampling_of(SimpleNamespace(sampling_params=params, use_structured_output=False)) == Sampling(0.5)
    assert sampling_of(SimpleNamespace(sampling_params=forced, use_structured_output=True)) == Sampling(
        0.0, is_structured=True, forced_tool="search"
    )
