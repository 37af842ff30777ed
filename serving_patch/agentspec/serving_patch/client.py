"""The seam between a vLLM hook and whatever drafts for it, and the guard that keeps a bad drafter from hurting vLLM."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammar_store import OWN_GRAMMAR, GrammarStore
from agentspec.sidecar.grammars import GrammarError
from agentspec.sidecar.tags import Tags

from .command_queue import CommandQueue
from .mailbox import Fallbacks, StepMailbox

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

CLIENT_SHARE = 0.75  # of the deadline goes to the client, so that its partial answer still arrives in time
JOIN_TIMEOUT_S = 2.0


class DraftClient(Protocol):
    """Drafts for one vLLM engine. Calls come from one thread at a time; `GuardedClient` sees to that.

    `open` takes the prompt. It is an idempotent resync: a known handle goes back to its prompt, and the hook hands over
    its output from position 0 in the next step. `submit` hands over a step and returns; `collect` waits for its answer.
    `close` ends a request with the true length of its output and the tokens that no step has brought.
    """

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """Make a request known; `namespace` is the tenant, which no history crosses."""
        ...

    def submit(self, step: StepRequest) -> None:
        """Hand over what the last verification step brought."""
        ...

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Return the drafts of the step submitted last, or None when there are none within `deadline_ms`."""
        ...

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """End a request; an unknown handle is ignored."""
        ...

    def shutdown(self) -> None:
        """Let go of threads, sockets and memory; no call follows."""
        ...


class EmbeddedClient:
    """Drafts from an engine in this process.

    Args:
        engine: the draft engine; it may be shared, it locks itself.
        grammars: those that requests name in their tags; of this engine, and no other store's.
        fallbacks: counts requests whose grammar can't be had; they follow the engine's own.
    """

    def __init__(
        self, engine: Engine, *, grammars: GrammarStore | None = None, fallbacks: Fallbacks | None = None
    ) -> None:
        self._engine = engine
        self._grammars = grammars or GrammarStore(engine)
        self._fallbacks = fallbacks or Fallbacks()
        self._step: StepRequest | None = None

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """See `Engine.open`; builds the grammar that the tags name if no request has named it before."""
        grammar_id = self._find_grammar(namespace, tags)
        self._engine.open(handle, tokens, tags, sampling, namespace=namespace, grammar_id=grammar_id)

    def submit(self, step: StepRequest) -> None:
        """Keep the step for `collect`; the engine has no thread of its own."""
        self._step = step

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Draft now; rows that are not reached by the deadline get no draft."""
        step, self._step = self._step, None
        return None if step is None else self._engine.step(step, deadline_us=max(1, int(deadline_ms * 1000)))

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """See `Engine.close`."""
        self._engine.close(handle, reason, true_length, tail)

    def shutdown(self) -> None:
        """Nothing to let go of: the engine belongs to its maker."""

    def _find_grammar(self, namespace: str, tags: Tags) -> int:
        try:
            return self._grammars.find(namespace, tags.grammar)
        except GrammarError as error:
            self._fallbacks.note("bad_grammar", error)
            return OWN_GRAMMAR


class GuardedClient:
    """Runs another client on one helper thread, its only caller, so that it can neither block nor break the hook.

    Commands run in order, also while the engine is idle. A client that raises costs nothing, one that hangs costs one
    deadline and then no further waiting until its thread comes back; what was dropped meanwhile is brought in again
    through `resync_handles`, which the client itself reports.

    Args:
        client: what really drafts.
        vocab_size: token ids of a draft must be below it.
        fallbacks: counts why a step got no drafts.
        deadline_ms: longest wait for one step, given to the client.
    """

    def __init__(self, client: DraftClient, *, vocab_size: int, fallbacks: Fallbacks, deadline_ms: float) -> None:
        self._client = client
        self._fallbacks = fallbacks
        self._client_deadline_ms = deadline_ms * CLIENT_SHARE
        self._changed = threading.Condition()
        # All below is guarded by the condition's lock.
        self._mailbox = StepMailbox(self._changed, vocab_size=vocab_size, fallbacks=fallbacks)
        self._commands: CommandQueue[Callable[[], None]] = CommandQueue()
        self._known_handles: set[int] = set()  # opened at the client and not closed: only these need a close
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="agentspec-draft", daemon=True)
        self._thread.start()

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """Queue `open`; dropped when the queue is full, and then asked for again by the client."""
        command = functools.partial(self._client.open, handle, tokens, tags, sampling, namespace=namespace)
        with self._changed:
            if self._enqueue(tokens.size, command):
                self._known_handles.add(handle)

    def submit(self, step: StepRequest) -> None:
        """Queue the step for drafting; dropped when the queue is full."""
        with self._changed:
            is_queued = self._enqueue(step.token_ids.size + step.handles.size, functools.partial(self._answer, step))
            self._mailbox.post(step if is_queued else None)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Return checked drafts of the last submitted step if they come within `deadline_ms`.

        A deadline of 0 takes what is there. The reply may hold no drafts but handles to open again.
        """
        with self._changed:
            return self._mailbox.collect(deadline_ms=deadline_ms, num_tokens_ahead=self._commands.num_tokens)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """Queue `close`; never dropped for a handle that the client knows, so its histories cannot leak."""
        with self._changed:
            if handle in self._known_handles:
                self._known_handles.remove(handle)
                command = functools.partial(self._client.close, handle, reason, true_length, tail)
                self._commands.add(command, tail.size, is_needed=True)
                self._changed.notify_all()

    def shutdown(self) -> None:
        """Finish what is queued, shut the client down and join the thread; a stuck thread is left behind after 2 s."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("agentspec: the draft client hangs; its thread ends with the process")

    def _enqueue(self, num_tokens: int, command: Callable[[], None]) -> bool:
        if self._is_stopping or not self._commands.add(command, num_tokens):
            self._fallbacks.note("queue_full", f"{len(self._commands)} commands wait for the draft client")
            return False
        self._changed.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._commands or self._is_stopping)
                if not self._commands:
                    break
                size, command = self._commands.take()
            try:
                command()
            except Exception as error:  # noqa: BLE001  # the boundary: a failing drafter must never reach vLLM
                self._fallbacks.note("client_error", repr(error))
            with self._changed:
                self._commands.finish(size)
                self._changed.notify_all()
        try:
            self._client.shutdown()
        except Exception as error:  # noqa: BLE001  # see above
            self._fallbacks.note("client_error", repr(error))

    def _answer(self, step: StepRequest) -> None:
        drafts: StepDrafts | None = None
        try:
            self._client.submit(step)
            drafts = self._client.collect(deadline_ms=self._client_deadline_ms)
            if drafts is None:
                self._fallbacks.note("no_answer", "the draft client had no drafts for a step")
        finally:
            self._mailbox.deliver(step.step_id, drafts)
