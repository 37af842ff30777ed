"""Two real vLLM engines in this process, one of them with the scheduler hook, and draft clients that misbehave."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from agentspec.serving_patch.client import DraftClient, EmbeddedClient
from agentspec.serving_patch.compat import register
from agentspec.serving_patch.model_reader import read_vocabulary
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

NUM_SPECULATIVE_TOKENS = 8
MAX_MODEL_LEN = 128
TIE_LOGIT_GAP = 1e-4
DRIVE_S = 240.0  # while a grammar is compiled, the engine steps without doing anything, thousands of times

# One process, so that a test reaches the scheduler; one thread, so that two engines do not spin against each other.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
ENGINE_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "block_size": 32,
    "enforce_eager": True,
    "disable_log_stats": False,
}

TASKS = ("parser", "lexer", "router", "cache", "queue", "logger", "scheduler", "tokenizer")


def prompts(count: int, *, first: int = 0) -> list[str]:
    """Chat prompts of about 40 tokens; neighbours share much text, none is equal to another."""
    return [
        f"<|im_start|>user\nWrite a Python class {TASKS[i % len(TASKS)].title()} with methods add and remove. "
        f"Ticket {i}.<|im_end|>\n<|im_start|>assistant\n"
        for i in range(first, first + count)
    ]


def sampled(max_tokens: int, **kwargs: Any) -> Any:
    """vLLM's sampling parameters; the request goes on past the end-of-sequence token."""
    from vllm import SamplingParams  # noqa: PLC0415  # slow

    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **kwargs})


def greedy(max_tokens: int, **kwargs: Any) -> Any:
    return sampled(max_tokens, temperature=0, **kwargs)


def start_llm(model_path: str, **kwargs: Any) -> Any:
    """A vLLM engine in this process."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    from vllm import LLM  # noqa: PLC0415  # slow, and reads the environment

    return LLM(model=model_path, **ENGINE_ARGS, **kwargs)


@dataclass(frozen=True, slots=True)
class Output:
    """What the client of one request got.

    Attributes:
        logit_gaps: between the two best tokens of each position, where asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[float, ...] = ()
    logit_gaps: tuple[float, ...] = ()


def drive(
    llm: Any,
    texts: Sequence[str | Sequence[int]],
    params: Any,
    *,
    on_step: Callable[[int], None] = lambda step: None,
    abort_after: Mapping[int, int] | None = None,
) -> list[Output]:
    """Run requests to their ends, step by step.

    Args:
        llm: the engine.
        texts: prompts, or their token ids.
        params: for all requests, or one for each.
        on_step: called with the number of steps so far.
        abort_after: request i is aborted after so many steps.
    """
    engine = llm.llm_engine
    all_params = list(params) if isinstance(params, Sequence) else [params] * len(texts)
    ids = [f"request-{i}" for i in range(len(texts))]
    for request_id, text, one_params in zip(ids, texts, all_params, strict=True):
        prompt: Any = text if isinstance(text, str) else {"prompt_token_ids": list(text)}
        engine.add_request(request_id, prompt, one_params)
    outputs: dict[str, Output] = {}
    num_steps, deadline = 0, time.monotonic() + DRIVE_S
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = _read_output(output.outputs[0])
            num_steps += 1
            assert time.monotonic() < deadline, "the engine does not come to an end"
            on_step(num_steps)
            engine.abort_request([ids[i] for i, step in (abort_after or {}).items() if step == num_steps])
    finally:
        engine.abort_request(ids)  # a failure must not reach the next test
    return [outputs.get(request_id, Output((), None)) for request_id in ids]


