"""`SidecarClient` and real draft servers: the same drafts as in one process, and servers that hang, die and return."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.sidecar_lab import TEXT, VOCABULARY, SidecarProcess, eventually, open_message, running_sidecar

from agentspec.draft.v1 import draft_pb2
from agentspec.draft.v1.draft_pb2_grpc import DraftServiceStub
from agentspec.serving_patch import command_queue, sidecar_client, sidecar_messages
from agentspec.serving_patch.client import EmbeddedClient
from agentspec.serving_patch.mailbox import Fallbacks
from agentspec.serving_patch.sidecar_client import SidecarClient
from agentspec.serving_patch.sidecar_messages import Vocabulary
from agentspec.sidecar.budget import BudgetOptions
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import UNTAGGED, Tags

LONG_MS = 20_000.0  # a wait that only a bug makes long
DEADLINE_MS = 20.0
START_S = 30.0
GREEDY = Sampling()
MODEL = Vocabulary.of("test", VOCABULARY)
SERVER_FLAGS = ("--policy", "redundancy", "--step-deadline-ms", "0")


def tokens_of(*values: int) -> TokenIds:
    return np.array(values, np.int32)


class Batch:
    """What a hook would do: rows with their outputs, steps of all of them, resyncs."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.prompts: dict[int, TokenIds] = {}
        self.outputs: dict[int, list[int]] = {}
        self.positions: dict[int, int] = {}
        self.step_id = 0
        self.num_resyncs = 0

    def open(self, handle: int, prompt: list[int] | None = None, tags: Tags = UNTAGGED) -> None:
        self.prompts[handle] = np.array(TEXT if prompt is None else prompt, np.int32)
        self.outputs[handle] = []
        self.reopen(handle, tags)

    def reopen(self, handle: int, tags: Tags = UNTAGGED) -> None:
        self.positions[handle] = 0
        self.client.open(handle, self.prompts[handle], tags, GREEDY, namespace="default")

    def step(self, *new: int, room: int = 8, budget: int = 64) -> None:
        """Give every row the same new tokens and submit."""
        self.step_id += 1
        handles = [*self.outputs]
        tokens, offsets = [], [0]
        for handle in handles:
            self.outputs[handle] += new
            tokens += self.outputs[handle][self.positions[handle] :]
            offsets.append(len(tokens))
        count = len(handles)
        positions = [self.positions[handle] for handle in handles]
        self.client.submit(
            StepRequest(
                step_id=self.step_id,
                handles=np.array(handles, np.int64),
                positions=np.array(positions, np.int32),
                token_offsets=np.array(offsets, np.int32),
                token_ids=np.array(tokens, np.int32),
                num_draft_tokens=np.zeros(count, np.int32),
                num_accepted_tokens=np.zeros(count, np.int32),
                max_draft_tokens=np.full(count, room, np.int32),
                num_decode_rows=count,
                num_prefill_tokens=0,
                token_budget=budget,
            )
        )
        for handle in handles:
            self.positions[handle] = len(self.outputs[handle])

    def collect(self, deadline_ms: float = LONG_MS) -> StepDrafts | None:
        drafts: StepDrafts | None = self.client.collect(deadline_ms=deadline_ms)
        if drafts is not None:
            for handle in drafts.resync_handles.tolist():
                self.num_resyncs += 1
                self.reopen(handle)
        return drafts

    def ask(self, *new: int, deadline_ms: float = LONG_MS) -> StepDrafts | None:
        self.step(*new)
        return self.collect(deadline_ms)

    def close(self, handle: int, reason: FinishReason = FinishReason.STOP) -> None:
        output = self.outputs.pop(handle)
        tail = np.array(output[self.positions.pop(handle) :], np.int32)
        self.client.close(handle, reason, len(output), tail)


def has_drafts(drafts: StepDrafts | None) -> bool:
    return drafts is not None and drafts.draft_token_ids.size > 0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("sidecar") / "draft.sock", *SERVER_FLAGS) as server:
        yield server


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "draft.sock"


