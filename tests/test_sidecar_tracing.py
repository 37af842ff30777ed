"""Spans of a draft server at a real collector: in the trace of whoever asked, with counts and codes, without text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from tests.sidecar_lab import (
    ANSWER_S,
    FINGERPRINT,
    TEXT,
    VOCABULARY,
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
from agentspec.serving_patch.mailbox import Fallbacks
from agentspec.serving_patch.sidecar_client import SidecarClient
from agentspec.serving_patch.sidecar_messages import Vocabulary
from agentspec.sidecar.engine import StepRequest
from agentspec.sidecar.tracing import Tracing

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
DRAFTS = "agentspec.draft.v1.DraftService"


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Keeps the spans that it got, and takes metrics too."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.raw = b""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - gRPC's name
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            return metrics_service_pb2.ExportMetricsServiceResponse()
        self.raw += request.SerializeToString()
        self.spans += [span for part in request.resource_spans for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]  # generated
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, collector: tuple[Collector, str]) -> Iterator[SidecarProcess]:
    path = tmp_path_factory.mktemp("tracing") / "s"
    with running_sidecar(
        path, "--max-models", "2", "--otlp-endpoint", collector[1], OTEL_BSP_SCHEDULE_DELAY="50"
    ) as server:
        server.registered()
        yield server


@pytest.fixture
def spans(collector: tuple[Collector, str]) -> Collector:
    collector[0].spans.clear()
    return collector[0]


def attributes(span: Any) -> dict[str, Any]:
    return {
        item.key: item.value.string_value or (item.value.int_value if item.value.HasField("int_value") else None)
        for item in span.attributes
    }


def test_a_control_call_is_a_span_in_the_trace_of_its_caller(server: SidecarProcess, spans: Collector) -> None:
    server.stub().GetServerInfo(pb.GetServerInfoRequest(), metadata=[("traceparent", SAMPLED)])
    eventually(lambda: spans.named(f"{DRAFTS}/GetServerInfo"))

    (span,) = spans.named(f"{DRAFTS}/GetServerInfo")
    assert (TRACE_ID, PARENT_ID) == (span.trace_id.hex(), span.parent_span_id.hex())
    assert {
        "rpc.system": "grpc",
        "rpc.service": DRAFTS,
        "rpc.method": "GetServerInfo",
        "rpc.grpc.status_code": 0,
    } == attributes(span)


def test_the_span_of_a_refused_call_has_its_code(server: SidecarProcess, spans: Collector) -> None:
    with pytest.raises(grpc.RpcError):
        server.stub().Draft(pb.DraftRequest(model_fingerprint="f" * 64))
    with pytest.raises(grpc.RpcError):
        list(server.histories().ExportHistory(history_pb2.ExportHistoryRequest(namespace="other")))
    name = "agentspec.draft.v1.HistoryService/ExportHistory"
    eventually(lambda: spans.named(f"{DRAFTS}/Draft") and spans.named(name))

    (draft,), (export,) = spans.named(f"{DRAFTS}/Draft"), spans.named(name)
    assert grpc.StatusCode.NOT_FOUND.value[0] == attributes(draft)["rpc.grpc.status_code"]
    assert grpc.StatusCode.PERMISSION_DENIED.value[0] == attributes(export)["rpc.grpc.status_code"]


def test_only_a_sampled_step_is_a_span_and_the_stream_is_none(server: SidecarProcess, spans: Collector) -> None:
    stream = Stream(server.stub())
    stream.ask(opens=[open_message(1)], step=step_message(1, {1: (0, TEXT[:5])}))
    for step_id, traceparent in enumerate(["", NOT_SAMPLED, "no traceparent", SAMPLED], 2):
        stream.ask(step=step_message(step_id, {1: (5 * step_id - 5, TEXT[:5])}, traceparent=traceparent))
    stream.end()
    server.stub().GetServerInfo(pb.GetServerInfoRequest())
    eventually(lambda: spans.named(f"{DRAFTS}/GetServerInfo"))

    (span,) = spans.named("agentspec.draft_step")
    assert (TRACE_ID, PARENT_ID) == (span.trace_id.hex(), span.parent_span_id.hex())
    assert {"agentspec.num_rows", "agentspec.num_draft_tokens"} == attributes(span).keys()
    assert [] == spans.named(f"{DRAFTS}/DraftStream")


def test_a_step_of_the_hooks_client_is_a_span_of_the_trace_that_it_names(
    server: SidecarProcess, spans: Collector
) -> None:
    client = SidecarClient(server.socket, Vocabulary.of("traced", VOCABULARY), fallbacks=Fallbacks())
    try:
        assert client.wait_connected(ANSWER_S)
        none = np.zeros(0, np.int32)
        client.submit(
            StepRequest(
                step_id=1,
                handles=np.zeros(0, np.int64),
                positions=none,
                token_offsets=np.zeros(1, np.int32),
                token_ids=none,
                num_draft_tokens=none,
                num_accepted_tokens=none,
                max_draft_tokens=none,
                num_decode_rows=0,
                num_prefill_tokens=0,
                token_budget=0,
                traceparent=SAMPLED,
            )
        )
        eventually(lambda: spans.named("agentspec.draft_step"))
    finally:
        client.shutdown()

    assert [TRACE_ID] == [span.trace_id.hex() for span in spans.named("agentspec.draft_step")]


def test_spans_hold_no_text(server: SidecarProcess, spans: Collector) -> None:
    secret = b"a secret that nobody may read"
    block = history_pb2.Block(stage="s", workflow_id="secret workflow", token_ids=i32(*secret))
    histories: Any = server.histories()
    histories.AppendBlocks(history_pb2.AppendBlocksRequest(model_fingerprint=FINGERPRINT, blocks=[block]))
    eventually(lambda: spans.named("agentspec.draft.v1.HistoryService/AppendBlocks"))

    assert b"secret" not in spans.raw


def test_a_dead_collector_does_not_hold_up_the_end(tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "s", "--otlp-endpoint", "http://127.0.0.1:1", "--drain-s", "1") as server:
        server.registered()
        begin = time.monotonic()

        assert 0 == server.terminate()
        assert time.monotonic() - begin < 8  # metrics and spans give up after two seconds each


def test_without_a_collector_there_are_no_spans() -> None:
    with Tracing().step(SAMPLED, 1) as span:
        assert not span.is_recording()