def _read_output(completion: Any) -> Output:
    logprobs, gaps = [], []
    for token_id, position in zip(completion.token_ids, completion.logprobs or (), strict=False):
        best = sorted((entry.logprob for entry in position.values()), reverse=True)
        logprobs.append(position[token_id].logprob)
        gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    return Output(tuple(completion.token_ids), completion.finish_reason, tuple(logprobs), tuple(gaps))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs; None when one output starts with the other."""
    return next((i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)


def count_ties(plain: Sequence[Output], ours: Sequence[Output]) -> int:
    """Compare greedy outputs; a first difference between two tokens of almost equal logits is a numeric tie.

    Raises:
        AssertionError: an output differs, or is shorter or longer.
    """
    num_ties = 0
    for i, (expected, actual) in enumerate(zip(plain, ours, strict=True)):
        position = first_difference(expected.token_ids, actual.token_ids)
        if position is None:
            assert (len(expected.token_ids), expected.finish_reason) == (len(actual.token_ids), actual.finish_reason)
        else:
            gap = expected.logit_gaps[position]
            assert gap < TIE_LOGIT_GAP, f"request {i} differs at token {position}, where the logits are {gap} apart"
            num_ties += 1
    return num_ties


class PlainEngine:
    """vLLM as it is."""

    def __init__(self, model_path: str) -> None:
        self.llm = start_llm(model_path)

    def run(self, texts: Sequence[str | Sequence[int]], params: Any) -> list[Output]:
        """Plain outputs, with what `count_ties` needs."""
        params = params.clone()
        params.logprobs = 2
        return drive(self.llm, texts, params)

    def shutdown(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class SwitchClient:
    """Passes every call to the client of the running test."""

    def __init__(self, target: DraftClient) -> None:
        self.target = target

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        self.target.open(handle, tokens, tags, sampling, namespace=namespace)

    def submit(self, step: StepRequest) -> None:
        self.target.submit(step)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        return self.target.collect(deadline_ms=deadline_ms)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        self.target.close(handle, reason, true_length, tail)

    def shutdown(self) -> None:
        self.target.shutdown()


class Lab:
    """vLLM with the scheduler hook, in this process, and the hook's parts within reach."""

    def __init__(self, model_path: str) -> None:
        register()  # vLLM does it by the entry point of an installed package
        self.llm = start_llm(
            model_path,
            scheduler_cls="tests.switch_scheduler.SwitchScheduler",
            speculative_config={
                "method": "custom_class",
                "model": "agentspec.serving_patch.hook_v1.NullProposer",
                "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
            },
            additional_config={"agentspec": {"metrics_port": 0, "arithmetic_intensity": 128, "deadline_ms": 2000}},
        )
        self.core: Any = self.llm.llm_engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.switch: SwitchClient = self.scheduler.switch
        self.vocabulary = read_vocabulary(self.llm.llm_engine.vllm_config.model_config)

    def new_engine(self) -> Engine:
        return Engine(
            self.vocabulary, CHAT, num_speculative_tokens=NUM_SPECULATIVE_TOKENS, history_bytes=1 << 28, is_strict=False
        )

    def new_client(self) -> EmbeddedClient:
        return EmbeddedClient(self.new_engine(), fallbacks=self.scheduler._fallbacks)

    def use(self, client: DraftClient, *, deadline_ms: float = 2000.0) -> None:
        """Draft with another client; waiting long for it keeps a slow machine from hiding a bug."""
        self.settle()
        self.switch.target = client
        self.scheduler._deadline_ms = deadline_ms
        guard = self.scheduler._client
        guard._mailbox._is_behind = False
        guard._mailbox._num_misses = guard._mailbox._num_steps_to_skip = 0
        self.scheduler._fallbacks._counts.clear()

    def run(self, texts: Sequence[str | Sequence[int]], params: Any, **kwargs: Any) -> list[Output]:
        return drive(self.llm, texts, params, **kwargs)

    def settle(self) -> None:
        """Wait until the guard's thread has made every call that is queued."""
        guard = self.scheduler._client
        with guard._changed:
            assert guard._changed.wait_for(lambda: guard._commands.num_tokens == 0, 60)

    def fallbacks(self) -> dict[str, int]:
        counts: dict[str, int] = self.scheduler._fallbacks.counts()
        return counts

    def shutdown(self) -> None:
        self.core.shutdown()


class ProxyClient(SwitchClient):
    """Passes every call on; the clients below change one of them."""


@dataclass
class Closed:
    """How a request ended at the draft client; `output` is what steps and tail brought."""

    reason: FinishReason
    true_length: int
    output: list[int]
    tail: list[int]


class SpyClient(ProxyClient):
    """Puts the output of each handle together, as a draft engine would, and keeps the verdicts."""

    def __init__(self, target: DraftClient) -> None:
        super().__init__(target)
        self.prompts: dict[int, list[int]] = {}
        self.tags: dict[int, Tags] = {}
        self.samplings: dict[int, Sampling] = {}
        self.namespaces: dict[int, str] = {}
        self.outputs: dict[int, list[int]] = {}
        self.closed: dict[int, Closed] = {}
        self.steps: list[StepRequest] = []
        self.num_opens = 0

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        self.num_opens += 1
        self.prompts[handle] = tokens.tolist()
        self.outputs[handle] = []
        self.tags[handle], self.samplings[handle], self.namespaces[handle] = tags, sampling, namespace
        super().open(handle, tokens, tags, sampling, namespace=namespace)

    def submit(self, step: StepRequest) -> None:
        self.steps.append(step)
        for row, handle in enumerate(step.handles.tolist()):
            output = self.outputs[handle]
            assert step.positions[row] == len(output)
            output += step.token_ids[step.token_offsets[row] : step.token_offsets[row + 1]].tolist()
        super().submit(step)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        output = self.outputs.pop(handle) + tail.tolist()
        self.closed[handle] = Closed(reason, true_length, output, tail.tolist())
        super().close(handle, reason, true_length, tail)


