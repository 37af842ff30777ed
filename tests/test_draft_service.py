"""The draft contract over a real socket: what is drafted, what is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tests.sidecar_lab import (
    FINGERPRINT,
    TEXT,
    SidecarProcess,
    Stream,
    close_message,
    eventually,
    i32,
    i64,
    ints,
    open_message,
    running_sidecar,
    step_message,
    u32,
    vocabulary_parts,
)

from agentspec.draft.v1 import draft_pb2 as pb
from agentspec.draft.v1.draft_pb2_grpc import DraftServiceStub
from agentspec.sidecar.engine import Engine, Sampling, StepRequest
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import UNTAGGED

HELLO = [*b"the quick"]
MAX_HANDLE = 2**40 - 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    socket = tmp_path_factory.mktemp("sidecar") / "draft.sock"
    with running_sidecar(socket, "--step-deadline-ms", "0", "--max-models", "2") as server:
        yield server


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """A server with room for 600 requests, all of which are closed between two tests."""
    with running_sidecar(tmp_path_factory.mktemp("small") / "draft.sock", "--max-open-requests", "600") as server:
        yield server


@pytest.fixture
def small_stub(small_server: SidecarProcess) -> DraftServiceStub:
    return small_server.registered()


@pytest.fixture
def stub(server: SidecarProcess) -> DraftServiceStub:
    return server.registered()


@pytest.fixture
def stream(stub: DraftServiceStub) -> Iterator[Stream]:
    stream = Stream(stub)
    yield stream
    stream.call.cancel()


def status_of(call: Callable[[], Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code(), raised.value.details() or ""


# --- drafts ---


def test_a_stream_drafts_what_the_engine_alone_would(stream: Stream) -> None:
    engine = Engine([bytes([token]) for token in range(256)], CHAT)
    engine.open(0, np.array(TEXT, np.int32), UNTAGGED, Sampling(), namespace="default")
    arrays = {"handles": np.array([0]), "positions": np.zeros(1, np.int32)}
    zeros = np.zeros(1, np.int32)
    expected = engine.step(
        StepRequest(
            1, arrays["handles"], arrays["positions"], np.array([0, 9], np.int32), np.array(HELLO, np.int32),
            zeros, zeros, np.full(1, 8, np.int32), 1, 0, 64,
        )
    )  # fmt: skip

    drafts = stream.ask(opens=[open_message(0)], step=step_message(1, {0: (0, HELLO)})).drafts

    assert expected.draft_token_ids.tolist() == ints(drafts.draft_token_ids) != []
    assert expected.draft_lengths.tolist() == ints(drafts.draft_lengths)
    assert expected.survival.tobytes() == drafts.survival
    assert (1, 64) == (drafts.step_id, drafts.token_budget)


def test_one_step_outside_of_a_stream_drafts_the_same(stub: DraftServiceStub, stream: Stream) -> None:
    step = step_message(1, {0: (0, HELLO)})
    expected = stream.ask(opens=[open_message(0)], step=step).drafts
    stub.OpenRequests(pb.OpenRequestsRequest(model_fingerprint=FINGERPRINT, requests=[open_message(0)]))

    answer = stub.Draft(pb.DraftRequest(model_fingerprint=FINGERPRINT, step=step))

    assert expected.draft_token_ids == answer.drafts.draft_token_ids
    assert stream.hello.boot_id == answer.boot_id != 0


def test_clients_draft_from_what_others_finished(stub: DraftServiceStub, stream: Stream) -> None:
    output = [*b"42 is the answer to everything and all"]
    stream.ask(opens=[open_message(7, b"Q")], step=step_message(1, {7: (0, output)}))
    stream.ask(
        closes=[close_message(7, len(output))], opens=[open_message(8, b"Q")], step=step_message(2, {8: (0, [])})
    )
    other = Stream(stub)

    drafts = other.ask(opens=[open_message(7, b"Q")], step=step_message(1, {7: (0, output[:12])})).drafts

    drafted = ints(drafts.draft_token_ids)
    assert len(drafted) > 3
    assert output[12:20][: len(drafted)] == drafted


def test_equal_handles_of_two_clients_are_two_requests(stub: DraftServiceStub, stream: Stream) -> None:
    other = Stream(stub)
    assert stream.hello.client_id != other.hello.client_id
    stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)}))

    drafts = other.ask(step=step_message(1, {1: (9, [32])})).drafts

    assert [1] == ints(drafts.resync_handles, np.int64)


def test_a_row_that_the_server_does_not_know_comes_back_to_be_opened(stream: Stream) -> None:
    stream.send(opens=[open_message(1), open_message(MAX_HANDLE)])

    drafts = stream.ask(step=step_message(1, {MAX_HANDLE: (5, [1]), 1: (0, HELLO), 3: (0, [1])})).drafts

    assert [MAX_HANDLE, 3] == ints(drafts.resync_handles, np.int64)
    assert [0, 8, 0] == ints(drafts.draft_lengths)


def test_a_message_without_a_step_gets_no_answer(stream: Stream) -> None:
    stream.send(opens=[open_message(1)])

    assert 9 == stream.ask(step=step_message(9, {1: (0, HELLO)})).drafts.step_id


def test_a_timing_and_context_are_taken(stream: Stream) -> None:
    timing = pb.StepTiming(duration_ms=12.5, num_decode_rows=1)
    step = step_message(1, {1: (0, HELLO)}, timing=timing, num_context_tokens=50)

    assert stream.ask(opens=[open_message(1)], step=step).HasField("drafts")


def test_a_client_id_lets_calls_open_requests_of_a_stream(stub: DraftServiceStub, stream: Stream) -> None:
    stub.OpenRequests(
        pb.OpenRequestsRequest(
            model_fingerprint=FINGERPRINT, client_id=stream.hello.client_id, requests=[open_message(5)]
        )
    )

    assert b"" == stream.ask(step=step_message(1, {5: (0, HELLO)})).drafts.resync_handles


def test_a_long_prompt_is_opened_before_its_step(stream: Stream) -> None:
    prompt = TEXT * 500

    drafts = stream.ask(opens=[open_message(1, prompt)], step=step_message(1, {1: (0, HELLO)})).drafts

    assert (b"", [8]) == (drafts.resync_handles, ints(drafts.draft_lengths))


def test_closing_says_which_handles_were_unknown(stub: DraftServiceStub) -> None:
    stub.OpenRequests(pb.OpenRequestsRequest(model_fingerprint=FINGERPRINT, requests=[open_message(50)]))

    answer = stub.CloseRequests(
        pb.CloseRequestsRequest(model_fingerprint=FINGERPRINT, requests=[close_message(50, 0), close_message(51, 0)])
    )

    assert [51] == list(answer.unknown_handles)


# --- registration ---


def test_server_info_names_models_and_limits(small_stub: DraftServiceStub) -> None:
    info = small_stub.GetServerInfo(pb.GetServerInfoRequest())

    assert pb.Model(model_fingerprint=FINGERPRINT, vocabulary_size=256, num_speculative_tokens=16) in info.models
    assert (8 << 20, 600) == (info.max_message_bytes, info.max_open_requests)


def test_registering_a_vocabulary_again_keeps_its_histories(stub: DraftServiceStub, stream: Stream) -> None:
    stream.send(opens=[open_message(1)])
    again = stub.RegisterTokenizer(vocabulary_parts(part_size=256))

    assert 256 == again.model.vocabulary_size
    assert b"" == stream.ask(step=step_message(1, {1: (0, HELLO)})).drafts.resync_handles


def test_a_name_of_another_vocabulary_is_refused(stub: DraftServiceStub) -> None:
    code, message = status_of(lambda: stub.RegisterTokenizer(vocabulary_parts([b"x", b"y"])))

    assert (grpc.StatusCode.INVALID_ARGUMENT, True) == (code, message.startswith("model_fingerprint: "))


@pytest.mark.parametrize(
    ("part", "code", "field"),
    [
        ({"model_fingerprint": "A" * 64}, grpc.StatusCode.INVALID_ARGUMENT, "model_fingerprint"),
        ({"model_fingerprint": "a" * 63}, grpc.StatusCode.INVALID_ARGUMENT, "model_fingerprint"),
        ({}, grpc.StatusCode.INVALID_ARGUMENT, "model_fingerprint"),
        ({"model_fingerprint": "c" * 64}, grpc.StatusCode.INVALID_ARGUMENT, "token_lengths"),
        ({"model_fingerprint": "c" * 64, "token_lengths": b"12345"}, grpc.StatusCode.INVALID_ARGUMENT, "token_lengths"),
        ({"model_fingerprint": "c" * 64, "token_lengths": u32(3)}, grpc.StatusCode.INVALID_ARGUMENT, "token_bytes"),
        (
            {"model_fingerprint": "c" * 64, "token_bytes": bytes((1 << 20) + 1), "token_lengths": u32((1 << 20) + 1)},
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "token_bytes",
        ),
        (
            {"model_fingerprint": "c" * 64, "chat_template": "x" * ((256 << 10) + 1)},
            grpc.StatusCode.INVALID_ARGUMENT,
            "chat_template",
        ),
    ],
)  # fmt: skip
def test_a_malformed_vocabulary_is_refused_by_field(
    stub: DraftServiceStub, part: dict[str, Any], code: grpc.StatusCode, field: str
) -> None:
    found, message = status_of(lambda: stub.RegisterTokenizer(iter([pb.RegisterTokenizerRequest(**part)])))

    assert (code, field) == (found, message.partition(":")[0])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"grammar_id": "", "grammar_json": "{}"}, "grammar_id"),
        ({"grammar_id": "x", "grammar_json": "{"}, "grammar_json"),
        ({"grammar_id": "x", "grammar_json": '{"blocks": 3}'}, "grammar_json"),
        ({"grammar_id": "x", "grammar_json": " " * 4097}, "grammar_json"),
    ],
)
def test_a_malformed_grammar_is_refused_by_field(stub: DraftServiceStub, fields: dict[str, str], field: str) -> None:
    request = pb.RegisterGrammarRequest(model_fingerprint=FINGERPRINT, **fields)
    code, message = status_of(lambda: stub.RegisterGrammar(request))

    assert (grpc.StatusCode.INVALID_ARGUMENT, field) == (code, message.partition(":")[0])


# --- refusals ---


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda stub: stub.OpenRequests(pb.OpenRequestsRequest(model_fingerprint="f" * 64)), "FAILED_PRECONDITION"),
        (lambda stub: Stream(stub, "f" * 64), "FAILED_PRECONDITION"),
        (lambda stub: stub.Draft(pb.DraftRequest(model_fingerprint="f" * 64)), "NOT_FOUND"),
        (lambda stub: stub.CloseRequests(pb.CloseRequestsRequest(model_fingerprint="f" * 64)), "NOT_FOUND"),
        (lambda stub: stub.RegisterGrammar(pb.RegisterGrammarRequest(model_fingerprint="f" * 64)), "NOT_FOUND"),
        (lambda stub: stub.Draft(pb.DraftRequest(model_fingerprint="x")), "INVALID_ARGUMENT"),
        (lambda stub: stub.Draft(pb.DraftRequest(model_fingerprint=FINGERPRINT, client_id=10**9)), "NOT_FOUND"),
    ],
)  # fmt: skip
def test_an_unknown_model_or_client_has_the_code_of_the_table(
    stub: DraftServiceStub, call: Callable[[DraftServiceStub], Any], code: str
) -> None:
    found, message = status_of(lambda: call(stub))

    assert code == found.name
    assert message.startswith(("model_fingerprint: ", "client_id: "))


ARRAYS = [
    *("handles", "positions", "token_offsets", "token_ids"),
    *("num_draft_tokens", "num_accepted_tokens", "max_draft_tokens"),
]


@pytest.mark.parametrize("change", ["empty", "one byte short", "one entry long"])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_a_wrong_length_is_refused_and_the_stream_lives_on(stream: Stream, name: str, change: str) -> None:
    step = step_message(1, {1: (0, HELLO)})
    right: bytes = getattr(step, name)
    wrong = {"empty": b"", "one byte short": right[:-1], "one entry long": right + bytes(8 if name == "handles" else 4)}
    setattr(step, name, wrong[change])

    error = stream.ask(opens=[open_message(1)], step=step).error

    # A wrong number of handles shows at the first array that no longer fits them.
    fields = {f"step.{name}"} if name != "handles" else {"step.handles", "step.token_offsets"}
    assert (1, grpc.StatusCode.INVALID_ARGUMENT.value[0]) == (error.step_id, error.code)
    assert error.field.partition("[")[0] in fields
    assert error.message.startswith(f"{error.field}: ")
    assert stream.ask(step=step_message(2, {1: (0, HELLO)})).HasField("drafts")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"handles": i64(-1)}, "step.handles"),
        ({"handles": i64(2**40)}, "step.handles"),
        ({"positions": i32(-1)}, "step.positions[0]"),
        ({"token_ids": i32(*HELLO[:-1], 256)}, "step.token_ids[8]"),
        ({"token_ids": i32(*HELLO[:-1], -1)}, "step.token_ids[8]"),
        ({"token_offsets": i32(1, 9)}, "step.token_offsets"),
        ({"token_offsets": i32(0, -9), "token_ids": b""}, "step.token_offsets[1]"),
        ({"num_draft_tokens": i32(-1), "num_accepted_tokens": i32(-1)}, "step.num_draft_tokens[0]"),
        ({"num_draft_tokens": i32(1), "num_accepted_tokens": i32(2)}, "step.num_accepted_tokens[0]"),
        ({"max_draft_tokens": i32(-1)}, "step.max_draft_tokens[0]"),
        ({"timing": pb.StepTiming(duration_ms=0)}, "step.timing.duration_ms"),
        ({"timing": pb.StepTiming(duration_ms=float("nan"))}, "step.timing.duration_ms"),
        ({"traceparent": "x" * 129}, "step.traceparent"),
    ],
)
def test_a_value_out_of_its_bound_is_refused_by_field(stream: Stream, fields: dict[str, Any], field: str) -> None:
    error = stream.ask(opens=[open_message(1)], step=step_message(3, {1: (0, HELLO)}, **fields)).error

    assert (3, grpc.StatusCode.INVALID_ARGUMENT.value[0], field) == (error.step_id, error.code, error.field)


def test_a_handle_that_occurs_twice_is_named_as_the_client_knows_it(stream: Stream) -> None:
    step = step_message(1, {1: (0, HELLO), 2: (0, HELLO)}, handles=i64(1, 1))

    error = stream.ask(opens=[open_message(1)], step=step).error

    assert ("step.handles[1]", "step.handles[1]: 1 occurs twice") == (error.field, error.message)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"handle": -1}, "INVALID_ARGUMENT", "handle"),
        ({"handle": 2**40}, "INVALID_ARGUMENT", "handle"),
        ({"namespace": "other"}, "PERMISSION_DENIED", "namespace"),
        ({"namespace": "default-2"}, "PERMISSION_DENIED", "namespace"),
        ({"namespace": "d" * 257}, "INVALID_ARGUMENT", "namespace"),
        ({"prompt_token_ids": b"12345"}, "INVALID_ARGUMENT", "prompt_token_ids"),
        ({"prompt_token_ids": i32(0, 256)}, "INVALID_ARGUMENT", "prompt_token_ids[1]"),
        ({"tags_json": "{"}, "INVALID_ARGUMENT", "tags_json"),
        ({"tags_json": '{"colour": "red"}'}, "INVALID_ARGUMENT", "tags_json"),
        ({"tags_json": " " * 4097}, "INVALID_ARGUMENT", "tags_json"),
        ({"sampling": pb.Sampling(temperature=-1)}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"sampling": pb.Sampling(temperature=float("nan"))}, "INVALID_ARGUMENT", "sampling.temperature"),
        ({"sampling": pb.Sampling(forced_tool="t" * 257)}, "INVALID_ARGUMENT", "sampling.forced_tool"),
    ],
)
def test_an_open_that_is_refused_names_its_field_and_the_rest_of_the_message_applies(
    stub: DraftServiceStub, stream: Stream, fields: dict[str, Any], code: str, field: str
) -> None:
    bad = open_message(**{"handle": 2, **fields})
    stream.send(opens=[open_message(1), bad, open_message(3)], step=step_message(4, {1: (0, HELLO), 3: (0, HELLO)}))

    error, drafts = stream.receive().error, stream.receive().drafts

    assert (4, f"opens[1].{field}") == (error.step_id, error.field)
    assert code == next(status.name for status in grpc.StatusCode if status.value[0] == error.code)
    assert b"" == drafts.resync_handles

    outside = pb.OpenRequestsRequest(model_fingerprint=FINGERPRINT, requests=[bad])
    found, message = status_of(lambda: stub.OpenRequests(outside))
    assert (code, f"requests[0].{field}") == (found.name, message.partition(":")[0])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"handle": -1}, "handle"),
        ({"reason": pb.FINISH_REASON_UNSPECIFIED}, "reason"),
        ({"reason": 17}, "reason"),
        ({"tail_token_ids": b"123"}, "tail_token_ids"),
        ({"tail_token_ids": i32(256)}, "tail_token_ids[0]"),
    ],
)
def test_a_close_that_is_refused_names_its_field_and_leaves_the_request_open(
    stream: Stream, fields: dict[str, Any], field: str
) -> None:
    stream.send(opens=[open_message(1)])
    bad = pb.CloseRequest(**{"handle": 1, "reason": pb.FINISH_REASON_STOP, "num_output_tokens": 1, **fields})

    error = stream.ask(closes=[bad]).error

    assert (0, f"closes[0].{field}") == (error.step_id, error.field)
    assert b"" == stream.ask(step=step_message(2, {1: (0, HELLO)})).drafts.resync_handles


def test_a_grammar_that_is_not_known_leaves_the_request_with_the_models_own(stream: Stream) -> None:
    answer = stream.ask(
        opens=[open_message(1, tags_json='{"grammar": "nobody"}')], step=step_message(1, {1: (0, HELLO)})
    )

    assert b"" == answer.drafts.resync_handles


def test_too_many_closes_or_opens_in_one_message_are_refused(stream: Stream) -> None:
    for name, items in (
        ("opens", [open_message(0, [])] * 1025),
        ("closes", [close_message(0, 0)] * 1025),
    ):
        error = stream.ask(**{name: items}).error
        assert (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], name) == (error.code, error.field)


def test_too_many_rows_are_refused(stream: Stream) -> None:
    error = stream.ask(step=step_message(1, dict.fromkeys(range(4097), (0, ())))).error

    assert (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "step.handles") == (error.code, error.field)


def test_open_requests_are_limited_and_room_comes_back_with_a_close(small_stub: DraftServiceStub) -> None:
    stream = Stream(small_stub)
    stream.send(opens=[open_message(handle, []) for handle in range(600)])
    error = stream.ask(opens=[open_message(600, [])]).error
    assert (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "opens[0].handle") == (error.code, error.field)

    answer = stream.ask(
        closes=[close_message(0, 0)], opens=[open_message(600, [])], step=step_message(1, {600: (0, HELLO)})
    )

    assert b"" == answer.drafts.resync_handles
    stream.end()


def test_bytes_that_are_no_message_are_answered_and_the_stream_lives_on(
    server: SidecarProcess, stub: DraftServiceStub
) -> None:
    raw: Any = server.channel().stream_stream("/agentspec.draft.v1.DraftService/DraftStream")
    first = pb.DraftStreamRequest(model_fingerprint=FINGERPRINT, opens=[open_message(1)]).SerializeToString()
    last = pb.DraftStreamRequest(step=step_message(5, {1: (0, HELLO)})).SerializeToString()

    answers = [pb.DraftStreamResponse.FromString(answer) for answer in raw(iter([first, b"\xff\xff\xff", last]))]

    assert grpc.StatusCode.INVALID_ARGUMENT.value[0] == answers[1].error.code
    assert 5 == answers[2].drafts.step_id


def test_bytes_that_are_no_message_are_an_invalid_argument_of_a_call(server: SidecarProcess) -> None:
    for name in ("Draft", "OpenRequests", "CloseRequests", "RegisterGrammar"):
        raw: Any = server.channel().unary_unary(f"/agentspec.draft.v1.DraftService/{name}")
        assert grpc.StatusCode.INVALID_ARGUMENT == status_of(lambda: raw(b"\xff\xff\xff"))[0]  # noqa: B023 - called at once


def test_a_message_over_the_limit_ends_its_stream_alone(stub: DraftServiceStub, stream: Stream) -> None:
    big = Stream(stub)
    big.send(opens=[open_message(1, prompt_token_ids=bytes(9 << 20))])

    code, _ = status_of(big.receive)

    assert grpc.StatusCode.RESOURCE_EXHAUSTED == code
    assert stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, HELLO)})).HasField("drafts")


def test_requests_of_a_stream_that_ended_are_closed(small_stub: DraftServiceStub) -> None:
    first = Stream(small_stub)
    first.ask(opens=[open_message(handle, []) for handle in range(600)], step=step_message(1, {}))
    first.end()
    second = Stream(small_stub)

    answer = second.ask(opens=[open_message(handle, []) for handle in range(600)], step=step_message(1, {}))

    assert answer.HasField("drafts")
    second.end()


def test_a_client_that_cancels_leaves_no_request_open(small_stub: DraftServiceStub) -> None:
    first = Stream(small_stub)
    first.ask(opens=[open_message(handle, []) for handle in range(600)], step=step_message(1, {}))
    first.call.cancel()
    second = Stream(small_stub)

    def is_opened() -> bool:
        answer = second.ask(opens=[open_message(0, [])], step=step_message(1, {}))
        return answer.HasField("drafts") or not second.receive().HasField("drafts")

    eventually(is_opened)
    second.end()
