"""A draft server as a process of its own, and a plain gRPC client for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np

from agentspec.draft.v1 import draft_pb2 as pb
from agentspec.draft.v1.draft_pb2_grpc import DraftServiceStub
from agentspec.draft.v1.history_pb2_grpc import HistoryServiceStub

VOCABULARY = [bytes([token]) for token in range(256)]
FINGERPRINT = "a" * 64
START_S = 30.0
ANSWER_S = 20.0
TEXT = list(b"the quick brown fox jumps over the lazy dog. ")


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def i64(*values: int) -> bytes:
    return np.array(values, np.int64).tobytes()


def u32(*values: int) -> bytes:
    return np.array(values, np.uint32).tobytes()


def ints(raw: bytes, dtype: type[np.generic] = np.int32) -> list[int]:
    return [int(value) for value in np.frombuffer(raw, dtype).tolist()]


def step_message(step_id: int, rows: Mapping[int, tuple[int, Sequence[int]]], **fields: Any) -> pb.Step:
    """A step whose rows are (position, new tokens) by handle, each with room for 8 draft tokens."""
    num_rows = len(rows)
    offsets = np.cumsum([0, *(len(tokens) for _, tokens in rows.values())])
    values: dict[str, Any] = {
        "step_id": step_id,
        "handles": i64(*rows),
        "positions": i32(*(position for position, _ in rows.values())),
        "token_offsets": i32(*offsets.tolist()),
        "token_ids": i32(*(token for _, tokens in rows.values() for token in tokens)),
        "num_draft_tokens": i32(*[0] * num_rows),
        "num_accepted_tokens": i32(*[0] * num_rows),
        "max_draft_tokens": i32(*[8] * num_rows),
        "num_decode_rows": num_rows,
        "token_budget": 64,
    }
    return pb.Step(**{**values, **fields})


def open_message(handle: int, prompt: Sequence[int] = TEXT, **fields: Any) -> pb.OpenRequest:
    return pb.OpenRequest(**{"handle": handle, "prompt_token_ids": i32(*prompt), **fields})


def close_message(
    handle: int, num_output_tokens: int, reason: Any = pb.FINISH_REASON_STOP, **fields: Any
) -> pb.CloseRequest:
    return pb.CloseRequest(handle=handle, num_output_tokens=num_output_tokens, reason=reason, **fields)


def vocabulary_parts(
    tokens: Sequence[bytes] = VOCABULARY, fingerprint: str = FINGERPRINT, part_size: int = 100, template: str = ""
) -> Iterator[pb.RegisterTokenizerRequest]:
    for begin in range(0, len(tokens), part_size):
        part = tokens[begin : begin + part_size]
        head = {"model_fingerprint": fingerprint, "chat_template": template} if begin == 0 else {}
        yield pb.RegisterTokenizerRequest(**head, token_lengths=u32(*map(len, part)), token_bytes=b"".join(part))


class Stream:
    """A client's stream: messages out, answers in."""

    def __init__(self, stub: DraftServiceStub, fingerprint: str = FINGERPRINT) -> None:
        self._out: SimpleQueue[pb.DraftStreamRequest | None] = SimpleQueue()
        self.call = stub.DraftStream(iter(self._out.get, None), timeout=ANSWER_S * 3)
        self.send(model_fingerprint=fingerprint)
        self.hello = self.receive()

    def send(self, **fields: Any) -> None:
        self._out.put(pb.DraftStreamRequest(**fields))

    @property
    def num_waiting(self) -> int:
        """Messages that the transport has not taken yet."""
        return self._out.qsize()

    def receive(self) -> pb.DraftStreamResponse:
        answer: pb.DraftStreamResponse = next(self.call)
        return answer

    def ask(self, **fields: Any) -> pb.DraftStreamResponse:
        self.send(**fields)
        return self.receive()

    def end(self) -> None:
        """Let the server see the end of the stream, and wait for its own."""
        self._out.put(None)
        assert [] == list(self.call)


@dataclass(slots=True)
class SidecarProcess:
    """`agentspec-sidecar serve` in a process; its lines of log as they come."""

    socket: Path
    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _channels: list[grpc.Channel] = field(default_factory=list)

    def read_log(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        self.process.wait(START_S)  # whoever waits for an event learns that none will come
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, event: str, count: int = 1) -> dict[str, Any]:
        """The latest of `count` events of a name."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.events if line["event"] == event]

        with self._changed:
            is_there = self._changed.wait_for(lambda: len(found()) >= count or self.process.poll() is not None, START_S)
            assert is_there, f"no {event}"
            assert len(found()) >= count, f"the server ended before {event}: {self.events}"
            return found()[-1]

    def channel(self, **options: Any) -> grpc.Channel:
        channel = grpc.insecure_channel(
            f"unix:{self.socket}", options=[("grpc.use_local_subchannel_pool", 1), *options.items()]
        )
        self._channels.append(channel)
        return channel

    def stub(self) -> DraftServiceStub:
        return DraftServiceStub(self.channel())  # type: ignore[no-untyped-call]  # generated

    def histories(self) -> HistoryServiceStub:
        return HistoryServiceStub(self.channel())  # type: ignore[no-untyped-call]  # generated

    def registered(self) -> DraftServiceStub:
        """A client whose vocabulary is known."""
        stub = self.stub()
        stub.RegisterTokenizer(vocabulary_parts(), timeout=ANSWER_S)
        return stub

    def close_channels(self) -> None:
        while self._channels:
            self._channels.pop().close()

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(START_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(START_S)


def serve_command(socket: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-m", "agentspec.sidecar", "serve", "--socket", str(socket)),
        *(() if "--metrics-port" in flags else ("--metrics-port", "0")),
        *flags,
    ]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AGENTSPEC_")}


@contextmanager
def running_sidecar(socket: Path, *flags: str, **environment: str) -> Iterator[SidecarProcess]:
    """A server that has said that it started; it is killed if it still runs at the end."""
    process = subprocess.Popen(
        serve_command(socket, *flags),
        stdout=subprocess.PIPE,
        text=True,
        env={**clean_environment(), **environment},
    )
    server = SidecarProcess(socket, process)
    reader = threading.Thread(target=server.read_log)
    reader.start()
    try:
        server.wait_for("server_started")
        yield server
    finally:
        server.close_channels()
        process.send_signal(signal.SIGCONT)  # a stopped one would not die of SIGTERM
        process.kill()
        process.wait(START_S)
        reader.join(START_S)
        assert process.stdout is not None
        process.stdout.close()


def eventually(fact: Any, timeout_s: float = ANSWER_S) -> None:
    """Wait until a fact about another process holds."""
    end = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < end, "never became true"
        time.sleep(0.02)
