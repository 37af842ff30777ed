"""What the hooks read of one request of vLLM: prompt, tags, sampling, tenant, and how it ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentspec.sidecar.engine import FinishReason, Sampling, TokenIds
from agentspec.sidecar.tags import UNTAGGED, Tags, TagsError, decode_tags

from .mailbox import Fallbacks

FINISH_REASONS = {
    "FINISHED_STOPPED": FinishReason.STOP,
    "FINISHED_LENGTH_CAPPED": FinishReason.LENGTH,
    "FINISHED_IGNORED": FinishReason.LENGTH,
    "FINISHED_REPETITION": FinishReason.LENGTH,
    "FINISHED_ABORTED": FinishReason.ABORT,
}
"""By the name of vLLM's `RequestStatus`; every other one is an error."""

MAX_TRACEPARENT_LENGTH = 128
SAMPLING_EPSILON = 1e-5  # vLLM takes a smaller min_p for none


class PromptReader:
    """Reads the text of a prompt in slices: a long one at once would hold a step up for milliseconds.

    Embeddings have no text, and placeholders of other modalities may be no token ids.

    Args:
        request: vLLM's.
        vocab_size: token ids of text are below it.
    """

    def __init__(self, request: Any, vocab_size: int) -> None:
        self._token_ids = request.prompt_token_ids or []
        self._is_text = request.prompt_is_token_ids
        self._vocab_size = vocab_size
        self._slices: list[TokenIds] = []
        self._num_read = 0

    @property
    def num_left(self) -> int:
        """Positions of the prompt that are not read yet."""
        return len(self._token_ids) - self._num_read

    def read(self, num_tokens: int) -> None:
        """Read on by at most so many positions."""
        begin, end = self._num_read, min(self._num_read + num_tokens, len(self._token_ids))
        tokens = np.array(self._token_ids[begin:end], np.int64)
        is_text = (tokens >= 0) & (tokens < self._vocab_size)
        if self._is_text is not None:
            is_text &= np.array(self._is_text[begin:end], bool)
        self._slices.append(tokens[is_text].astype(np.int32))
        self._num_read = end

    def tokens(self) -> TokenIds:
        """The text read so far."""
        return self._slices[0] if len(self._slices) == 1 else np.concatenate([np.empty(0, np.int32), *self._slices])


def traceparent_of(request: Any) -> str:
    """W3C trace context that the request came with; empty: none."""
    traceparent = (request.trace_headers or {}).get("traceparent", "")
    return traceparent if len(traceparent) <= MAX_TRACEPARENT_LENGTH else ""


def tags_of(params: Any, fallbacks: Fallbacks) -> Tags:
    """The tags of a request; those that are not version 1 are counted and dropped."""
    try:
        return decode_tags(params.extra_args)
    except TagsError as error:
        fallbacks.note("bad_tags", error)
        return UNTAGGED


def longest_draft(params: Any, tags: Tags, limit: int) -> int:
    """Draft tokens that a request may have in a step, at most `limit`."""
    return min(limit, tags.max_draft_tokens) if tags.speculate and can_verify(params) else 0


def finish_reason(request: Any) -> FinishReason:
    """How a request of vLLM's scheduler ended."""
    return FINISH_REASONS.get(request.status.name, FinishReason.ERROR)


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


def can_verify(params: Any) -> bool:
    """Whether vLLM can verify drafts of a request: its rejection sampler knows neither `min_p` nor `logit_bias`."""
    return params.min_p <= SAMPLING_EPSILON and not params.logit_bias


def keeps_batch_plain(params: Any) -> bool:
    """Whether a request gets wrong log-probabilities, or stops the engine, as soon as any row of its batch has a draft.

    With `logprob_token_ids` (vLLM's scoring API) the rejection sampler mixes up log-probabilities of single tokens and
    of the whole vocabulary.
    """
    return bool(params.logprob_token_ids)


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
