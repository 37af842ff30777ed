"""vLLM's `ngram` rule: copy what followed the longest earlier occurrence of the request's last tokens."""

from __future__ import annotations

import numpy as np

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.methods.interface import Drafts
from agentspec.benchmarks.methods.own_text import OwnText, longest_match, row_tokens
from agentspec.sidecar.engine import StepRequest, TokenIds


def draft_ngram(tokens: TokenIds, min_ngram: int, max_ngram: int, num_speculative_tokens: int) -> TokenIds:
    """Draft from the request's own text alone.

    The longest suffix of `min_ngram` to `max_ngram` tokens that occurs before wins; of its occurrences the earliest.

    Source: vLLM 0.32, `ngram` method; behaviour, not code.
    """
    length, following = longest_match(tokens, max_ngram)
    if length < min_ngram:
        return tokens[:0]
    return tokens[following[0] : following[0] + num_speculative_tokens]


class Ngram:
    """The rule for a batch. The defaults are those that its users set most: 2 to 5 tokens, drafts of 5."""

    def __init__(self, min_ngram: int = 2, max_ngram: int = 5, num_speculative_tokens: int = 5) -> None:
        self._rule = (min_ngram, max_ngram, num_speculative_tokens)
        self._texts: dict[int, OwnText] = {}

    def warm(self, call: TokenCall) -> None:
        """Nothing of other requests is used."""

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """The prompt is part of what is searched."""
        del call, is_recorded
        self._texts[handle] = OwnText(prompt)

    def step(self, request: StepRequest) -> Drafts:
        """Each request by itself."""
        drafts = []
        for row, handle in enumerate(request.handles.tolist()):
            text = self._texts[handle]
            text.append(row_tokens(request, row))
            drafts.append(draft_ngram(text.tokens, *self._rule)[: request.max_draft_tokens[row]])
        return Drafts(np.array([len(draft) for draft in drafts], np.int32), np.concatenate(drafts), None)

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Its text is forgotten."""
        del tail, num_draft_tokens, num_accepted_tokens
        del self._texts[handle]
