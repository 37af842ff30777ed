"""What goes wrong around a draft server: killed, hung, flooded, fed with garbage; it serves on and its memory stays."""

from __future__ import annotations

import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.sidecar_lab import (
    ANSWER_S,
    FINGERPRINT,
    START_S,
    TEXT,
    SidecarProcess,
    Stream,
    eventually,
    i32,
    open_message,
    running_sidecar,
    step_message,
)

from agentspec.draft.v1 import draft_pb2 as pb
from agentspec.draft.v1 import history_pb2

MIB = 1 << 20
HELLO = TEXT[:5]


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, metrics_port: int) -> Iterator[SidecarProcess]:
    socket_path = tmp_path_factory.mktemp("faults") / "draft.sock"
    with running_sidecar(socket_path, "--metrics-port", str(metrics_port)) as server:
        server.registered()
        yield server


@pytest.fixture
def server(shared: SidecarProcess) -> Iterator[SidecarProcess]:
    """A server that nobody else uses, and that every test leaves as it found it: up, with nothing open."""
    yield shared
    assert is_drafting(shared)
    eventually(lambda: num_open_requests(shared) == 0)
    shared.close_channels()


def metric(port: int, name: str, labels: str = "") -> float:
    """A value as Prometheus reads it; 0 when it is not there."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=ANSWER_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and labels in line)


def resident_bytes(server: SidecarProcess) -> int:
    fields = Path(f"/proc/{server.process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def num_handles(server: SidecarProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def num_open_requests(server: SidecarProcess) -> int:
    histories: Any = server.histories()
    (model,) = histories.GetStats(history_pb2.GetStatsRequest(), timeout=ANSWER_S).models
    return int(model.num_open_requests)


def is_drafting(server: SidecarProcess) -> bool:
    stream = Stream(server.stub())
    answer = stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)}))
    stream.end()
    return answer.HasField("drafts")


class Load(threading.Thread):
    """An engine that steps without a pause until its stream breaks, then comes back until it is told to end."""

    def __init__(self, server: SidecarProcess) -> None:
        super().__init__()
        self._server = server
        self._is_ended = threading.Event()
        self.boot_ids: set[int] = set()
        self.num_steps = 0
        self.codes: set[str] = set()

    def run(self) -> None:
        while not self._is_ended.is_set():
            try:
                self._engine(Stream(self._server.registered()))
            except grpc.RpcError as error:
                self.codes.add(error.code().name)

    def _engine(self, stream: Stream) -> None:
        self.boot_ids.add(stream.hello.boot_id)
        opens, position = [open_message(handle) for handle in range(8)], 0
        while not self._is_ended.is_set():
            rows = dict.fromkeys(range(8), (position, HELLO))
            answer = stream.ask(opens=opens, step=step_message(position + 1, rows))
            assert b"" == answer.drafts.resync_handles
            opens, position = [], position + len(HELLO)
            self.num_steps += 1
        stream.end()

    def end(self) -> None:
        self._is_ended.set()
        self.join(ANSWER_S)
        assert not self.is_alive()


def test_a_server_that_is_killed_under_load_is_replaced_and_its_clients_come_back(tmp_path: Path) -> None:
    path = tmp_path / "draft.sock"
    with running_sidecar(path) as first:
        loads = [Load(first) for _ in range(4)]
        for load in loads:
            load.start()
        eventually(lambda: all(load.num_steps > 50 for load in loads))
        first.kill()
        with running_sidecar(path):
            eventually(lambda: all(len(load.boot_ids) > 1 for load in loads))
            before = [load.num_steps for load in loads]
            eventually(lambda: all(load.num_steps > 50 + count for load, count in zip(loads, before, strict=True)))
            for load in loads:
                load.end()

    assert {"UNAVAILABLE"} == set().union(*(load.codes for load in loads))


def test_a_server_that_hung_answers_what_was_asked_meanwhile(server: SidecarProcess) -> None:
    stream = Stream(server.stub())
    stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)}))
    server.process.send_signal(signal.SIGSTOP)
    for step_id in range(2, 6):
        stream.send(step=step_message(step_id, {1: (5 * (step_id - 1), HELLO)}))
    server.process.send_signal(signal.SIGCONT)

    answers = [stream.receive().drafts for _ in range(4)]

    assert [2, 3, 4, 5] == [answer.step_id for answer in answers]
    assert [b""] * 4 == [answer.resync_handles for answer in answers]
    stream.end()


_CLIENT = """
import sys, time
from pathlib import Path
from tests.sidecar_lab import SidecarProcess, Stream, open_message, step_message
server = SidecarProcess(Path(sys.argv[1]), None)
stream = Stream(server.stub())
stream.ask(opens=[open_message(handle) for handle in range(100)], step=step_message(1, {}))
print("opened", flush=True)
time.sleep(600)
"""


def test_requests_of_a_client_that_is_killed_are_closed(server: SidecarProcess, metrics_port: int) -> None:
    project = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([project, *sys.path])}
    command = [sys.executable, "-c", _CLIENT, str(server.socket)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as client:
        assert client.stdout is not None
        assert "opened\n" == client.stdout.readline()
        assert (100, 1) == (num_open_requests(server), metric(metrics_port, "agentspec_streams"))
        client.kill()
        client.wait(START_S)

    eventually(lambda: num_open_requests(server) == 0)
    assert 0 == metric(metrics_port, "agentspec_streams")


def test_256_clients_are_served_and_leave_nothing(server: SidecarProcess) -> None:
    handles = num_handles(server)

    def engine(number: int) -> list[int]:
        stream = Stream(server.stub())
        opened = open_message(number, TEXT * 4)
        answers = [stream.ask(opens=[opened], step=step_message(1, {number: (0, HELLO)}))]
        ready.wait(ANSWER_S)
        answers += [stream.ask(step=step_message(step, {number: (5 * step - 5, HELLO)})) for step in range(2, 10)]
        assert {b""} == {answer.drafts.resync_handles for answer in answers}
        stream.end()
        return [answer.drafts.step_id for answer in answers]

    ready = threading.Barrier(256)
    with ThreadPoolExecutor(256) as pool:
        assert [[*range(1, 10)]] * 256 == [*pool.map(engine, range(256))]
    server.close_channels()

    eventually(lambda: num_open_requests(server) == 0)
    server.close_channels()
    eventually(lambda: num_handles(server) <= handles + 1)


def test_a_reader_that_is_slow_holds_up_nobody_else_and_costs_no_memory(server: SidecarProcess) -> None:
    num_rows = 256
    slow = Stream(server.stub())
    rows = dict.fromkeys(range(num_rows), (0, HELLO))
    slow.ask(opens=[open_message(handle) for handle in range(num_rows)], step=step_message(1, rows))
    before = resident_bytes(server)
    for step_id in range(2, 4000):  # answers of 4 KiB each that nobody reads
        slow.send(step=step_message(step_id, rows))
    other = Stream(server.stub())
    for step_id in range(1, 100):
        opens = [open_message(1)] if step_id == 1 else []
        assert (
            step_id == other.ask(opens=opens, step=step_message(step_id, {1: (5 * step_id - 5, HELLO)})).drafts.step_id
        )
    other.end()

    assert resident_bytes(server) - before < 48 * MIB
    slow.call.cancel()
    eventually(lambda: num_open_requests(server) == 0)


def test_bytes_that_are_no_http_break_only_their_own_connection(server: SidecarProcess) -> None:
    stream = Stream(server.stub())
    generator = random.Random(7)  # noqa: S311 - garbage, no secret
    before, handles = resident_bytes(server), num_handles(server)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    for number in range(200):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(ANSWER_S)
            raw.connect(str(server.socket))
            try:
                raw.sendall((preface if number % 2 else b"") + generator.randbytes(4096))
            except (BrokenPipeError, ConnectionResetError):
                continue

    assert stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)})).HasField("drafts")
    eventually(lambda: num_handles(server) <= handles + 2)
    assert resident_bytes(server) - before < 32 * MIB
    stream.end()


def test_a_message_over_the_limit_is_refused_and_its_requests_are_closed(
    server: SidecarProcess, metrics_port: int
) -> None:
    stream = Stream(server.stub())
    stream.ask(opens=[open_message(handle) for handle in range(10)], step=step_message(1, {}))
    before = resident_bytes(server)
    stream.send(opens=[open_message(11, prompt_token_ids=bytes(64 * MIB))])

    with pytest.raises(grpc.RpcError) as raised:
        stream.receive()

    assert grpc.StatusCode.RESOURCE_EXHAUSTED == raised.value.code()
    eventually(lambda: metric(metrics_port, "agentspec_open_requests") == 0)
    assert resident_bytes(server) - before < 48 * MIB


def test_a_flood_of_bad_steps_is_answered_counted_and_forgotten(server: SidecarProcess, metrics_port: int) -> None:
    stream = Stream(server.stub())
    before = resident_bytes(server)
    refused = metric(metrics_port, "agentspec_refusals_total", 'code="INVALID_ARGUMENT"')
    for step_id in range(1, 2001):
        answer = stream.ask(step=step_message(step_id, {1: (0, HELLO)}, positions=b"123"))
        assert ("step.positions", step_id) == (answer.error.field, answer.error.step_id)

    assert refused + 2000 == metric(metrics_port, "agentspec_refusals_total", 'code="INVALID_ARGUMENT"')
    assert resident_bytes(server) - before < 16 * MIB
    stream.end()


def test_more_calls_than_the_server_takes_are_refused_and_room_comes_back(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--max-calls", "4") as server:
        stub = server.registered()
        streams = [Stream(stub) for _ in range(4)]
        with pytest.raises(grpc.RpcError) as raised:
            Stream(stub)
        streams.pop().end()

        assert grpc.StatusCode.RESOURCE_EXHAUSTED == raised.value.code()
        eventually(lambda: _connects(stub))
        for stream in streams:
            stream.end()


def _connects(stub: Any) -> bool:
    try:
        Stream(stub).end()
    except grpc.RpcError:
        return False
    return True


def test_prompts_beyond_the_memory_of_requests_are_refused_until_others_close(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--request-bytes", "8MiB") as server:
        stream = Stream(server.registered())
        prompt = [number % 251 for number in range(8000)]
        refused = None
        for handle in range(200):
            answer = stream.ask(opens=[open_message(handle, prompt)], step=step_message(handle + 1, {}))
            if answer.HasField("error"):
                refused = answer.error
                stream.receive()
                break
        assert refused is not None
        stream.send(closes=[pb.CloseRequest(handle=number, reason=pb.FINISH_REASON_ABORT) for number in range(handle)])
        reopened = stream.ask(opens=[open_message(handle, prompt)], step=step_message(1000, {}))

        assert grpc.StatusCode.RESOURCE_EXHAUSTED.value[0] == refused.code
        assert "opens[0].prompt_token_ids" == refused.field
        assert reopened.HasField("drafts")
        stream.end()


def test_a_drain_waits_for_no_one_who_does_not_read(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--drain-s", "1") as server:
        stub = server.registered()
        streams = [Stream(stub) for _ in range(64)]
        slow = Stream(stub)
        for step_id in range(1, 5000):
            slow.send(step=step_message(step_id, {}))
        begin = time.monotonic()

        assert 0 == server.terminate()
        assert time.monotonic() - begin < 10
        assert {grpc.StatusCode.UNAVAILABLE} == {_end_of(stream) for stream in streams}
        slow.call.cancel()


def _end_of(stream: Stream) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        stream.receive()
    code: grpc.StatusCode = raised.value.code()
    return code


@pytest.mark.slow
def test_streams_that_never_say_whose_they_are_give_their_places_back(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--max-calls", "4") as server:
        stub = server.registered()
        waiting = threading.Event()
        silent: list[Any] = [stub.DraftStream(iter(waiting.wait, True)) for _ in range(4)]

        eventually(lambda: _connects(stub))
        assert {grpc.StatusCode.RESOURCE_EXHAUSTED} == {call.code() for call in silent}
        waiting.set()


def test_a_vocabulary_that_stops_coming_holds_up_no_step(server: SidecarProcess) -> None:
    never = threading.Event()

    def parts() -> Iterator[pb.RegisterTokenizerRequest]:
        yield pb.RegisterTokenizerRequest(model_fingerprint="b" * 64)
        never.wait(ANSWER_S)

    registering: Any = server.stub().RegisterTokenizer.future(parts())
    stream = Stream(server.stub())
    answer = stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)}))

    assert 1 == answer.drafts.step_id
    registering.cancel()
    never.set()
    stream.end()


def test_an_import_holds_up_no_step(server: SidecarProcess) -> None:
    histories: Any = server.histories()
    text = i32(*(number * 7919 % 256 for number in range(65536)))
    blocks = [history_pb2.Block(stage=f"s{number}", token_ids=text) for number in range(24)]
    request = history_pb2.AppendBlocksRequest(model_fingerprint=FINGERPRINT, blocks=blocks)
    stream = Stream(server.stub())
    stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)}))
    steps_s: list[float] = []
    imports_s: list[float] = []
    while len(steps_s) < 50:
        begin = time.perf_counter()
        importing = histories.AppendBlocks.future(request, timeout=ANSWER_S)
        while not importing.done():
            asked = time.perf_counter()
            position = 5 * len(steps_s) + 5
            stream.ask(step=step_message(len(steps_s) + 2, {1: (position, HELLO)}))
            steps_s.append(time.perf_counter() - asked)
        imports_s.append(time.perf_counter() - begin)
        assert 24 * 65536 == importing.result().num_tokens
    stream.end()

    assert statistics.median(steps_s) < statistics.median(imports_s) / 10
