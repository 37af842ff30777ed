"""What a draft server adds to a step: the time that a hook is blocked, beside the engine's own and a round trip."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.engine_bench import source_files
from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.framed_peer import FramedClient
from agentspec.draft.v1 import draft_pb2
from agentspec.serving_patch.client import EmbeddedClient
from agentspec.serving_patch.mailbox import Fallbacks
from agentspec.serving_patch.sidecar_client import SidecarClient
from agentspec.serving_patch.sidecar_messages import Vocabulary, write_step
from agentspec.sidecar.budget import BudgetOptions, Policy
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

NUM_STEPS = 400
NUM_FIRST_STEPS = 40  # not measured
PROMPT_TOKENS = 200
ROOM = 8  # draft tokens of a row
START_S = 30.0
ANSWER_MS = 10_000.0
POLICY: Policy = "uniform"  # drafts whatever time a step takes
_VOCABULARY = [bytes([token]) for token in range(256)]
_TAGS = Tags(workflow_id="rpc", stage="file")
_GREEDY = Sampling()
_NO_TOKENS = np.empty(0, np.int32)


class RpcBenchError(RuntimeError):
    """A process did not start, or stopped answering; the message says which."""


class _Client(Protocol):
    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None: ...

    def submit(self, step: StepRequest) -> None: ...

    def collect(self, *, deadline_ms: float) -> StepDrafts | None: ...

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None: ...


@dataclass(frozen=True, slots=True)
class RpcBench:
    """Steps of equal batches, in turns through a draft server, through an engine in this process, and to a bare peer.

    Attributes:
        num_steps: of each batch; the medians count.
    """

    num_steps: int = NUM_STEPS

    def run(self, batch_sizes: Sequence[int], on_phase: Callable[[str], None] = lambda _phase: None) -> list[Figures]:
        """Measure each batch size.

        Returns:
            Wall times in µs, for each batch size: `hook_us` from handing a step over to having its drafts, of which
            `submit_us` is before anything is waited for; `engine_us` the same in this process; `blocked_us` and
            `blocked_p99_us` the difference, step by step; `framed_us` and `framed_p99_us` a length-prefixed message of
            the same bytes to another process and back; `ratio` of the two medians.

        Raises:
            RpcBenchError: a process did not start, or stopped answering.
        """
        text = _text(max(batch_sizes) * (PROMPT_TOKENS + self.num_steps))
        cells = []
        engine = Engine(_VOCABULARY, CHAT, num_speculative_tokens=ROOM, budget=BudgetOptions(POLICY))
        embedded = EmbeddedClient(engine)
        with tempfile.TemporaryDirectory() as folder, _processes(Path(folder)) as (sidecar, framed):
            for batch_size in batch_sizes:
                on_phase(f"steps of {batch_size} requests")
                cells.append(self._measure(batch_size, text, sidecar, embedded, framed))
        return cells

    def meta(self) -> Figures:
        """Conditions of the run."""
        return {
            "num_steps": self.num_steps - NUM_FIRST_STEPS,
            "prompt_tokens": PROMPT_TOKENS,
            "draft_tokens_per_row": ROOM,
            "policy": POLICY,
            "clock": "wall time, medians of interleaved steps",
            "grpc": grpc.__version__,
            "machine": platform.platform(),
            "python": platform.python_version(),
        }

    def _measure(
        self, batch_size: int, text: TokenIds, sidecar: SidecarClient, embedded: EmbeddedClient, framed: FramedClient
    ) -> Figures:
        rows = text[: batch_size * (PROMPT_TOKENS + self.num_steps)].reshape(batch_size, -1)
        clients: tuple[_Client, _Client] = (sidecar, embedded)
        for client in clients:
            for handle, row in enumerate(rows):
                client.open(handle, np.ascontiguousarray(row[:PROMPT_TOKENS]), _TAGS, _GREEDY, namespace="default")
        outputs = rows[:, PROMPT_TOKENS:]
        times = np.zeros((self.num_steps, 4))
        for position in range(self.num_steps):
            step = _step(outputs, position)
            hook_us, submit_us, drafts = _ask(sidecar, step)
            engine_us, _, own = _ask(embedded, step)
            if not np.array_equal(drafts.draft_token_ids, own.draft_token_ids):
                raise RpcBenchError(f"step {position}: the draft server and the engine drafted different tokens")
            message, answer_bytes = _messages(step, drafts)
            begin = time.perf_counter_ns()
            framed.ask(message, answer_bytes)
            times[position] = hook_us, submit_us, engine_us, (time.perf_counter_ns() - begin) / 1000
        for client in clients:
            for handle in range(batch_size):
                client.close(handle, FinishReason.ERROR, 0, _NO_TOKENS)
        sizes = {"request_bytes": len(message), "answer_bytes": answer_bytes}
        return {"batch_size": batch_size, **sizes, **_figures(times)}


def _figures(times: NDArray[np.float64]) -> Figures:
    hook, submit, engine, framed = times[NUM_FIRST_STEPS:].T
    blocked = hook - engine
    return {
        "hook_us": float(np.median(hook)),
        "submit_us": float(np.median(submit)),
        "engine_us": float(np.median(engine)),
        "blocked_us": float(np.median(blocked)),
        "blocked_p99_us": float(np.percentile(blocked, 99)),
        "framed_us": float(np.median(framed)),
        "framed_p99_us": float(np.percentile(framed, 99)),
        "ratio": float(np.median(blocked) / np.median(framed)),
    }


def _ask(client: _Client, step: StepRequest) -> tuple[float, float, StepDrafts]:
    begin = time.perf_counter_ns()
    client.submit(step)
    submitted = time.perf_counter_ns()
    drafts = client.collect(deadline_ms=ANSWER_MS)
    end = time.perf_counter_ns()
    if drafts is None or drafts.resync_handles.size:
        raise RpcBenchError(f"step {step.step_id} got no drafts")
    return (end - begin) / 1000, (submitted - begin) / 1000, drafts


def _step(outputs: NDArray[np.int32], position: int) -> StepRequest:
    """One more token of each row."""
    num_rows = len(outputs)
    zeros = np.zeros(num_rows, np.int32)
    return StepRequest(
        step_id=time.monotonic_ns(),
        handles=np.arange(num_rows, dtype=np.int64),
        positions=np.full(num_rows, position, np.int32),
        token_offsets=np.arange(num_rows + 1, dtype=np.int32),
        token_ids=np.ascontiguousarray(outputs[:, position]),
        num_draft_tokens=zeros,
        num_accepted_tokens=zeros,
        max_draft_tokens=np.full(num_rows, ROOM, np.int32),
        num_decode_rows=num_rows,
        num_prefill_tokens=0,
        token_budget=num_rows * ROOM,
    )


def _messages(step: StepRequest, drafts: StepDrafts) -> tuple[bytes, int]:
    """The bytes of the step and the number of bytes of its answer, as the contract has them."""
    request = draft_pb2.DraftStreamRequest()
    write_step(step, request.step)
    answer = draft_pb2.StepDrafts(
        step_id=drafts.step_id,
        draft_lengths=drafts.draft_lengths.tobytes(),
        draft_token_ids=drafts.draft_token_ids.tobytes(),
        survival=drafts.survival.tobytes(),
        redundancy=drafts.redundancy.tobytes(),
        token_budget=drafts.token_budget,
    )
    return request.SerializeToString(), draft_pb2.DraftStreamResponse(drafts=answer).ByteSize()


def _text(num_tokens: int) -> TokenIds:
    raw = bytearray()
    for file in source_files():
        raw += file.read_bytes()
        if len(raw) >= num_tokens:
            return np.frombuffer(bytes(raw[:num_tokens]), np.uint8).astype(np.int32)
    raise RpcBenchError(f"{num_tokens} bytes of Python sources asked for, {len(raw)} are on this machine")


@contextmanager
def _processes(folder: Path) -> Iterator[tuple[SidecarClient, FramedClient]]:
    """A draft server and a framed peer, both in processes of their own."""
    socket, framed_socket = folder / "draft.sock", folder / "framed.sock"
    options = ("--metrics-port", "0", "--policy", POLICY, "--step-deadline-ms", "0", "--log-level", "error")
    limits = ("--num-speculative-tokens", str(ROOM))
    server = (sys.executable, "-m", "agentspec.sidecar", "serve", "--socket", str(socket), *options, *limits)
    peer = (sys.executable, "-m", "agentspec.benchmarks.framed_peer", str(framed_socket))
    with _process(server), _process(peer) as peer_process:
        client = SidecarClient(socket, Vocabulary.of("rpc", _VOCABULARY), fallbacks=Fallbacks())
        try:
            if not client.wait_connected(START_S):
                raise RpcBenchError(f"agentspec-sidecar did not answer within {START_S:g} s")
            _wait_for(framed_socket, peer_process)
            with FramedClient(framed_socket) as framed:
                yield client, framed
        finally:
            client.shutdown()


@contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise RpcBenchError("the framed peer did not start")
        time.sleep(0.01)
