"""Histories over a real socket: stored, listed, counted, saved, loaded, deleted."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tests.engine_player import bold_engine
from tests.reference import token_ids
from tests.sidecar_lab import (
    FINGERPRINT,
    VOCABULARY,
    SidecarProcess,
    Stream,
    close_message,
    i32,
    ints,
    open_message,
    running_sidecar,
    step_message,
    vocabulary_parts,
)

from agentspec.draft.v1 import draft_pb2, history_pb2
from agentspec.draft.v1.draft_pb2_grpc import DraftServiceStub
from agentspec.sidecar.engine import FinishReason, Sampling
from agentspec.sidecar.tags import Tags

ANSWER = b"the plan is to search for papers"
FAR = history_pb2.Deletion(namespace="default", epoch=1 << 60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    socket = tmp_path_factory.mktemp("sidecar") / "draft.sock"
    with running_sidecar(socket, "--step-deadline-ms", "0", "--history-bytes", "8MiB") as server:
        yield server


@pytest.fixture
def stub(server: SidecarProcess) -> DraftServiceStub:
    return server.registered()


@pytest.fixture
def histories(server: SidecarProcess, stub: DraftServiceStub) -> Any:
    """The service, with a namespace that earlier tests have left empty."""
    histories: Any = server.histories()
    histories.DeleteNamespace(history_pb2.DeleteNamespaceRequest(namespace="default"))
    return histories


def block(text: bytes = ANSWER, **fields: Any) -> history_pb2.Block:
    return history_pb2.Block(**{"stage": "writer", "workflow_id": "w", "token_ids": i32(*text), **fields})


def append(histories: Any, *blocks: history_pb2.Block) -> int:
    request = history_pb2.AppendBlocksRequest(model_fingerprint=FINGERPRINT, blocks=blocks)
    return int(histories.AppendBlocks(request).num_tokens)


def export(histories: Any, namespace: str = "default") -> bytes:
    request = history_pb2.ExportHistoryRequest(model_fingerprint=FINGERPRINT, namespace=namespace)
    return b"".join(part.archive_part for part in histories.ExportHistory(request))


def import_parts(
    archive: bytes, size: int = 1000, namespace: str = "default"
) -> Iterator[history_pb2.ImportHistoryRequest]:
    head = {"model_fingerprint": FINGERPRINT, "namespace": namespace}
    for begin in range(0, len(archive), size):
        yield history_pb2.ImportHistoryRequest(archive_part=archive[begin : begin + size], **head)
        head = {}


def list_keys(histories: Any, namespace: str = "", model: str = FINGERPRINT) -> list[tuple[str, str, int]]:
    answer = histories.ListKeys(history_pb2.ListKeysRequest(model_fingerprint=model, namespace=namespace))
    return [(key.namespace, key.stage, key.num_tokens) for key in answer.keys]


def stats(histories: Any, model: str = FINGERPRINT) -> history_pb2.GetStatsResponse:
    answer: history_pb2.GetStatsResponse = histories.GetStats(history_pb2.GetStatsRequest(model_fingerprint=model))
    return answer


def delete(histories: Any, namespace: str = "", model: str = "") -> int:
    request = history_pb2.DeleteNamespaceRequest(namespace=namespace, model_fingerprint=model)
    return int(histories.DeleteNamespace(request).num_tokens)


def draft_after(stub: DraftServiceStub, begin: bytes, **fields: Any) -> bytes:
    stream = Stream(stub)
    opened = open_message(1, b"Q", tags_json='{"stage": "writer"}', **fields)
    drafts = stream.ask(opens=[opened], step=step_message(1, {1: (0, [*begin])})).drafts
    stream.end()
    return bytes(ints(drafts.draft_token_ids))


def follow(histories: Any, model: str = FINGERPRINT, **fields: Any) -> Any:
    request = history_pb2.FollowBlocksRequest(model_fingerprint=model, **fields)
    return histories.FollowBlocks(request, timeout=20)


def append_shared(histories: Any, *blocks: history_pb2.SharedBlocks) -> history_pb2.AppendBlocksResponse:
    request = history_pb2.AppendBlocksRequest(model_fingerprint=FINGERPRINT, shared_blocks=blocks)
    answer: history_pb2.AppendBlocksResponse = histories.AppendBlocks(request)
    return answer


def shared(sequence: int = 1, **fields: Any) -> history_pb2.SharedBlocks:
    """What another engine would share of a finished text."""
    engine = bold_engine(VOCABULARY)
    engine.share_blocks(1 << 20)
    engine.open(1, token_ids(*b"Q"), Tags(stage="writer"), Sampling(), namespace="default")
    engine.close(1, FinishReason.STOP, len(ANSWER), token_ids(*ANSWER))
    (batch,) = engine.take_blocks().batches
    values = {"namespace": "default", "origin": 7, "sequence": sequence, "num_tokens": batch.num_tokens}
    return history_pb2.SharedBlocks(**{**values, "blocks": batch.blocks, **fields})


def broken(histories: Any) -> history_pb2.SharedBlocks:
    return shared(blocks=b"x", epoch=epoch_of(histories), origin=8)


def epoch_of(histories: Any) -> int:
    """Of the namespace that `histories` has deleted."""
    return max(int(one.epoch) for one in next(follow(histories, namespaces=["default"])).deletions)


def status_of(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    return raised.value.code().name, (raised.value.details() or "").partition(":")[0]


def test_appended_blocks_are_drafted_from(stub: DraftServiceStub, histories: Any) -> None:
    assert len(ANSWER) == append(histories, block())

    drafted = draft_after(stub, ANSWER[:12])
    assert len(drafted) > 2
    assert ANSWER[12:].startswith(drafted)


def test_keys_are_listed_by_namespace_and_stage(histories: Any) -> None:
    append(histories, block(), block(stage="critic"), block(namespace="default/salt-1"))

    size = len(ANSWER)
    assert [("default", "critic", size), ("default", "writer", size), ("default/salt-1", "writer", size)] == list_keys(
        histories
    )
    assert [("default/salt-1", "writer", size)] == list_keys(histories, "default/salt-1")


def test_stats_count_what_was_verified_by_block_of_the_chosen_markers(stub: DraftServiceStub, histories: Any) -> None:
    grammar = '{"blocks": [{"name": "plan", "start": "<p>", "end": "</p>"}]}'
    stub.RegisterGrammar(
        draft_pb2.RegisterGrammarRequest(model_fingerprint=FINGERPRINT, grammar_id="mine", grammar_json=grammar)
    )
    stream = Stream(stub)
    opened = open_message(1, tags_json='{"grammar": "mine", "stage": "writer", "workflow_id": "w"}')
    stream.ask(opens=[opened], step=step_message(1, {1: (0, [*b"<p>a"])}))
    verdict = {"num_draft_tokens": i32(3), "num_accepted_tokens": i32(2)}
    stream.ask(step=step_message(2, {1: (4, [*b"bcd"])}, **verdict))

    answer = histories.GetStats(history_pb2.GetStatsRequest(model_fingerprint=FINGERPRINT))

    (model,) = answer.models
    (row,) = [row for row in model.blocks if row.block_path == "plan"]
    assert (FINGERPRINT, 1) == (model.model_fingerprint, model.num_open_requests)
    assert ("default", "w", "writer", 1, 1, 3, 2, 3) == (
        *(row.namespace, row.workflow_id, row.stage),
        *(row.num_steps, row.num_drafts, row.num_draft_tokens, row.num_accepted_tokens, row.num_tokens),
    )
    stream.end()


def test_a_chat_template_chooses_the_block_markers(
    server: SidecarProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with running_sidecar(tmp_path_factory.mktemp("react") / "s") as other:
        stub = other.stub()
        stub.RegisterTokenizer(vocabulary_parts(template="Thought: Action: Observation:"))
        stream = Stream(stub)
        output = [*b"Thought: look\nAction: search\n"]
        stream.ask(opens=[open_message(1, b"Q")], step=step_message(1, {1: (0, output)}))
        stream.ask(step=step_message(2, {1: (len(output), [97])}))

        answer = other.histories().GetStats(history_pb2.GetStatsRequest())

        assert "text" not in {row.block_path for row in answer.models[0].blocks if row.num_tokens == 1}


def test_an_exported_namespace_comes_back_after_it_was_deleted(stub: DraftServiceStub, histories: Any) -> None:
    append(histories, *[block(ANSWER + b"%d" % number) for number in range(100)])
    archive = export(histories)
    before = list_keys(histories)
    deleted = histories.DeleteNamespace(history_pb2.DeleteNamespaceRequest(namespace="default"))
    assert (before[0][2], []) == (deleted.num_tokens, list_keys(histories))

    imported = histories.ImportHistory(import_parts(archive))

    assert before == list_keys(histories)
    assert before[0][2] <= imported.num_tokens
    assert ANSWER[12:].startswith(draft_after(stub, ANSWER[:12]))


def test_a_deleted_namespace_is_not_drafted_from(stub: DraftServiceStub, histories: Any) -> None:
    append(histories, block())
    begin = ANSWER[:8]  # no token of it twice: nothing to draft from the request's own text
    assert ANSWER[8:].startswith(draft_after(stub, begin)[:2])
    delete(histories, "default", FINGERPRINT)

    assert b"" == draft_after(stub, begin)


def test_a_finished_request_is_exported_and_an_aborted_stream_keeps_what_it_wrote(
    stub: DraftServiceStub, histories: Any
) -> None:
    stream = Stream(stub)
    tags = '{"stage": "writer"}'
    stream.send(opens=[open_message(1, b"Q", tags_json=tags), open_message(2, b"Q", tags_json=tags)])
    stream.ask(step=step_message(1, {1: (0, [*ANSWER]), 2: (0, [*ANSWER])}))
    stream.send(closes=[close_message(1, len(ANSWER))])
    stream.end()

    assert [("default", "writer", 2 * len(ANSWER))] == list_keys(histories)


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"namespace": "other"}, "PERMISSION_DENIED", "blocks[1].namespace"),
        ({"stage": "s" * 257}, "INVALID_ARGUMENT", "blocks[1].stage"),
        ({"block_path": "s" * 257}, "INVALID_ARGUMENT", "blocks[1].block_path"),
        ({"token_ids": b""}, "INVALID_ARGUMENT", "blocks[1].token_ids"),
        ({"token_ids": b"123"}, "INVALID_ARGUMENT", "blocks[1].token_ids"),
        ({"token_ids": i32(256)}, "INVALID_ARGUMENT", "blocks[1].token_ids[0]"),
        ({"token_ids": bytes(4 * 65537)}, "INVALID_ARGUMENT", "blocks[1].token_ids"),
    ],
)
def test_a_block_that_is_refused_names_its_field(histories: Any, fields: dict[str, Any], code: str, field: str) -> None:
    assert (code, field) == status_of(lambda: append(histories, block(), block(**fields)))


def foreign_archive() -> bytes:
    from tests.engine_player import bold_engine  # noqa: PLC0415
    from tests.reference import token_ids  # noqa: PLC0415

    from agentspec.sidecar.grammars import CHAT  # noqa: PLC0415
    from agentspec.sidecar.tags import UNTAGGED  # noqa: PLC0415

    engine = bold_engine([bytes([byte]) for byte in range(256)], CHAT)
    engine.append(token_ids(*ANSWER), UNTAGGED, namespace="other")
    return engine.export_histories("other")


@pytest.mark.parametrize(
    ("parts", "code", "field"),
    [
        (lambda: import_parts(b"no archive"), "INVALID_ARGUMENT", "archive_part"),
        (lambda: import_parts(foreign_archive()), "INVALID_ARGUMENT", "archive_part"),
        (lambda: import_parts(b"x", namespace="other"), "PERMISSION_DENIED", "namespace"),
        (lambda: import_parts(bytes((1 << 20) + 1), (1 << 20) + 1), "RESOURCE_EXHAUSTED", "archive_part"),
        (lambda: import_parts(bytes(9 << 20), 1 << 20), "RESOURCE_EXHAUSTED", "archive_part"),
        (lambda: iter(()), "INVALID_ARGUMENT", "model_fingerprint"),
    ],
)
def test_an_import_that_is_refused_names_its_field(
    histories: Any, parts: Callable[[], Iterator[history_pb2.ImportHistoryRequest]], code: str, field: str
) -> None:
    assert (code, field) == status_of(lambda: histories.ImportHistory(parts()))
    assert [] == list_keys(histories)


@pytest.mark.parametrize(
    ("call", "code", "field"),
    [
        (delete, "INVALID_ARGUMENT", "namespace"),
        (lambda h: delete(h, "x"), "PERMISSION_DENIED", "namespace"),
        (lambda h: list_keys(h, model="f" * 64), "NOT_FOUND", "model_fingerprint"),
        (lambda h: stats(h, "x"), "INVALID_ARGUMENT", "model_fingerprint"),
        (lambda h: export(h, "other"), "PERMISSION_DENIED", "namespace"),
        (lambda h: next(follow(h)), "INVALID_ARGUMENT", "namespaces"),
        (lambda h: next(follow(h, namespaces=["default"] * 4097)), "RESOURCE_EXHAUSTED", "namespaces"),
        (lambda h: next(follow(h, namespaces=["default", "x"])), "PERMISSION_DENIED", "namespaces[1]"),
        (lambda h: next(follow(h, new_namespaces=["x"])), "PERMISSION_DENIED", "new_namespaces[0]"),
        (lambda h: next(follow(h, model="f" * 64, namespaces=["default"])), "NOT_FOUND", "model_fingerprint"),
        (lambda h: next(follow(h, namespaces=["default"], deletions=[FAR])), "INVALID_ARGUMENT", "deletions[0].epoch"),
        (lambda h: append_shared(h, shared(namespace="x")), "PERMISSION_DENIED", "shared_blocks[0].namespace"),
        (lambda h: append_shared(h, shared(), broken(h)), "INVALID_ARGUMENT", "shared_blocks[1].blocks"),
        (lambda h: append_shared(h, shared(epoch=FAR.epoch)), "INVALID_ARGUMENT", "shared_blocks[0].epoch"),
    ],
)  # fmt: skip
def test_a_call_that_is_refused_names_its_field(
    histories: Any, call: Callable[[Any], Any], code: str, field: str
) -> None:
    assert (code, field) == status_of(lambda: call(histories))


def test_shared_blocks_are_drafted_from_and_passed_on_once(stub: DraftServiceStub, histories: Any) -> None:
    calls = [follow(histories, namespaces=["default"], origin=origin) for origin in (1, 9)]
    epoch = epoch_of(histories)
    first, own = (next(call) for call in calls)

    assert (len(ANSWER) + 1, 0) == _counts(append_shared(histories, shared(3, origin=9, epoch=epoch)))
    assert (0, 2) == _counts(
        append_shared(histories, shared(3, origin=9, epoch=epoch), shared(2, origin=9, epoch=epoch))
    )
    assert 0 == append_shared(histories, shared(4, origin=9, epoch=epoch)).num_skipped

    message = next(calls[0])
    assert [3] == [one.sequence for one in message.shared_blocks]
    assert first.boot_id == message.boot_id == own.boot_id
    assert message.position == first.position + 1
    assert draft_after(stub, ANSWER[:12]) == ANSWER[12:20]
    for call in calls:
        call.cancel()
    again = next(follow(histories, namespaces=["default"], boot_id=first.boot_id, position=first.position))
    assert [3, 4] == [one.sequence for one in again.shared_blocks]
    assert [] == [*next(follow(histories, new_namespaces=["default"], boot_id=7)).shared_blocks]


def _counts(answer: history_pb2.AppendBlocksResponse) -> tuple[int, int]:
    return answer.num_tokens, answer.num_skipped


def test_a_deletion_is_told_before_what_is_written_after_it(histories: Any) -> None:
    call = follow(histories, namespaces=["default"], origin=1)
    known = {one.namespace: one.epoch for one in next(call).deletions}
    stale = shared(11, origin=8)
    delete(histories, "default")

    (deletion,) = next(call).deletions
    assert "default" == deletion.namespace
    assert known.get("default", 0) < deletion.epoch
    assert (0, 1) == _counts(append_shared(histories, stale))
    assert 0 == append_shared(histories, shared(12, origin=8, epoch=deletion.epoch)).num_skipped
    call.cancel()


def test_a_deletion_that_an_engine_tells_is_done(histories: Any) -> None:
    append(histories, block())
    epoch = next(follow(histories, namespaces=["default"])).deletions[0].epoch + 5
    deletion = history_pb2.Deletion(namespace="default", epoch=epoch)

    told = next(follow(histories, namespaces=["default"], deletions=[deletion]))

    assert [epoch] == [one.epoch for one in told.deletions]
    assert [] == list_keys(histories)


def test_an_export_without_inner_namespaces_has_the_outer_one_alone(histories: Any) -> None:
    append(histories, block(), block(namespace="default/inner"))
    request = history_pb2.ExportHistoryRequest(model_fingerprint=FINGERPRINT, namespace="default", without_inner=True)
    archive = b"".join(part.archive_part for part in histories.ExportHistory(request))
    delete(histories, "default")
    histories.ImportHistory(import_parts(archive))

    assert ["default"] == [namespace for namespace, _, _ in list_keys(histories)]


def test_an_import_that_may_not_be_is_refused_at_its_first_part(histories: Any) -> None:
    is_refused = threading.Event()

    def parts() -> Iterator[history_pb2.ImportHistoryRequest]:
        yield history_pb2.ImportHistoryRequest(model_fingerprint=FINGERPRINT, namespace="other", archive_part=b"x")
        is_refused.wait(30)

    call = histories.ImportHistory.future(parts())

    assert "PERMISSION_DENIED" == call.exception(timeout=20).code().name
    is_refused.set()


def test_an_answer_that_no_message_holds_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--max-message-bytes", "65536") as server:
        server.registered()
        histories: Any = server.histories()
        for begin in range(0, 400, 100):
            append(histories, *(block(ANSWER, stage=f"{number:0200}") for number in range(begin, begin + 100)))

        with pytest.raises(grpc.RpcError) as raised:
            list_keys(histories)

        assert grpc.StatusCode.RESOURCE_EXHAUSTED == raised.value.code()
        assert "ask for less" in (raised.value.details() or "")


@pytest.mark.slow
def test_a_reader_that_hangs_does_not_keep_others_from_their_exports(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--history-bytes", "256MiB") as server:
        server.registered()
        histories: Any = server.histories()
        text = i32(*(number * number * 7919 % 256 for number in range(65536)))
        for number in range(160):
            append(histories, block(token_ids=text, stage=f"s{number}"))
        request = history_pb2.ExportHistoryRequest(model_fingerprint=FINGERPRINT, namespace="default")
        hanging = [histories.ExportHistory(request) for _ in range(2)]
        assert all(len(next(call).archive_part) == 1 << 20 for call in hanging)

        assert len(export(histories)) > 8 << 20
        assert ["RESOURCE_EXHAUSTED"] * 2 == [status_of(functools.partial(list, call))[0] for call in hanging]
