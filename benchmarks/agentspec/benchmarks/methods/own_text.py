"""The text of one request as its peers keep it, and where its end has occurred in it before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentspec.sidecar.engine import StepRequest, TokenIds


class OwnText:
    """Prompt and output of one request in one array that grows.

    Args:
        prompt: int32.
    """

    def __init__(self, prompt: TokenIds) -> None:
        self._buffer = np.empty(2 * len(prompt) + 256, np.int32)
        self._buffer[: len(prompt)] = prompt
        self._length = len(prompt)

    def append(self, tokens: TokenIds) -> None:
        """Add what the target model wrote."""
        end = self._length + len(tokens)
        if end > len(self._buffer):
            grown = np.empty(2 * end, np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        self._length = end

    @property
    def tokens(self) -> TokenIds:
        """All of it; a view."""
        return self._buffer[: self._length]


def longest_match(tokens: TokenIds, max_length: int) -> tuple[int, NDArray[np.intp]]:
    """Find where the longest suffix of a text, of at most `max_length` tokens, stands in it once more.

    Returns:
        Its length, 0 if not even the last token occurs before, and the positions that follow each of its earlier
        occurrences, ascending; none is the end of the text. Occurrences may overlap the suffix.
    """
    end = len(tokens)
    if end < 2:
        return 0, np.empty(0, np.intp)
    following = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    length = int(following.size > 0)
    while length and length < max_length:
        longer = following[following > length]
        longer = longer[tokens[longer - length - 1] == tokens[end - length - 1]]
        if not longer.size:
            break
        following = longer
        length += 1
    return length, following


def row_tokens(request: StepRequest, row: int) -> TokenIds:
    """The new tokens of one row of a step."""
    return request.token_ids[request.token_offsets[row] : request.token_offsets[row + 1]]
