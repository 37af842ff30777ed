"""What the hook reads of one request of vLLM when it opens it: prompt, sampling, tenant."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentspec.sidecar.engine import Sampling, TokenIds


def prompt_tokens(request: Any, vocab_size: int) -> TokenIds:
    """The prompt's text; embeddings have none, and placeholders of other modalities may be no token ids."""
    if request.prompt_token_ids is None:
        return np.empty(0, np.int32)
    tokens = np.array(request.prompt_token_ids, np.int64)
    is_text = (tokens >= 0) & (tokens < vocab_size)
    if request.prompt_is_token_ids is not None:
        is_text &= np.array(request.prompt_is_token_ids, bool)
    return tokens[is_text].astype(np.int32)


def namespace_of(configured: str, request: Any) -> str:
    """The tenant of a request: each part narrows the one before. Text of another adapter is another model's text."""
    parts = [configured]
    if request.cache_salt:
        parts.append(f"salt-{_digest(request.cache_salt)}")
    if request.lora_request is not None:
        parts.append(f"lora-{_digest(request.lora_request.lora_name)}")
    return "/".join(parts)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def sampling_of(request: Any) -> Sampling:
    """How the target model samples a request that generates text."""
    params = request.sampling_params
    is_structured = bool(request.use_structured_output)
    tool = forced_tool(params.structured_outputs) if is_structured else ""
    return Sampling(params.temperature, is_structured, tool)


def forced_tool(structured_outputs: Any) -> str:
    """The tool that an output must call, as far as the constraint of its text tells; else empty.

    vLLM writes ``tool_choice: "required"`` as the schema of a list of calls, which names the tool when there is one
    alone. Of a named tool it keeps the schema of the arguments and not the name: that comes with the tag `block`.
    """
    source = getattr(structured_outputs, "json", None)
    try:
        schema: Any = json.loads(source) if isinstance(source, str) else source
        calls = schema["items"]["anyOf"] if schema["type"] == "array" else []
        names = {name for call in calls for name in _call_names(call)}
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return ""
    return names.pop() if len(names) == 1 else ""


def _call_names(call: Mapping[str, Any]) -> list[str]:
    properties = call["properties"]
    names = properties["name"]["enum"] if properties.keys() == {"name", "parameters"} else [""]
    return [name if isinstance(name, str) else "" for name in names]
