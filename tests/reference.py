"""The draft engine in slow, plain Python: what the core's headers promise, without its hashes, pages and buckets."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from tests.reference_calibration import CONSENSUS_EDGES, Evidence, ReferenceCalibration, evidence_of
from tests.reference_tracker import ReferenceTracker

from agentspec.sidecar.engine import (
    ALL_PARTS,
    MIN_SURVIVAL,
    BlockStats,
    FinishReason,
    Parts,
    Sampling,
    StepDrafts,
    StepRequest,
    TokenIds,
)
from agentspec.sidecar.grammars import Grammar
from agentspec.sidecar.tags import Tags

ORDERS = (1, 2, 4, 8, 16, 32)
BUCKET_POSITIONS = 15
MAX_CONTEXT = 32
MAX_PROMPT_TOKENS = 8192
MIN_CANDIDATES = 4
BLOCK_START = -1
PROMPT_BLOCK, PROMPT_TAIL_BLOCK = "<prompt>", "<prompt tail>"
MAX_PROMPT_TAIL_TOKENS = 15

# One float32 operation at a time, in the order that the headers give, so that ties fall alike.
F32 = np.float32
OWN, OTHER_WORKFLOW, OTHER_BLOCK = F32(2.0), F32(0.14), F32(0.37)
ESCAPE, SUPPORT_HALF, MIN_LEARNED_SURVIVAL = F32(0.6), F32(4.0), F32(0.02)
NO_REDUNDANCY = F32(0)
MATCH_WEIGHT = [F32(math.exp(2.0 * min(length, 24))) for length in range(MAX_CONTEXT + 1)]

Context = tuple[bool, tuple[int, ...]]  # reaches back to the start of the text (or block)?, tokens


def token_ids(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a `StepRequest`."""

    handle: int
    position: int
    tokens: Sequence[int] = ()
    room: int = 64
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


def step_request(rows: Sequence[Row], token_budget: int = 10_000) -> StepRequest:
    """Pack rows into the struct of arrays that crosses the seam."""
    return StepRequest(
        step_id=1,
        handles=np.array([row.handle for row in rows], np.int64),
        positions=token_ids(*(row.position for row in rows)),
        token_offsets=np.cumsum([0, *(len(row.tokens) for row in rows)]).astype(np.int32),
        token_ids=token_ids(*(token for row in rows for token in row.tokens)),
        num_draft_tokens=token_ids(*(row.num_draft_tokens for row in rows)),
        num_accepted_tokens=token_ids(*(row.num_accepted_tokens for row in rows)),
        max_draft_tokens=token_ids(*(row.room for row in rows)),
        num_decode_rows=len(rows),
        num_prefill_tokens=0,
        token_budget=token_budget,
    )


def drafts_by_row(drafts: StepDrafts) -> list[list[int]]:
    ends = np.cumsum(drafts.draft_lengths)
    return [
        drafts.draft_token_ids[end - length : end].tolist()
        for end, length in zip(ends, drafts.draft_lengths, strict=True)
    ]


def allocate_by_redundancy(scores: Sequence[float], lengths: Sequence[int], token_budget: int) -> list[int]:
    """Split a token budget as budget.h says, in exact arithmetic."""
    exact = [Fraction(float(score)) for score in scores]
    budgets = [0] * len(lengths)
    left = token_budget
    while left > 0:
        has_room = [row for row, length in enumerate(lengths) if exact[row] > 0 and budgets[row] < length]
        has_room.sort(key=lambda row: -exact[row])
        total = sum(exact[row] for row in has_room)
        grants = {row: min(int(left * exact[row] / total), lengths[row] - budgets[row]) for row in has_room}
        if not any(grants.values()):
            grants = dict.fromkeys(has_room[:left], 1)
        for row, grant in grants.items():
            budgets[row] += grant
        left -= sum(grants.values())
        if not grants:
            break
    return budgets


