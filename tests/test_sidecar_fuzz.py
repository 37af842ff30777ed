"""Whatever a client sends: the answer names a code of the contract's table, and the stream serves on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.sidecar_lab import (
    ANSWER_S,
    FINGERPRINT,
    TEXT,
    SidecarProcess,
    i32,
    i64,
    open_message,
    running_sidecar,
    step_message,
)

from agentspec.draft.v1 import draft_pb2 as pb
from agentspec.draft.v1 import history_pb2

MARKER = 1 << 63  # step ids from here on are the test's own
# Of the contract's table, less INTERNAL: that is a bug.
ALLOWED = {
    code.value[0]: code.name
    for code in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.PERMISSION_DENIED,
    )
}
FUZZED = settings(
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

handles = st.one_of(st.integers(0, 5), st.integers(-(1 << 63), (1 << 63) - 1))
counts = st.one_of(st.integers(0, 8), st.integers(-(1 << 31), (1 << 31) - 1))
tokens = st.one_of(st.integers(0, 255), st.integers(-5, 300))
names = st.text(max_size=300)
tag_texts = st.one_of(
    st.sampled_from(['{"stage": "s"}', '{"v": 2}', "[]", "{", '{"grammar": "x"}', '{"stage": 1}']), st.text(max_size=50)
)


def packed(strategy: st.SearchStrategy[int], pack: Callable[..., bytes] = i32) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.lists(strategy, max_size=6).map(lambda values: pack(*values)),
        st.binary(max_size=40),
    )


steps = st.builds(
    pb.Step,
    step_id=st.integers(0, MARKER - 1),
    handles=packed(handles, i64),
    positions=packed(counts),
    token_offsets=packed(counts),
    token_ids=packed(tokens),
    num_draft_tokens=packed(counts),
    num_accepted_tokens=packed(counts),
    max_draft_tokens=packed(counts),
    num_decode_rows=st.integers(0, (1 << 32) - 1),
    num_prefill_tokens=st.integers(0, (1 << 32) - 1),
    token_budget=st.integers(0, (1 << 32) - 1),
    num_context_tokens=st.integers(0, (1 << 64) - 1),
    traceparent=st.text(max_size=150),
    timing=st.none()
    | st.builds(
        pb.StepTiming,
        duration_ms=st.floats(width=32),
        num_decode_rows=st.integers(0, (1 << 32) - 1),
        num_context_tokens=st.integers(0, (1 << 64) - 1),
    ),
)
valid_steps = st.builds(
    lambda rows, step_id, budget: step_message(step_id, rows, token_budget=budget),
    st.dictionaries(
        st.integers(0, 5), st.tuples(st.integers(0, 9), st.lists(st.integers(0, 255), max_size=5)), max_size=6
    ),
    st.integers(0, MARKER - 1),
    st.integers(0, 99),
)
opens = st.builds(
    pb.OpenRequest,
    handle=handles,
    namespace=st.sampled_from(["", "default", "other"]) | names,
    prompt_token_ids=packed(tokens),
    tags_json=tag_texts,
    sampling=st.builds(pb.Sampling, temperature=st.floats(width=32), forced_tool=names),
)
closes = st.builds(
    pb.CloseRequest,
    handle=handles,
    reason=st.integers(0, 9),
    num_output_tokens=st.integers(0, (1 << 32) - 1),
    tail_token_ids=packed(tokens),
)
messages = st.builds(
    pb.DraftStreamRequest,
    model_fingerprint=names,
    closes=st.lists(closes, max_size=3),
    opens=st.lists(opens, max_size=3),
    step=st.none() | steps | valid_steps,
)


def damaged(message: bytes, cuts: list[tuple[int, int]]) -> bytes:
    raw = bytearray(message)
    for place, value in cuts:
        if raw:
            raw[place % len(raw)] = value
    return bytes(raw)


raw_messages = st.one_of(
    messages.map(pb.DraftStreamRequest.SerializeToString),
    st.builds(
        damaged,
        messages.map(pb.DraftStreamRequest.SerializeToString),
        st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
    ),
    st.binary(max_size=200),
)


class RawStream:
    """A stream whose messages are bytes; a step of the test's own follows each, so that its answers are known."""

    def __init__(self, server: SidecarProcess) -> None:
        self._out: SimpleQueue[bytes | None] = SimpleQueue()
        method: Any = server.channel().stream_stream("/agentspec.draft.v1.DraftService/DraftStream")
        self._call = method(iter(self._out.get, None))
        self._out.put(pb.DraftStreamRequest(model_fingerprint=FINGERPRINT).SerializeToString())
        next(self._call)
        self._step_id = MARKER

    def answers(self, raw: bytes) -> list[pb.DraftStreamResponse]:
        self._step_id += 1
        self._out.put(raw)
        marker = pb.DraftStreamRequest(step=step_message(self._step_id, {}))
        self._out.put(marker.SerializeToString())
        answers: list[pb.DraftStreamResponse] = []
        while True:
            answer = pb.DraftStreamResponse.FromString(next(self._call))
            if answer.drafts.step_id == self._step_id:
                return answers
            answers.append(answer)

    def end(self) -> None:
        self._out.put(None)
        assert [] == list(self._call)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    with running_sidecar(tmp_path_factory.mktemp("fuzz") / "s", "--max-open-requests", "64") as server:
        server.registered()
        yield server
        assert server.process.poll() is None
        assert [] == [line for line in server.events if line["event"] == "call_failed"]


@pytest.fixture(scope="module")
def channel(server: SidecarProcess) -> grpc.Channel:
    return server.channel()