@pytest.fixture
def fallbacks() -> Fallbacks:
    return Fallbacks()


@pytest.fixture
def client_of(fallbacks: Fallbacks) -> Iterator[Callable[..., SidecarClient]]:
    """Make clients that are shut down after the test."""
    clients: list[SidecarClient] = []

    def make(path: Path, *, must_connect: bool = True, vocabulary: Vocabulary = MODEL) -> SidecarClient:
        clients.append(SidecarClient(path, vocabulary, fallbacks=fallbacks))
        if must_connect:
            assert clients[-1].wait_connected(START_S)
        return clients[-1]

    yield make
    for client in clients:
        client.shutdown()
        assert not client._thread.is_alive()


def seconds(call: Callable[[], Any]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin


# --- with a server that is well ---


def test_drafts_and_rooms_come_back_in_the_order_of_the_rows(client_of: Any, server: SidecarProcess) -> None:
    batch = Batch(client_of(server.socket))
    batch.open(3, TEXT * 2)
    batch.open(1, [1, 2, 3], Tags(namespace="apart"))
    drafts = batch.ask(*TEXT[:10])

    assert drafts is not None
    assert drafts.draft_lengths[0] == 8
    assert drafts.draft_token_ids[:8].tolist() == TEXT[10:18]
    assert drafts.survival.shape == drafts.draft_token_ids.shape == (drafts.draft_lengths.sum(),)


def play(client: Any, rng: np.random.Generator, *, deadline_ms: float = LONG_MS) -> list[list[int]]:
    """Agents that write the same text with small changes; the drafts of each step."""
    batch = Batch(client)
    seen: list[list[int]] = []
    for wave in range(3):
        for handle in range(8):
            batch.open(wave * 8 + handle, [10, 20, handle], Tags(workflow_id="w", stage="s"))
        for position in range(0, 60, 3):
            words = TEXT[position % 30 : position % 30 + 3]
            words[rng.integers(3)] = int(rng.integers(97, 100))
            drafts = batch.ask(*words, deadline_ms=deadline_ms)
            assert drafts is not None
            seen.append([*drafts.draft_lengths.tolist(), *drafts.draft_token_ids.tolist()])
        for handle in [*batch.outputs]:
            batch.close(handle)
    return seen


def test_drafts_are_those_of_the_embedded_engine(client_of: Any, server: SidecarProcess) -> None:
    engine = Engine(
        VOCABULARY, CHAT, num_speculative_tokens=16, history_bytes=1 << 26, budget=BudgetOptions("redundancy")
    )
    vocabulary = Vocabulary.of("embedded twin", VOCABULARY)
    with running_sidecar(server.socket.with_name("twin.sock"), *SERVER_FLAGS) as twin:
        expected = play(EmbeddedClient(engine), np.random.default_rng(7))
        actual = play(client_of(twin.socket, vocabulary=vocabulary), np.random.default_rng(7))

    assert sum(map(len, expected)) > 8 * len(expected), "nothing was drafted"
    assert actual == expected


def test_vocabulary_is_registered_once(client_of: Any, tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock") as server:
        for _ in range(3):
            client_of(server.socket)
        info = server.stub().GetServerInfo(draft_pb2.GetServerInfoRequest(), timeout=20)

        assert [model.vocabulary_size for model in info.models] == [256]
        assert [model.model_fingerprint for model in info.models] == [MODEL.fingerprint]


def test_vocabulary_of_many_parts_arrives_whole(
    client_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_messages, "MAX_PART_BYTES", 1000)
    tokens = [b"x" * (i % 17) for i in range(5000)] + [b"y" * 990]
    with running_sidecar(tmp_path / "draft.sock") as server:
        client_of(server.socket, vocabulary=Vocabulary.of("many", tokens))
        info = server.stub().GetServerInfo(draft_pb2.GetServerInfoRequest(), timeout=20)

        assert info.models[0].vocabulary_size == 5001


def test_models_with_equal_tokens_have_histories_of_their_own() -> None:
    assert Vocabulary.of("a", VOCABULARY).fingerprint != Vocabulary.of("b", VOCABULARY).fingerprint
    assert Vocabulary.of("a", [b"ab", b"c"]).fingerprint != Vocabulary.of("a", [b"a", b"bc"]).fingerprint


def test_close_reaches_the_server_of_an_idle_engine(client_of: Any, tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock", "--max-open-requests", "1") as server:
        batch = Batch(client_of(server.socket))
        batch.open(1)
        batch.ask(7)
        stub = server.stub()
        assert not has_room(stub)
        batch.close(1)
        eventually(lambda: has_room(stub))


def has_room(stub: DraftServiceStub) -> bool:
    """Whether the server takes another request."""
    request = draft_pb2.OpenRequestsRequest(model_fingerprint=MODEL.fingerprint, requests=[open_message(9)])
    call = stub.OpenRequests.future(request, timeout=20)
    assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED)
    return bool(call.code() is grpc.StatusCode.OK)


def test_open_step_and_close_of_one_request_are_never_swapped(client_of: Any, server: SidecarProcess) -> None:
    client = client_of(server.socket)
    batch = Batch(client)
    for handle in range(200):  # all are queued before the sender wakes
        batch.open(handle)
        batch.step(5)
        batch.close(handle)
    batch.open(999)

    assert batch.ask(7) is not None
    assert batch.num_resyncs == 0


def test_request_that_a_full_queue_dropped_is_asked_for_again(
    client_of: Any, server: SidecarProcess, fallbacks: Fallbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(client_of(server.socket))
    with monkeypatch.context() as context:
        context.setattr(command_queue, "MAX_QUEUED_TOKENS", 0)
        batch.open(1, TEXT * 2)
    first = batch.ask(*TEXT[:10])
    second = batch.ask(*TEXT[10:12])

    assert first is not None
    assert first.resync_handles.tolist() == [1]
    assert has_drafts(second)
    assert fallbacks.counts() == {"queue_full": 1}


def test_request_that_the_server_refuses_is_opened_a_few_times_and_no_more(
    client_of: Any, server: SidecarProcess, fallbacks: Fallbacks
) -> None:
    client = client_of(server.socket)
    batch = Batch(client)
    client.open(2, tokens_of(1), UNTAGGED, GREEDY, namespace="not-ours")
    batch.prompts[2], batch.outputs[2], batch.positions[2] = tokens_of(1), [], 0
    original = client.open
    client.open = lambda handle, *args, **kwargs: original(handle, *args, namespace="not-ours")
    answers = [batch.ask(7) for _ in range(sidecar_client.MAX_OPENS + 5)]

    assert all(answer is not None for answer in answers)
    assert fallbacks.counts() == {"refused": sidecar_client.MAX_OPENS}


def test_prompt_that_fits_into_no_message_is_cut_at_its_head(client_of: Any, tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock", "--max-message-bytes", "64KiB", *SERVER_FLAGS) as server:
        batch = Batch(client_of(server.socket))
        batch.open(1, [1] * 100_000 + TEXT * 2)
        drafts = batch.ask(*TEXT[:10])

    assert drafts is not None
    assert drafts.draft_token_ids.tolist() == TEXT[10:18]


def test_tags_that_no_message_can_carry_cost_that_request_its_drafts_alone(
    client_of: Any, server: SidecarProcess, fallbacks: Fallbacks
) -> None:
    batch = Batch(client_of(server.socket))
    batch.open(1, TEXT * 2)
    batch.client.open(2, tokens_of(1), Tags.model_construct(stage="\ud800"), GREEDY, namespace="default")
    drafts = batch.ask(*TEXT[:10])

    assert has_drafts(drafts)
    assert fallbacks.counts() == {"client_error": 1}


def test_two_clients_with_the_same_handles_do_not_meet(client_of: Any, server: SidecarProcess) -> None:
    batches = [Batch(client_of(server.socket)) for _ in range(2)]
    for batch in batches:
        batch.open(1)
        batch.ask(7)
    batches[0].close(1)
    batches[0].open(2)
    batches[0].ask(7)
    drafts = batches[1].ask(7)

    assert drafts is not None
    assert drafts.resync_handles.tolist() == []


def test_figures_tell_the_round_trip(client_of: Any, server: SidecarProcess) -> None:
    client = client_of(server.socket)
    batch = Batch(client)
    batch.open(1)
    for _ in range(5):
        batch.ask(7)
    figures = client.figures()

    assert (figures.is_connected, figures.num_connections, figures.num_answers) == (True, 1, 5)
    assert 0 < figures.round_trip_s < LONG_MS / 1000


# --- with a server that is not ---


def test_without_a_server_no_step_waits_and_drafts_come_once_it_is_there(
    client_of: Any, socket_path: Path, fallbacks: Fallbacks
) -> None:
    client = client_of(socket_path, must_connect=False)
    batch = Batch(client)
    batch.open(1, TEXT * 2)
    waited_s = seconds(lambda: batch.ask(*TEXT[:5]))
    num_steps = batch.step_id
    with running_sidecar(socket_path, *SERVER_FLAGS):
        assert client.wait_connected(START_S)
        batch.ask(*TEXT[5:8])
        drafts = batch.ask(*TEXT[8:10])

        assert waited_s < LONG_MS / 2000
        assert fallbacks.counts() == {"disconnected": num_steps}
        assert drafts is not None
        assert drafts.draft_token_ids.tolist() == TEXT[10:18]


def test_killed_server_costs_no_wait_and_its_successor_gets_everything_again(
    client_of: Any, socket_path: Path, fallbacks: Fallbacks
) -> None:
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        client = client_of(socket_path)
        batch = Batch(client)
        for handle in range(4):
            batch.open(handle, TEXT * 2)
        batch.ask(*TEXT[:6])
        server.kill()
        eventually(lambda: not client.figures().is_connected)
        waited_s = [seconds(lambda: batch.ask(7)) for _ in range(20)]
    with running_sidecar(socket_path, *SERVER_FLAGS):
        assert client.wait_connected(START_S)
        resync = batch.ask(*TEXT[:8])
        drafts = batch.ask(*TEXT[8:10])

        assert max(waited_s) < LONG_MS / 2000
        assert resync is not None
        assert sorted(resync.resync_handles.tolist()) == [0, 1, 2, 3]
        assert has_drafts(drafts)
        assert fallbacks.counts() == {"sidecar_lost": 1, "disconnected": 20}
        assert client.figures().num_connections == 2


def test_server_that_dies_while_a_step_waits_ends_the_wait(client_of: Any, socket_path: Path) -> None:
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        batch = Batch(client_of(socket_path))
        batch.open(1)
        batch.ask(7)
        server.process.send_signal(signal.SIGSTOP)
        batch.step(7)
        killer = threading.Timer(0.1, server.process.kill)
        killer.start()
        waited_s = seconds(batch.collect)
        killer.join()

    assert waited_s < LONG_MS / 2000


def test_hung_server_costs_one_deadline_then_nothing_and_serves_on_when_it_wakes(
    client_of: Any, socket_path: Path, fallbacks: Fallbacks
) -> None:
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        batch = Batch(client_of(socket_path))
        batch.open(1, TEXT * 2)
        batch.ask(*TEXT[:4])
        server.process.send_signal(signal.SIGSTOP)
        first_s = seconds(lambda: batch.ask(7, deadline_ms=DEADLINE_MS))
        others_s = [seconds(lambda: batch.ask(7)) for _ in range(20)]
        server.process.send_signal(signal.SIGCONT)
        eventually(lambda: batch.client.figures().num_late_answers >= 20)
        batch.step(7)
        time.sleep(0.2)  # the probe after a miss is the answer itself, which has to be there

        assert batch.collect() is not None
        assert batch.num_resyncs == 0
        assert DEADLINE_MS / 1000 <= first_s < LONG_MS / 2000
        assert max(others_s) < LONG_MS / 2000
        assert fallbacks.counts() == {"deadline": 1, "behind": 20}


def test_late_answer_is_never_taken_for_the_next_step(client_of: Any, socket_path: Path) -> None:
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        batch = Batch(client_of(socket_path))
        batch.open(1, TEXT * 2)
        batch.ask(*TEXT[:4])
        server.process.send_signal(signal.SIGSTOP)
        batch.ask(7, deadline_ms=DEADLINE_MS)
        batch.ask(8, deadline_ms=DEADLINE_MS)
        server.process.send_signal(signal.SIGCONT)
        answers = [batch.ask(9) for _ in range(20)]

    assert all(answer is None or answer.step_id == 4 + index for index, answer in enumerate(answers))


def test_memory_of_a_client_whose_server_hangs_is_bounded(
    client_of: Any, socket_path: Path, fallbacks: Fallbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_queue, "MAX_QUEUED_TOKENS", 20_000)
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        client = client_of(socket_path)
        batch = Batch(client)
        batch.open(1, TEXT * 2)
        batch.ask(*TEXT[:4])
        server.process.send_signal(signal.SIGSTOP)
        for handle in range(2, 200):
            batch.open(handle, [1] * 5000)
            batch.ask(7, deadline_ms=1)
            batch.close(handle)
        num_tokens = client._commands.num_tokens
        server.process.send_signal(signal.SIGCONT)
        eventually(lambda: has_drafts(batch.ask(*TEXT[:5], deadline_ms=200)))

    assert num_tokens < 20_000 + 200 * command_queue.COMMAND_TOKENS
    assert fallbacks.counts()["queue_full"] > 100


def test_server_that_comes_back_with_another_boot_is_told_the_vocabulary_again(
    client_of: Any, socket_path: Path
) -> None:
    client = client_of(socket_path, must_connect=False)
    for _ in range(3):
        with running_sidecar(socket_path, *SERVER_FLAGS) as server:
            assert client.wait_connected(START_S)
            server.kill()
        eventually(lambda: not client.figures().is_connected)

    assert client.figures().num_connections == 3


def test_drained_server_is_left_without_an_error(client_of: Any, socket_path: Path, fallbacks: Fallbacks) -> None:
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        client = client_of(socket_path)
        assert server.terminate() == 0
        eventually(lambda: not client.figures().is_connected)

    assert fallbacks.counts() == {"sidecar_lost": 1}


def test_what_listens_but_speaks_no_grpc_is_left_alone(client_of: Any, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        client = client_of(socket_path, must_connect=False)
        batch = Batch(client)
        batch.open(1)
        waited_s = seconds(lambda: batch.ask(7))

        assert waited_s < LONG_MS / 2000
        assert not client.figures().is_connected


def test_client_that_ends_leaves_no_request_open_and_no_thread(client_of: Any, server: SidecarProcess) -> None:
    before = set(threading.enumerate())
    client = SidecarClient(server.socket, MODEL, fallbacks=Fallbacks())
    assert client.wait_connected(START_S)
    Batch(client).open(1)
    client.shutdown()
    client.shutdown()

    eventually(lambda: {thread for thread in threading.enumerate() if thread.is_alive()} <= before)
    client.submit(None)  # type: ignore[arg-type]  # nothing of it is looked at any more


def test_shutdown_does_not_wait_for_a_hung_server(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_client, "JOIN_TIMEOUT_S", 0.3)
    with running_sidecar(socket_path, *SERVER_FLAGS) as server:
        client = SidecarClient(socket_path, MODEL, fallbacks=Fallbacks())
        assert client.wait_connected(START_S)
        server.process.send_signal(signal.SIGSTOP)
        Batch(client).open(1)
        waited_s = seconds(client.shutdown)

        assert waited_s < 5
        assert not client._thread.is_alive()
