"""A model of vLLM's GPU suffix drafter with adaptive verification: what it drafts and how much of it is verified."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.corpus import TokenCall
from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.benchmarks.methods.interface import Drafts
from agentspec.benchmarks.methods.own_text import OwnText, longest_match, row_tokens
from agentspec.sidecar.engine import StepRequest, TokenIds

MAX_DEPTH = 24
SLOTS = 8  # documents that a key remembers
PROMPT_CONTEXT = 3  # tokens of the prompt's end that are stored before an answer
HALF_LIFE_STEPS = 1024
_KEY_LENGTHS = (4, 2)
_NUM_LENGTH_BUCKETS = 9
_SEPARATOR = -1


class SharedText:
    """Answers of finished requests, found by the last 2 and the last 4 tokens before a position.

    A key has eight slots; a document writes to the slot of its number modulo eight, and there the newest position of
    the newest document stays.
    """

    def __init__(self) -> None:
        self._tokens = np.full(1 << 16, _SEPARATOR, np.int32)
        self._length = MAX_DEPTH  # room before the first document, so that a look back never leaves the array
        self._num_documents = 0
        self._slots: dict[tuple[int, ...], list[int]] = {}

    def append(self, document: TokenIds) -> None:
        """Add the answer of a finished request, with the end of its prompt before it."""
        begin, end = self._length, self._length + len(document)
        while end + MAX_DEPTH + 64 > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.full_like(self._tokens, _SEPARATOR)])
        self._tokens[begin:end] = document
        slot = self._num_documents % SLOTS
        newest: dict[tuple[int, ...], int] = {}
        tokens = document.tolist()
        for position in range(2, len(tokens)):
            newest[tokens[position - 2], tokens[position - 1]] = begin + position
            if position >= 4:
                newest[tuple(tokens[position - 4 : position])] = begin + position
        for key, position in newest.items():
            self._slots.setdefault(key, [0] * SLOTS)[slot] = position
        self._length = end + 1
        self._num_documents += 1

    def draft(self, tail: TokenIds, max_length: int) -> tuple[int, list[int]]:
        """Draft what followed the end of a text in other answers.

        For each match length that occurs, the candidates that match at least as far vote token by token; the chain
        with the highest sum of shares wins, of equal ones that of the longer match.

        Args:
            tail: the last tokens of the text, at most `MAX_DEPTH`.
            max_length: longest draft.

        Returns:
            Match length and draft; 0 and nothing when no candidate matches.
        """
        positions, matches = self._candidates(tail)
        if not len(positions):
            return 0, []
        texts = self._tokens[positions[:, None] + np.arange(max_length)]
        best = (-1.0, 0)
        best_chain: list[int] = []
        for match in sorted(set(matches.tolist())):
            is_alive = matches >= match
            score, chain = _vote([row.tolist() for row in texts[is_alive]], positions[is_alive].tolist())
            if (score, match) > best:
                best, best_chain = (score, match), chain
        return best[1], best_chain

    def _candidates(self, tail: TokenIds) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Positions whose text before them ends as `tail` does, each once, and how many tokens they share."""
        keys = [tuple(tail[-length:].tolist()) for length in _KEY_LENGTHS if len(tail) >= length]
        found = {position: len(key) for key in reversed(keys) for position in self._slots.get(key, ()) if position}
        positions = np.fromiter(found, np.int64)
        if not len(positions):
            return positions, np.empty(0, np.intp)
        before = self._tokens[positions[:, None] - 1 - np.arange(len(tail))]
        is_match = before == tail[::-1]
        matches = np.where(is_match.all(axis=1), len(tail), is_match.argmin(axis=1))
        is_used = matches >= np.fromiter(found.values(), np.intp)
        is_used &= self._tokens[positions] != _SEPARATOR
        return positions[is_used], matches[is_used]


