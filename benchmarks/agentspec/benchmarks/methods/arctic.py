"""Arctic Inference's suffix decoding, driven as vLLM's `suffix` method drives it: one tree for all requests."""

from __future__ import annotations

import importlib
from typing import Protocol

import numpy as np

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.methods.interface import Drafts
from agentspec.benchmarks.methods.own_text import OwnText, row_tokens
from agentspec.sidecar.engine import StepRequest, TokenIds


class MissingPeerError(RuntimeError):
    """A peer is not installed; the message says how to install it."""


class SuffixDraft(Protocol):
    """What `SuffixDecodingCache.speculate` returns."""

    token_ids: list[int]
    probs: list[float]


class SuffixCache(Protocol):
    """The part of `SuffixDecodingCache` that we call."""

    def start_request(self, req_id: int, prompt_token_ids: TokenIds) -> None:
        """Begin a request."""

    def add_active_response(self, req_id: int, token_ids: TokenIds) -> None:
        """Append to the answer of a request."""

    def speculate(
        self, req_id: int, context: TokenIds, *, max_spec_tokens: int, max_spec_factor: float, min_token_prob: float
    ) -> SuffixDraft:
        """Draft what follows `context`."""

    def stop_request(self, req_id: int) -> None:
        """End a request; its answer stays in the shared tree."""

    def evict_cached_response(self, req_id: int) -> None:
        """Take the answer of a request out of the shared tree."""


def make_suffix_cache(max_tree_depth: int) -> SuffixCache:
    """A cache without a limit on the number of answers.

    Raises:
        MissingPeerError: Arctic Inference is not installed.
    """
    try:
        module = importlib.import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        raise MissingPeerError(f"Arctic Inference is not installed ({error}): run .ci/build-arctic") from error
    cache: SuffixCache = module.SuffixDecodingCache(max_tree_depth, -1)
    return cache


class Arctic:
    """The cache with vLLM's defaults: factor 1, least probability 0.1.

    Args:
        max_tree_depth: of the prompt's tree and the shared one; 24 is vLLM's default, 64 the library's.
        num_speculative_tokens: longest draft of a row.

    Raises:
        MissingPeerError: Arctic Inference is not installed.
    """

    def __init__(self, max_tree_depth: int, num_speculative_tokens: int) -> None:
        self._cache = make_suffix_cache(max_tree_depth)
        self._depth = max_tree_depth
        self._num_speculative_tokens = num_speculative_tokens
        self._texts: dict[int, OwnText] = {}
        self._num_warm = 0

    def warm(self, call: TokenCall) -> None:
        """A request without a prompt that ends at once."""
        self._num_warm += 1
        self._cache.start_request(-self._num_warm, call.output[:0])
        self._cache.add_active_response(-self._num_warm, call.output)
        self._cache.stop_request(-self._num_warm)

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """An answer that is not recorded never enters the shared tree."""
        del call
        self._cache.start_request(handle, prompt)
        if not is_recorded:
            self._cache.evict_cached_response(handle)
        self._texts[handle] = OwnText(prompt)

    def step(self, request: StepRequest) -> Drafts:
        """Append and speculate, request by request."""
        lengths = np.zeros(len(request.handles), np.int32)
        token_ids: list[int] = []
        survival: list[float] = []
        for row, handle in enumerate(request.handles.tolist()):
            text, new = self._texts[handle], row_tokens(request, row)
            if len(new):
                text.append(new)
                self._cache.add_active_response(handle, new)
            if not len(text.tokens):
                continue
            draft = self._cache.speculate(
                handle,
                text.tokens[-self._depth :],
                max_spec_tokens=min(self._num_speculative_tokens, int(request.max_draft_tokens[row])),
                max_spec_factor=1.0,
                min_token_prob=0.1,
            )
            lengths[row] = len(draft.token_ids)
            token_ids += draft.token_ids
            survival += draft.probs
        return Drafts(lengths, np.array(token_ids, np.int32), np.array(survival, np.float32))

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """The answer stays in the shared tree."""
        del num_draft_tokens, num_accepted_tokens
        if len(tail):
            self._cache.add_active_response(handle, tail)
        self._cache.stop_request(handle)
        del self._texts[handle]