@dataclass
class OracleClient:
    """Drafts what it was told the requests will write: every draft is accepted, unless `spoil` changes it.

    Handles are matched to texts in the order of opening.
    """

    texts: Sequence[Sequence[int]]
    spoil: Callable[[list[int]], list[int]] = lambda draft: draft
    handles: list[int] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    step: StepRequest | None = None

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        self.handles.append(handle)
        self.lengths[handle] = 0

    def submit(self, step: StepRequest) -> None:
        self.step = step
        for row, handle in enumerate(step.handles.tolist()):
            self.lengths[handle] += int(step.token_offsets[row + 1] - step.token_offsets[row])

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        assert self.step is not None
        drafts, left = [], self.step.token_budget
        for handle, room in zip(self.step.handles.tolist(), self.step.max_draft_tokens.tolist(), strict=True):
            length = self.lengths[handle]
            draft = list(self.texts[self.handles.index(handle)][length : length + min(room, left)])
            drafts.append(self.spoil(draft))
            left -= len(draft)
        return drafts_for(self.step, drafts)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        pass

    def shutdown(self) -> None:
        pass


def drafts_for(step: StepRequest, drafts: Sequence[Sequence[int]]) -> StepDrafts:
    tokens = np.array([token for draft in drafts for token in draft], np.int32)
    return StepDrafts(
        step_id=step.step_id,
        draft_lengths=np.array([len(draft) for draft in drafts], np.int32),
        draft_token_ids=tokens,
        survival=np.ones(tokens.size, np.float32),
        redundancy=np.ones(len(drafts), np.float32),
        token_budget=step.token_budget,
    )


class RaisingClient(ProxyClient):
    """Raises in the calls that `names` names."""

    def __init__(self, target: DraftClient, *names: str, error: Exception | None = None) -> None:
        super().__init__(target)
        self.names = names
        self.error = error or RuntimeError("broken on purpose")

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        self.may_raise("open")
        super().open(handle, tokens, tags, sampling, namespace=namespace)

    def submit(self, step: StepRequest) -> None:
        self.may_raise("submit")
        super().submit(step)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        self.may_raise("collect")
        return super().collect(deadline_ms=deadline_ms)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        self.may_raise("close")
        super().close(handle, reason, true_length, tail)

    def may_raise(self, name: str) -> None:
        if name in self.names:
            raise self.error


class HangingClient(ProxyClient):
    """Hangs in `collect` until it is let go."""

    def __init__(self, target: DraftClient) -> None:
        super().__init__(target)
        self.let_go = threading.Event()

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        assert self.let_go.wait(120)
        return super().collect(deadline_ms=deadline_ms)


class GarbageClient(ProxyClient):
    """Changes every answer."""

    def __init__(self, target: DraftClient, change: Callable[[StepRequest, StepDrafts], Any]) -> None:
        super().__init__(target)
        self.change = change
        self.step: StepRequest | None = None

    def submit(self, step: StepRequest) -> None:
        self.step = step
        super().submit(step)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        drafts = super().collect(deadline_ms=deadline_ms)
        assert self.step is not None
        assert drafts is not None
        changed: StepDrafts = self.change(self.step, drafts)
        return changed


def longest_drafts(step: StepRequest, token_id: int, extra: int = 0) -> StepDrafts:
    """Drafts of one token id over and over, as long as rows and budget allow, and `extra` longer."""
    drafts, left = [], step.token_budget
    for room in step.max_draft_tokens.tolist():
        length = min(room, left)
        drafts.append([token_id] * (length + extra))
        left -= length
    return drafts_for(step, drafts)


def shifted(drafts: StepDrafts, offset: int) -> StepDrafts:
    """Drafts whose token ids are all `offset` higher."""
    return replace(drafts, draft_token_ids=drafts.draft_token_ids + np.int32(offset))