def _vote(texts: list[list[int]], positions: list[int]) -> tuple[float, list[int]]:
    """The most frequent continuation, token by token; ties go to the newest position. Returns score and chain."""
    alive = sorted(zip(positions, texts, strict=True), reverse=True)
    share, score, chain = 1.0, 0.0, []
    for depth in range(len(texts[0])):
        counts: dict[int, int] = {}
        for _, text in alive:
            if text[depth] != _SEPARATOR:
                counts[text[depth]] = counts.get(text[depth], 0) + 1
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)  # of equal ones the first, which is the newest
        share *= counts[token] / len(alive)
        score += share
        chain.append(token)
        alive = [(position, text) for position, text in alive if text[depth] == token]
    return score, chain


def length_bucket(match_length: int) -> int:
    """Match lengths whose drafts share their acceptance statistics: 1 to 6, 7-10, 11-20, more."""
    if match_length <= 6:
        return match_length - 1
    return 6 if match_length <= 10 else 7 if match_length <= 20 else 8


class AcceptanceStats:
    """Acceptance by source, match length and place in the draft, halved every 1,024 steps."""

    def __init__(self, num_speculative_tokens: int) -> None:
        shape = (2, _NUM_LENGTH_BUCKETS, num_speculative_tokens)
        self._accepted = np.zeros(shape, np.int64)
        self._observed = np.zeros(shape, np.int64)
        self._num_steps = 0

    def observe(self, key: tuple[int, int], num_accepted: int, num_verified: int) -> None:
        """Book the verdict on one draft: its accepted tokens, and the first rejected one if one was verified."""
        self._accepted[key][:num_accepted] += 1
        self._observed[key][: min(num_accepted + 1, num_verified)] += 1

    def survival(self, key: tuple[int, int], length: int) -> NDArray[np.float64]:
        """Probability that each token of a draft and all before it are accepted."""
        rates = (self._accepted[key][:length] + 1) / (self._observed[key][:length] + 2)
        return np.cumprod(rates)

    def count_step(self) -> None:
        """Forget a half whenever enough steps of the batch went by."""
        self._num_steps += 1
        if self._num_steps % HALF_LIFE_STEPS == 0:
            self._accepted >>= 1
            self._observed >>= 1


@dataclass(slots=True)
class _Draft:
    token_ids: list[int]
    key: tuple[int, int]  # source (1: shared text) and length bucket
    num_matched: int = 0  # tokens that the target model is known to have written, too


@dataclass(slots=True)
class _Request:
    text: OwnText
    prompt_length: int
    is_recorded: bool
    drafts: list[_Draft] = field(default_factory=list)  # not booked yet; the last one is that of the running step