@dataclass(slots=True, eq=False)
class Text:
    """Tokens that one request wrote, in order, each with its block path."""

    writer: int
    workflow_id: str
    tokens: list[int] = field(default_factory=list)
    blocks: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Place:
    """One token of a text: what came after a context."""

    text: Text
    offset: int

    def match_length(self, tokens: Sequence[int]) -> int:
        length = 0
        limit = min(MAX_CONTEXT, len(tokens), self.offset)
        while length < limit and self.text.tokens[self.offset - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def continuation(self, *, is_strict: bool) -> Iterator[int]:
        first_block = self.text.blocks[self.offset]
        for token, block in zip(self.text.tokens[self.offset :], self.text.blocks[self.offset :], strict=True):
            if is_strict and (token == BLOCK_START or block != first_block):
                return
            if token != BLOCK_START:
                yield token


def contexts_of(tokens: Sequence[int], end: int, *, is_strict: bool) -> list[Context]:
    """Contexts before place `end`, shortest first; none reaches past the text's start, nor past a block's if strict."""
    first = max(0, end - MAX_CONTEXT)
    walls = [i for i in range(first, end) if tokens[i] == BLOCK_START and (is_strict or i == 0)]
    reachable = tuple(tokens[walls[-1] if walls else first : end])
    contexts: list[Context] = []
    for order in ORDERS:
        if walls and order >= len(reachable):
            return [*contexts, (True, reachable)]
        if order > len(reachable):
            break
        contexts.append((False, reachable[-order:]))
    return contexts


def ring_of(filed: Sequence[Place]) -> list[Place]:
    """The latest places as a ring holds them, slot by slot."""
    count = len(filed)
    return [filed[count - 1 - (count - 1 - slot) % BUCKET_POSITIONS] for slot in range(BUCKET_POSITIONS)]


class ReferenceIndex:
    """Places by the context before them; one with more than 15 files them all again under the next longer one."""

    def __init__(self, *, is_strict: bool) -> None:
        self.is_strict = is_strict
        self.places: defaultdict[Context, list[Place]] = defaultdict(list)
        self.burst: set[Context] = set()

    def append(self, text: Text, token: int, block: str) -> None:
        text.tokens.append(token)
        text.blocks.append(block)
        if token != BLOCK_START and block != PROMPT_TAIL_BLOCK:
            self._file(Place(text, len(text.tokens) - 1), 0)

    def _file(self, place: Place, order: int) -> None:
        contexts = contexts_of(place.text.tokens, place.offset, is_strict=self.is_strict)
        for depth, context in enumerate(contexts[order:], order):
            filed = self.places[context]
            filed.append(place)
            if len(filed) <= BUCKET_POSITIONS or depth + 1 == len(contexts):
                return
            if context not in self.burst:
                self.burst.add(context)
                for earlier in ring_of(filed[:-1]):
                    self._file(earlier, depth + 1)

    def find(self, tokens: Sequence[int]) -> tuple[list[Place], list[Place]]:
        """Places after the longest context that the index tells apart and after the next shorter, latest first."""
        found: list[list[Place]] = [[], []]
        for context in contexts_of(tokens, len(tokens), is_strict=self.is_strict):
            if context not in self.places:
                break
            found.append(self.places[context][: -BUCKET_POSITIONS - 1 : -1])
            if context not in self.burst:
                break
        return found[-1], found[-2]


@dataclass(slots=True)
class Candidate:
    tokens: list[int]
    match_length: int
    weight: F32
    is_own: bool


@dataclass(slots=True)
class Draft:
    tokens: list[int] = field(default_factory=list)
    survival: list[F32] = field(default_factory=list)
    redundancy: F32 = NO_REDUNDANCY
    predicted: list[F32] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)


def vote(candidates: list[Candidate], max_length: int, calibration: ReferenceCalibration, min_survival: float) -> Draft:
    """Let candidates vote for the next token, again and again."""
    draft = Draft()
    predicted = survival = F32(1)
    while len(draft.tokens) < max_length:
        depth = len(draft.tokens)
        candidates = [candidate for candidate in candidates if len(candidate.tokens) > depth]
        if not candidates:
            break
        total = F32(0)
        voters: defaultdict[int, list[Candidate]] = defaultdict(list)
        weights: defaultdict[int, F32] = defaultdict(lambda: F32(0))
        for candidate in candidates:
            total += candidate.weight
            voters[candidate.tokens[depth]].append(candidate)
            weights[candidate.tokens[depth]] += candidate.weight
        winner = max(weights, key=lambda token: weights[token])
        match_length = max(candidate.match_length for candidate in voters[winner])
        escape = ESCAPE * MATCH_WEIGHT[match_length] / F32(1 + match_length + depth)
        consensus = min(weights[winner] / total, F32(1))
        sources = frozenset(candidate.is_own for candidate in voters[winner])
        evidence = evidence_of(sources, depth, match_length + depth, len(voters[winner]), consensus)
        calibration.note_edge(consensus, CONSENSUS_EDGES)
        predicted *= calibration.probability(evidence, weights[winner] / (total + escape))
        survival = min(survival, calibration.survival(predicted, depth))
        if depth == 0:
            support = F32(len(voters[winner]))
            draft.redundancy = consensus * support / (support + SUPPORT_HALF)
        if depth > 0 and survival < min(MIN_LEARNED_SURVIVAL, F32(min_survival)):
            break
        draft.tokens.append(winner)
        draft.survival.append(survival)
        draft.predicted.append(predicted)
        draft.evidence.append(evidence)
        candidates = voters[winner]
    return draft


