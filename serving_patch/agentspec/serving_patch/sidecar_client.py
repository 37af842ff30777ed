"""Drafts from a draft server in another process: one long stream, whose loss costs a step at most one deadline."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from agentspec.draft.v1 import draft_pb2
from agentspec.sidecar.engine import FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.tags import Tags
from agentspec.sidecar.telemetry import LinkFigures

from .command_queue import CommandQueue
from .mailbox import Fallbacks, StepMailbox
from .sidecar_link import Link, LinkError
from .sidecar_messages import Vocabulary, close_message, open_message, read_drafts, write_step

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 2.0
JOIN_TIMEOUT_S = 2.0
GATHER_S = 0.002  # opens and closes wait so long for a step to travel with
MAX_BATCH = 1024  # of opens, and of closes, in one message
MAX_OPENS = 8  # of one request on one connection; a server that wants more refuses it
MESSAGE_HEADROOM = 8 << 10  # bytes of a message beside the prompt
TAGS_TOKENS = 1024  # what an open counts for its tags, 4 KiB at most

_Open = draft_pb2.OpenRequest
_Close = draft_pb2.CloseRequest
_Command = Callable[[], _Open] | _Close | StepRequest


class SidecarClient:
    """A `DraftClient` of a draft server; it needs no guard, and its calls block in `collect` alone.

    A thread of its own connects, registers the vocabulary, holds the stream and comes back with growing pauses when it
    ends. Opens, closes and steps are sent by a thread of gRPC, in order, also while the engine is idle. Whatever a
    server does not know, because it restarted or a full queue dropped it, it asks for again by `resync_handles`. While
    there is no server, nothing is kept and nobody waits.

    Args:
        socket: of the server.
        vocabulary: of the target model.
        fallbacks: counts why a step got no drafts.
        clock: seconds, monotonic.
    """

    def __init__(
        self, socket: Path, vocabulary: Vocabulary, *, fallbacks: Fallbacks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._socket = socket
        self._vocabulary = vocabulary
        self._fallbacks = fallbacks
        self._clock = clock
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # something came
        self._queued = threading.Condition(lock)  # something is to be sent
        # All below is guarded by the condition's lock.
        self._mailbox = StepMailbox(self._changed, vocab_size=len(vocabulary.token_lengths), fallbacks=fallbacks)
        self._commands: CommandQueue[_Command] = CommandQueue()
        self._num_queued_steps = 0
        self._num_opens: dict[int, int] = {}  # by handle: opened on this connection and not closed
        self._link: Link | None = None
        self._is_connected = False
        self._is_stopping = False
        self._obstacle = "not connected yet"
        self._max_prompt_tokens = 0
        self._num_opened_tokens = 0  # of prompts, so far; and when the last step went out, and was answered
        self._num_tokens_submitted = self._num_tokens_answered = 0
        self._submitted_at = 0.0
        self._num_connections = self._num_answers = self._num_late_answers = self._num_resyncs = 0
        self._round_trip_s = 0.0
        self._thread = threading.Thread(target=self._run, name="agentspec-sidecar", daemon=True)
        self._thread.start()

    # --- the seam ---

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        """Send a request's prompt; without a server, or with a full queue, the server asks for it later."""
        with self._changed:
            if not self._is_connected:
                return
            build = partial(
                open_message,
                handle,
                tokens,
                tags,
                sampling,
                namespace=namespace,
                max_prompt_tokens=self._max_prompt_tokens,
            )
            if self._enqueue(build, tokens.size + TAGS_TOKENS):
                self._num_opens[handle] = self._num_opens.get(handle, 0) + 1
                self._num_opened_tokens += tokens.size

    def submit(self, step: StepRequest) -> None:
        """Send a step; without a server, or with a full queue, there will be nothing to collect."""
        with self._changed:
            is_sent = self._is_connected and self._enqueue(step, step.token_ids.size + step.handles.size)
            self._num_queued_steps += is_sent
            self._mailbox.post(step if is_sent else None)
            self._num_tokens_submitted = self._num_opened_tokens
            self._submitted_at = self._clock()
            obstacle = "" if self._is_connected else self._obstacle
        if obstacle:
            self._fallbacks.note("disconnected", obstacle)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        """Return checked drafts of the last submitted step if they come within `deadline_ms`.

        A deadline of 0 takes what is there. The reply may hold no drafts but handles to open again.
        """
        with self._changed:
            num_tokens = self._num_tokens_submitted - self._num_tokens_answered
            return self._mailbox.collect(deadline_ms=deadline_ms, num_tokens_ahead=num_tokens)

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """Send the end of a request, if the server knows it."""
        with self._changed:
            if self._num_opens.pop(handle, 0):
                message = close_message(handle, reason, true_length, tail)
                self._commands.add(message, tail.size, is_needed=True)
                self._queued.notify_all()

    def shutdown(self) -> None:
        """Send what is queued, end the stream and join the thread; what a hung server has not taken by 2 s is lost."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            self._queued.notify_all()
        self._thread.join(JOIN_TIMEOUT_S)
        with self._changed:
            link = self._link
        if link is not None:
            link.close()
        self._thread.join(JOIN_TIMEOUT_S)

    def figures(self) -> LinkFigures:
        """What the client has seen of its server; any thread may ask."""
        with self._changed:
            return LinkFigures(
                is_connected=self._is_connected,
                num_connections=self._num_connections,
                num_answers=self._num_answers,
                num_late_answers=self._num_late_answers,
                round_trip_s=self._round_trip_s,
                num_resyncs=self._num_resyncs,
            )

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the stream to come up; returns whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._is_connected or self._is_stopping, timeout_s)

    def _enqueue(self, command: _Command, num_tokens: int) -> bool:
        if not self._commands.add(command, num_tokens):
            self._fallbacks.note("queue_full", f"{len(self._commands)} messages wait for the draft server")
            return False
        self._queued.notify_all()
        return True

    # --- the thread that connects ---

    def _run(self) -> None:
        num_failures = 0
        while not self._is_stopping:
            num_connections = self._num_connections
            try:
                self._connect()
                obstacle = f"{self._socket}: the server ended the stream"
            except LinkError as error:
                obstacle = str(error)
            is_lost = self._disconnect(obstacle)
            if is_lost and not self._is_stopping:
                self._fallbacks.note("sidecar_lost", obstacle)
            num_failures = 0 if self._num_connections > num_connections else num_failures + 1
            pause_s = min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(num_failures, 10)) * random.uniform(0.5, 1)  # noqa: S311  # spreads retries
            with self._changed:
                self._changed.wait_for(lambda: self._is_stopping, pause_s)

    def _connect(self) -> None:
        """Hold a connection until it ends.

        Raises:
            LinkError: it could not be made, or broke.
        """
        link = Link(self._socket)
        with self._changed:
            self._link = link
        try:
            info = link.greet()
            if all(model.model_fingerprint != self._vocabulary.fingerprint for model in info.models):
                link.register(self._vocabulary)
            self._max_prompt_tokens = max(1, (int(info.max_message_bytes) - MESSAGE_HEADROOM) // 4)
            link.stream(self._messages(link), partial(self._take_in, link))
        finally:
            link.close()

    def _disconnect(self, obstacle: str) -> bool:
        """Forget the connection and what was meant for it; returns whether it was up."""
        with self._changed:
            was_connected, self._is_connected = self._is_connected, False
            self._link = None
            self._obstacle = obstacle
            self._commands.clear()
            self._num_queued_steps = 0
            self._queued.notify_all()
            self._num_opens.clear()
            self._num_tokens_answered = self._num_tokens_submitted = self._num_opened_tokens
            self._mailbox.reset()
            return was_connected

    # --- the threads of gRPC ---

    def _messages(self, link: Link) -> Iterator[bytes]:
        """Messages as there is something to say, until the connection or the client ends."""
        yield draft_pb2.DraftStreamRequest(model_fingerprint=self._vocabulary.fingerprint).SerializeToString()
        while True:
            with self._changed:
                self._queued.wait_for(lambda: self._commands or self._is_stopping or self._link is not link)
                if not self._num_queued_steps:
                    self._queued.wait_for(self._must_send_now, GATHER_S)
                if self._link is not link or not self._commands:
                    return
                batch = self._take_batch()
            yield self._message(batch)

    def _must_send_now(self) -> bool:
        return self._num_queued_steps > 0 or self._is_stopping or not self._is_connected

    def _message(self, batch: Sequence[_Command]) -> bytes:
        message = draft_pb2.DraftStreamRequest()
        for command in batch:
            try:
                if isinstance(command, StepRequest):
                    write_step(command, message.step)
                elif isinstance(command, _Close):
                    message.closes.append(command)
                else:
                    message.opens.append(command())
            except (ValueError, TypeError) as error:  # what the contract can't carry, such as half a surrogate pair
                self._fallbacks.note("client_error", repr(error))
        return message.SerializeToString()

    def _take_batch(self) -> list[_Command]:
        """The commands of the next message: closes apply first there, then opens, then the step."""
        batch: list[_Command] = []
        num_tokens, last_rank = 0, 0
        while self._commands and len(batch) < MAX_BATCH:
            size, command = self._commands.first()
            rank = 2 if isinstance(command, StepRequest) else 0 if isinstance(command, _Close) else 1
            if batch and (rank < last_rank or num_tokens + size > self._max_prompt_tokens):
                break
            batch.append(command)
            self._commands.take()
            self._commands.finish(size)
            num_tokens, last_rank = num_tokens + size, rank
            if rank == 2:
                self._num_queued_steps -= 1
                break
        return batch

    def _take_in(self, link: Link, raw: bytes) -> bool:
        """Take in one message of the server."""
        try:
            message = draft_pb2.DraftStreamResponse.FromString(raw)
            if message.boot_id:
                self._greeted(link, message.boot_id)
            elif message.HasField("error"):
                self._refused(message.error)
            elif message.HasField("drafts"):
                self._answered(link, read_drafts(message.drafts))
        except (DecodeError, ValueError) as error:
            self._fallbacks.note("bad_drafts", repr(error))
        return True

    def _greeted(self, link: Link, boot_id: int) -> None:
        with self._changed:
            if self._link is not link:
                return
            self._is_connected = True
            self._num_connections += 1
            self._changed.notify_all()
        logger.info("agentspec: connected to the draft server at %s, boot id %016x", self._socket, boot_id)

    def _refused(self, error: draft_pb2.StreamError) -> None:
        code = next((code.name for code in grpc.StatusCode if code.value[0] == error.code), str(error.code))
        self._fallbacks.note("refused", f"{code}: {error.field}: {error.message}")
        if error.step_id and error.field.startswith("step"):
            self._mailbox.deliver(error.step_id, None)

    def _answered(self, link: Link, drafts: StepDrafts) -> None:
        now = self._clock()
        with self._changed:
            if self._link is not link:
                return
            self._num_resyncs += drafts.resync_handles.size
            drafts = self._without_hopeless(drafts)
        is_latest = self._mailbox.deliver(drafts.step_id, drafts)
        with self._changed:
            if is_latest:
                self._num_tokens_answered = self._num_tokens_submitted
                self._num_answers += 1
                self._round_trip_s += now - self._submitted_at
            else:
                self._num_late_answers += 1

    def _without_hopeless(self, drafts: StepDrafts) -> StepDrafts:
        """Drop requests from `resync_handles` that the server refused again and again; else each step opened them."""
        lost = drafts.resync_handles
        if not lost.size:
            return drafts
        kept = [handle for handle in lost.tolist() if self._num_opens.get(handle, 0) < MAX_OPENS]
        return replace(drafts, resync_handles=np.array(kept, np.int64))