class GpuSuffix:
    """The drafter for a batch.

    Own text and the text of finished requests are searched for the longest match; the longer one is copied, own text on
    a tie. Survival is the product of observed acceptance rates. With a cost curve, the draft tokens with the highest
    survival in the batch are verified, as many as let (expected tokens) / (step time) rise.

    Args:
        num_speculative_tokens: longest draft of a row.
        curve: cost of a step; None: everything is verified.
        has_shadow: unverified draft tokens are compared with what the target model wrote, too. The original sees
            verified ones alone.

    Source: vLLM's suffix speculator for Model Runner V2; behaviour, not code. Left out: hash collisions and the size of
    its ring (1 M tokens).
    """

    def __init__(self, num_speculative_tokens: int, curve: CostCurve | None, *, has_shadow: bool = False) -> None:
        self._num_speculative_tokens = num_speculative_tokens
        self._curve = curve
        self._has_shadow = has_shadow
        self._shared = SharedText()
        self._stats = AcceptanceStats(num_speculative_tokens)
        self._requests: dict[int, _Request] = {}

    def warm(self, call: TokenCall) -> None:
        """A document of the shared text."""
        self._shared.append(np.concatenate([call.prompt_tokens(PROMPT_CONTEXT), call.output]))

    def open(self, handle: int, call: TokenCall, prompt: TokenIds, *, is_recorded: bool) -> None:
        """Other requests see its answer when it has ended."""
        del call
        self._requests[handle] = _Request(OwnText(prompt), len(prompt), is_recorded)

    def step(self, request: StepRequest) -> Drafts:
        """Book the verdicts, draft, admit."""
        handles = request.handles.tolist()
        for row, handle in enumerate(handles):
            verdict = int(request.num_accepted_tokens[row]), int(request.num_draft_tokens[row])
            self._take_in(self._requests[handle], row_tokens(request, row), *verdict)
        self._stats.count_step()
        drafts = []
        for row, handle in enumerate(handles):
            requested = self._requests[handle]
            drafts.append(self._draft(requested.text.tokens, int(request.max_draft_tokens[row])))
            requested.drafts += drafts[-1:] if drafts[-1].token_ids else []
        survival = [self._stats.survival(draft.key, len(draft.token_ids)) for draft in drafts]
        lengths = self._admitted(survival)
        admitted = [draft.token_ids[:length] for draft, length in zip(drafts, lengths, strict=True)]
        kept = [row[:length] for row, length in zip(survival, lengths, strict=True)]
        return Drafts(
            lengths, np.array([*itertools.chain(*admitted)], np.int32), np.concatenate(kept).astype(np.float32)
        )

    def close(self, handle: int, tail: TokenIds, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """The answer becomes a document."""
        request = self._requests.pop(handle)
        self._take_in(request, tail, num_accepted_tokens, num_draft_tokens)
        for draft in request.drafts:
            self._stats.observe(draft.key, draft.num_matched, draft.num_matched)
        if request.is_recorded:
            self._shared.append(request.text.tokens[max(0, request.prompt_length - PROMPT_CONTEXT) :].copy())

    def _take_in(self, request: _Request, tokens: TokenIds, num_accepted: int, num_verified: int) -> None:
        request.text.append(tokens)
        if self._has_shadow:
            request.drafts = [draft for draft in request.drafts if not self._book(draft, tokens.tolist())]
            return
        for draft in request.drafts:
            self._stats.observe(draft.key, num_accepted, num_verified)
        request.drafts.clear()

    def _book(self, draft: _Draft, tokens: list[int]) -> bool:
        """Compare what is left of a draft with what came; whether its verdict is known now."""
        for token in tokens:
            if draft.num_matched == len(draft.token_ids):
                break
            if draft.token_ids[draft.num_matched] != token:
                self._stats.observe(draft.key, draft.num_matched, draft.num_matched + 1)
                return True
            draft.num_matched += 1
        if draft.num_matched < len(draft.token_ids):
            return False
        self._stats.observe(draft.key, draft.num_matched, draft.num_matched)
        return True

    def _draft(self, tokens: TokenIds, max_length: int) -> _Draft:
        own_length, following = longest_match(tokens, MAX_DEPTH)
        shared_length, chain = self._shared.draft(tokens[-MAX_DEPTH:], self._num_speculative_tokens)
        is_shared = shared_length > own_length
        if not is_shared:
            chain = tokens[following[-1] : following[-1] + self._num_speculative_tokens].tolist() if own_length else []
        return _Draft(chain[:max_length], (int(is_shared), length_bucket(max(own_length, shared_length, 1))))

    def _admitted(self, survival: list[NDArray[np.float64]]) -> NDArray[np.int32]:
        """How many tokens of each draft are verified."""
        lengths = np.array([len(row) for row in survival], np.int32)
        if self._curve is None or not lengths.sum():
            return lengths
        flat = np.concatenate(survival)
        order = np.argsort(-flat, kind="stable")
        batch_size = len(survival)
        expected = batch_size + np.append(0.0, np.cumsum(flat[order]))
        costs = self._curve.step_ms(batch_size + np.arange(len(flat) + 1))
        admitted = order[: int(np.argmax(expected / costs))]
        rows = np.repeat(np.arange(batch_size), lengths)
        return np.bincount(rows[admitted], minlength=batch_size).astype(np.int32)