class ReferenceRequest:
    def __init__(
        self,
        writer: int,
        tags: Tags,
        tracker: ReferenceTracker,
        prompt_tail: list[int],
        *,
        is_strict: bool,
        has_block_starts: bool,
    ) -> None:
        self.tags = tags
        self.tracker = tracker
        self.own = ReferenceIndex(is_strict=is_strict)
        self.text = Text(writer, tags.workflow_id)
        self.output = prompt_tail + [BLOCK_START] * has_block_starts
        self.output_blocks = [PROMPT_TAIL_BLOCK] * len(prompt_tail) + [self.tracker.path] * has_block_starts
        self.stored = Text(writer, tags.workflow_id)
        self.num_output = 0
        self.stats_block = self.tracker.path
        self.draft = Draft()
        self.shadow = Draft()
        self.num_agreed = 0  # tokens of the shadow that were right so far


class ReferenceEngine:
    """The engine of engine.h for histories that never outgrow their memory; same calls, same answers."""

    def __init__(
        self,
        vocabulary: Sequence[bytes],
        grammar: Grammar,
        *,
        num_speculative_tokens: int = 16,
        is_strict: bool = False,
        min_survival: float = MIN_SURVIVAL,
        parts: Parts = ALL_PARTS,
    ) -> None:
        self.min_survival = min_survival
        self.parts = parts
        self.vocabulary = vocabulary
        self.grammar = grammar
        self.num_speculative_tokens = num_speculative_tokens
        self.is_strict = is_strict
        self.requests: dict[int, ReferenceRequest] = {}
        self.histories: dict[tuple[str, str, str], ReferenceIndex] = {}
        self.keys: dict[int, tuple[str, str, str]] = {}
        self.counts: dict[tuple[str, str, str, str], list[int]] = {}
        self.calibration = ReferenceCalibration(has_prior=parts.calibration and parts.prior)  # one namespace, greedy
        self.num_opened = 0

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str = "") -> None:
        prompt = b"".join(self.vocabulary[token] for token in tokens.tolist())
        tracker = ReferenceTracker(self.grammar, tags.block, prompt, is_structured=sampling.is_structured)
        request = ReferenceRequest(
            self.num_opened,
            tags,
            tracker,
            [] if self.is_strict else tokens[-MAX_PROMPT_TAIL_TOKENS:].tolist(),
            is_strict=self.is_strict,
            has_block_starts=self.parts.block_starts,
        )
        self.num_opened += 1
        for token in tokens[-MAX_PROMPT_TOKENS:].tolist():
            request.own.append(request.text, token, PROMPT_BLOCK)
        key = (namespace, tags.namespace, tags.stage)
        if handle in self.requests and self.keys[handle] == key:
            request.stored = self.requests[handle].stored
        self.keys[handle] = key
        self.requests[handle] = request
        if tags.history != "off":
            self.histories.setdefault(key, ReferenceIndex(is_strict=self.is_strict))

    def step(self, request: StepRequest) -> StepDrafts:
        known = []
        for row, handle in enumerate(request.handles.tolist()):
            state = self.requests.get(handle)
            if state is None or state.num_output != request.positions[row]:
                continue
            known.append(row)
            tokens = request.token_ids[request.token_offsets[row] : request.token_offsets[row + 1]].tolist()
            self._store(handle, len(state.output))
            if tokens:
                num_drafted, num_accepted = request.num_draft_tokens[row], request.num_accepted_tokens[row]
                self._count(handle, [1, num_drafted > 0, num_drafted, num_accepted, len(tokens)])
            self._take_in(state, tokens)
            state.draft = Draft()
        rooms = request.max_draft_tokens.tolist()
        drafts = {row: self._draft(int(request.handles[row]), rooms[row]) for row in known if request.token_budget}
        rows = [drafts.get(row, Draft()) for row in range(len(rooms))]
        redundancy = [float(draft.redundancy) for draft in rows]
        likely = [sum(bool(survival >= F32(self.min_survival)) for survival in draft.survival) for draft in rows]
        lengths = allocate_by_redundancy(redundancy, likely, request.token_budget)
        for draft, length in zip(rows, lengths, strict=True):
            draft.tokens, draft.survival = draft.tokens[:length], draft.survival[:length]
        return StepDrafts(
            step_id=request.step_id,
            draft_lengths=token_ids(*lengths),
            draft_token_ids=token_ids(*(token for draft in rows for token in draft.tokens)),
            survival=np.array([survival for draft in rows for survival in draft.survival], np.float32),
            redundancy=np.array(redundancy, np.float32),
            token_budget=request.token_budget,
            resync_handles=np.delete(request.handles, known),
        )

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        if handle not in self.requests:
            return
        state = self.requests[handle]
        if true_length > state.num_output + tail.size:
            tail = token_ids()  # tokens before it are missing
        if tail.size:
            agreed = [a == b for a, b in zip(state.draft.tokens, tail.tolist(), strict=False)]
            num_drafted, num_accepted = len(state.draft.tokens), [*agreed, False].index(False)
            self._count(handle, [1, num_drafted > 0, num_drafted, num_accepted, tail.size])
            self._take_in(state, tail.tolist())
        places = [
            place
            for place, (token, block) in enumerate(zip(state.output, state.output_blocks, strict=True))
            if token != BLOCK_START and block != PROMPT_TAIL_BLOCK
        ][:true_length]
        if reason != FinishReason.ERROR and places:
            self._store(handle, places[-1] + 1)
        del self.requests[handle], self.keys[handle]

    def block_path(self, handle: int) -> str:
        return self.requests[handle].tracker.path

    def stats(self) -> list[BlockStats]:
        return [BlockStats(*key, *map(int, counts)) for key, counts in self.counts.items()]

    def _take_in(self, state: ReferenceRequest, tokens: list[int]) -> None:
        for token in tokens:
            self._compare_shadow(state, token)
            block = state.tracker.path
            state.own.append(state.text, token, block)
            state.output.append(token)
            state.output_blocks.append(block)
            if state.tracker.advance(self.vocabulary[token]) and self.parts.block_starts:
                state.output.append(BLOCK_START)
                state.output_blocks.append(state.tracker.path)
        state.num_output += len(tokens)

    def _compare_shadow(self, state: ReferenceRequest, token: int) -> None:
        shadow, depth = state.shadow, state.num_agreed
        if not shadow.tokens:
            return
        is_right = shadow.tokens[depth] == token
        self.calibration.record_token(shadow.evidence[depth], is_right)
        state.num_agreed += is_right
        if not is_right or state.num_agreed == len(shadow.tokens):
            for place, predicted in enumerate(shadow.predicted):
                self.calibration.record_survival(predicted, place, place < state.num_agreed)
            state.shadow = Draft()

    def _store(self, handle: int, end: int) -> None:
        state = self.requests[handle]
        if state.tags.history == "rw":
            for place in range(len(state.stored.tokens), end):
                history = self.histories[self.keys[handle]]
                history.append(state.stored, state.output[place], state.output_blocks[place])

    def _count(self, handle: int, counts: Sequence[int]) -> None:
        tags, namespace = self.requests[handle].tags, self.keys[handle][0]
        row = self.counts.setdefault((namespace, tags.workflow_id, tags.stage, self.block_path(handle)), [0] * 5)
        row[:] = [old + new for old, new in zip(row, counts, strict=True)]

    def _draft(self, handle: int, room: int) -> Draft:
        state = self.requests[handle]
        tags = state.tags
        length = min(self.num_speculative_tokens, room, tags.max_draft_tokens if tags.speculate else 0)
        candidates: list[Candidate] = []
        if self.parts.own:
            candidates += self._candidates(state, state.own, state.text.tokens, is_own=True)
        if tags.history != "off":
            candidates += self._candidates(state, self.histories[self.keys[handle]], state.output, is_own=False)
        state.draft = vote(candidates, length, self.calibration, self.min_survival)
        if not state.shadow.tokens and length and self.parts.calibration:
            state.shadow, state.num_agreed = copy.deepcopy(state.draft), 0
        return state.draft

    def _candidates(
        self, state: ReferenceRequest, index: ReferenceIndex, tokens: list[int], *, is_own: bool
    ) -> list[Candidate]:
        candidates: dict[Place, Candidate] = {}
        longest, shorter = index.find(tokens)
        for place in longest:
            self._add(candidates, state, place, tokens, is_own=is_own)
        for place in shorter:
            if len(candidates) < MIN_CANDIDATES:
                self._add(candidates, state, place, tokens, is_own=is_own)
        return list(candidates.values())

    def _add(
        self, found: dict[Place, Candidate], state: ReferenceRequest, place: Place, tokens: list[int], *, is_own: bool
    ) -> None:
        block = place.text.blocks[place.offset]
        is_other_block = block not in (state.tracker.path, PROMPT_BLOCK)
        is_own_text = place.text.writer == state.stored.writer
        if place in found or (self.is_strict and is_other_block) or (is_own_text and not is_own):
            return
        match_length = place.match_length(tokens)
        weight = MATCH_WEIGHT[match_length]
        if is_own:
            weight *= OWN
        else:
            if place.text.workflow_id != state.tags.workflow_id:
                weight *= OTHER_WORKFLOW
            if is_other_block:
                weight *= OTHER_BLOCK
        found[place] = Candidate(list(place.continuation(is_strict=self.is_strict)), match_length, weight, is_own)