@pytest.fixture(scope="module")
def stream(server: SidecarProcess) -> Iterator[RawStream]:
    stream = RawStream(server)
    yield stream
    stream.end()


@FUZZED
@given(raw=raw_messages)
@example(raw=pb.DraftStreamRequest(opens=[open_message(1)], step=step_message(1, {1: (0, TEXT)})).SerializeToString())
def test_every_message_of_a_stream_is_answered_by_the_table_and_the_stream_lives_on(
    stream: RawStream, raw: bytes
) -> None:
    answers = stream.answers(raw)

    codes = {answer.error.code for answer in answers if answer.HasField("error")}
    assert codes <= ALLOWED.keys()
    assert all(answer.error.message for answer in answers if answer.HasField("error"))


def refusal_of(call: Callable[[], object]) -> str | None:
    """Name of the code with which a call ends; None: it ends well."""
    try:
        call()
    except grpc.RpcError as error:
        return str(error.code().name)
    return None


REQUESTS: dict[str, st.SearchStrategy[Any]] = {
    "DraftService/Draft": st.builds(
        pb.DraftRequest,
        model_fingerprint=st.just(FINGERPRINT) | names,
        client_id=st.just(0) | handles,
        step=steps | valid_steps,
    ),
    "DraftService/OpenRequests": st.builds(
        pb.OpenRequestsRequest,
        model_fingerprint=st.just(FINGERPRINT) | names,
        client_id=st.just(0) | handles,
        requests=st.lists(opens, max_size=3),
    ),
    "DraftService/CloseRequests": st.builds(
        pb.CloseRequestsRequest,
        model_fingerprint=st.just(FINGERPRINT) | names,
        client_id=st.just(0) | handles,
        requests=st.lists(closes, max_size=3),
    ),
    "DraftService/RegisterGrammar": st.builds(
        pb.RegisterGrammarRequest,
        model_fingerprint=st.just(FINGERPRINT) | names,
        namespace=st.just("") | names,
        grammar_id=names,
        grammar_json=st.sampled_from(["{}", '{"blocks": [{"name": "plan", "start": "<p>", "end": "</p>"}]}'])
        | st.text(max_size=50),
    ),
    "HistoryService/AppendBlocks": st.builds(
        history_pb2.AppendBlocksRequest,
        model_fingerprint=st.just(FINGERPRINT) | names,
        blocks=st.lists(
            st.builds(
                history_pb2.Block,
                namespace=st.just("") | names,
                workflow_id=names,
                stage=names,
                block_path=st.sampled_from(["", "think", "tool_call/code", "a/b/c/d/e/f/g/h/i"]) | names,
                token_ids=packed(tokens),
            ),
            max_size=3,
        ),
    ),
    "HistoryService/GetStats": st.builds(history_pb2.GetStatsRequest, model_fingerprint=st.just("") | names),
    "HistoryService/ListKeys": st.builds(
        history_pb2.ListKeysRequest, model_fingerprint=st.just(FINGERPRINT) | names, namespace=st.just("") | names
    ),
    "HistoryService/DeleteNamespace": st.builds(
        history_pb2.DeleteNamespaceRequest, model_fingerprint=st.just("") | names, namespace=st.just("default") | names
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
@settings(parent=FUZZED, max_examples=FUZZED.max_examples // 5)
@given(data=st.data())
def test_every_call_ends_well_or_by_the_table(channel: grpc.Channel, name: str, data: st.DataObject) -> None:
    message = data.draw(REQUESTS[name] | st.binary(max_size=60))
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    call: Any = channel.unary_unary(f"/agentspec.draft.v1.{name}")

    assert refusal_of(lambda: call(raw, timeout=ANSWER_S)) in (None, *ALLOWED.values())


@FUZZED
@given(parts=st.lists(st.binary(max_size=60) | st.builds(
    pb.RegisterTokenizerRequest,
    model_fingerprint=st.just("b" * 64) | names,
    chat_template=st.text(max_size=40),
    token_lengths=packed(st.integers(0, 9)),
    token_bytes=st.binary(max_size=60),
).map(pb.RegisterTokenizerRequest.SerializeToString), max_size=4))  # fmt: skip
def test_every_vocabulary_is_taken_or_refused_by_the_table(channel: grpc.Channel, parts: list[bytes]) -> None:
    call: Any = channel.stream_unary("/agentspec.draft.v1.DraftService/RegisterTokenizer")

    assert refusal_of(lambda: call(iter(parts), timeout=ANSWER_S)) in (None, *ALLOWED.values())


@FUZZED
@given(cuts=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8), keep=st.integers(0, 5000))
def test_an_archive_that_was_changed_is_refused_by_the_table(
    channel: grpc.Channel, cuts: list[tuple[int, int]], keep: int
) -> None:
    export: Any = channel.unary_stream(
        "/agentspec.draft.v1.HistoryService/ExportHistory",
        response_deserializer=history_pb2.ExportHistoryResponse.FromString,
    )
    request = history_pb2.ExportHistoryRequest(model_fingerprint=FINGERPRINT, namespace="default")
    archive = b"".join(part.archive_part for part in export(request.SerializeToString()))
    changed = damaged(archive, cuts)[:keep]
    part = history_pb2.ImportHistoryRequest(model_fingerprint=FINGERPRINT, archive_part=changed)
    call: Any = channel.stream_unary("/agentspec.draft.v1.HistoryService/ImportHistory")

    refusal = refusal_of(lambda: call(iter([part.SerializeToString()]), timeout=ANSWER_S))

    assert (None if changed == archive else "INVALID_ARGUMENT") == refusal
