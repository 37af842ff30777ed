"""Metrics as Prometheus and an OpenTelemetry collector see them: names, labels, values, and a peer that is gone."""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError

import grpc
import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from agentspec.sidecar.budget import POLICIES
from agentspec.sidecar.budget_metrics import BUCKET_COUNTERS, BUCKET_SUMS
from agentspec.sidecar.engine import Engine, FinishReason, Sampling, StepRequest, StepTiming
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.policy_switch import with_policy_switch
from agentspec.sidecar.tags import Tags
from agentspec.sidecar.telemetry import LinkFigures, MetricsExport, export_link_metrics, export_metrics

COUNTERS = [
    "agentspec_steps_total",
    "agentspec_drafts_total",
    "agentspec_draft_tokens_total",
    "agentspec_accepted_tokens_total",
    "agentspec_tokens_total",
]
GAUGES = ["agentspec_history_tokens", "agentspec_history_bytes", "agentspec_open_requests"]
FALLBACKS = "agentspec_fallbacks_total"
RECOVERIES = "agentspec_block_recoveries_total"
DROPPED = "agentspec_history_dropped_tokens_total"
BUDGET = [
    *(f"{name}_total" for name in BUCKET_COUNTERS),
    *BUCKET_SUMS,
    *("agentspec_step_timings_total", "agentspec_policy", "agentspec_gate_closings_total", "agentspec_closed_gates"),
    *("agentspec_cost_model_level_seconds", "agentspec_cost_model_error_ratio", "agentspec_survival_trust_ratio"),
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def engine() -> Engine:
    return Engine([bytes([97 + i]) for i in range(8)], CHAT, num_speculative_tokens=4, history_bytes=1 << 24)


@pytest.fixture
def server(engine: Engine) -> Iterator[MetricsExport]:
    server = export_metrics(engine, lambda: {"deadline": 3}, free_port())
    yield server
    server.shutdown()


def scrape(port: int) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def serve_one_request(engine: Engine, *, is_closed: bool = True, timing: StepTiming | None = None) -> None:
    engine.open(1, np.zeros(2, np.int32), Tags(workflow_id="w", stage="s"), Sampling(), namespace="default")
    engine.step(
        StepRequest(
            step_id=1,
            handles=np.array([1], np.int64),
            positions=np.zeros(1, np.int32),
            token_offsets=np.array([0, 3], np.int32),
            token_ids=np.array([1, 2, 3], np.int32),
            num_draft_tokens=np.array([4], np.int32),
            num_accepted_tokens=np.array([2], np.int32),
            max_draft_tokens=np.zeros(1, np.int32),
            num_decode_rows=1,
            num_prefill_tokens=0,
            token_budget=0,
            timing=timing,
        )
    )
    if is_closed:
        engine.close(1, FinishReason.STOP, 3, np.empty(0, np.int32))


def test_exported_names_are_those_of_the_readme(engine: Engine, server: MetricsExport) -> None:
    serve_one_request(engine)

    assert sorted(scrape(server.port)) == sorted([*COUNTERS, *GAUGES, *BUDGET, FALLBACKS, RECOVERIES, DROPPED])


def test_counts_carry_namespace_workflow_stage_and_block(engine: Engine, server: MetricsExport) -> None:
    serve_one_request(engine)
    samples = scrape(server.port)

    labels = {"namespace": "default", "workflow": "w", "stage": "s", "block": "text"}
    assert {name: samples[name] for name in COUNTERS} == {
        "agentspec_steps_total": [(labels, 1.0)],
        "agentspec_drafts_total": [(labels, 1.0)],
        "agentspec_draft_tokens_total": [(labels, 4.0)],
        "agentspec_accepted_tokens_total": [(labels, 2.0)],
        "agentspec_tokens_total": [(labels, 3.0)],
    }


def test_gauges_follow_the_engine(engine: Engine, server: MetricsExport) -> None:
    serve_one_request(engine, is_closed=False)
    is_open = scrape(server.port)
    engine.close(1, FinishReason.STOP, 3, np.empty(0, np.int32))
    is_closed = scrape(server.port)

    assert is_open["agentspec_open_requests"] == [({}, 1.0)]
    assert is_closed["agentspec_open_requests"] == [({}, 0.0)]
    assert is_closed["agentspec_history_tokens"] == [({}, float(engine.num_history_tokens()))]
    assert is_closed["agentspec_history_bytes"] == [({}, float(engine.memory_bytes()))]


def test_fallbacks_are_counted_by_reason(server: MetricsExport) -> None:
    assert scrape(server.port)[FALLBACKS] == [({"reason": "deadline"}, 3.0)]


def test_every_metric_has_a_row_in_the_readme(engine: Engine, server: MetricsExport) -> None:
    serve_one_request(engine)
    table = (Path(__file__).parent.parent / "README.md").read_text()

    assert [] == [name for name in scrape(server.port) if f"`{name}`" not in table]


def test_budget_counts_steps_and_times_by_decode_rows(engine: Engine, server: MetricsExport) -> None:
    serve_one_request(engine, timing=StepTiming(duration_ms=250.0, num_decode_rows=40))
    samples = scrape(server.port)

    assert ({"rows": "1"}, 1.0) in samples["agentspec_budget_steps_total"]
    assert ({"rows": "33-64"}, 0.25) in samples["agentspec_step_seconds_total"]
    assert [({"result": "used"}, 1.0), ({"result": "refused"}, 0.0)] == samples["agentspec_step_timings_total"]


def test_level_of_the_cost_model_is_in_seconds(engine: Engine, server: MetricsExport) -> None:
    serve_one_request(engine, timing=StepTiming(duration_ms=250.0, num_decode_rows=1))
    ((_, level),) = scrape(server.port)["agentspec_cost_model_level_seconds"]

    assert level == pytest.approx(0.25, rel=0.1)


def test_policy_in_use_is_the_one_that_shows_1(engine: Engine, server: MetricsExport) -> None:
    engine.set_policy("shadow")

    shown = {labels["policy"]: value for labels, value in scrape(server.port)["agentspec_policy"]}

    assert {policy: float(policy == "shadow") for policy in POLICIES} == shown


# --- the admin call ---


def call(port: int, method: str, body: bytes | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, "/policy", body)
    answer = connection.getresponse()
    text = answer.read().decode().strip()
    connection.close()
    return answer.status, text


def test_put_switches_the_policy(engine: Engine, server: MetricsExport) -> None:
    answers = [call(server.port, "PUT", b"shadow"), call(server.port, "GET")]

    assert [(200, "shadow"), (200, "shadow")] == answers
    assert engine.policy == "shadow"


@pytest.mark.parametrize("body", [b"", b"fast", b"off" * 1000, b"\xff\xfe", b"OFF"])
def test_unknown_policy_is_refused_and_the_known_ones_are_named(
    engine: Engine, server: MetricsExport, body: bytes
) -> None:
    before = engine.policy
    status, text = call(server.port, "PUT", body)

    assert (400, before) == (status, engine.policy)
    assert text.startswith("policy: expected one of goodput, redundancy, uniform, fixed, off, shadow as the body, got")


def test_only_get_and_put_are_answered(server: MetricsExport) -> None:
    assert (405, "expected GET or PUT, got POST") == call(server.port, "POST", b"off")


def test_policy_is_not_switched_from_another_machine(engine: Engine) -> None:
    before = engine.policy
    statuses = []
    body = io.BytesIO(b"off")
    app = with_policy_switch(lambda _environ, _start: [b"metrics"], engine)

    def start(status: str, *_: object) -> Callable[[bytes], object]:
        statuses.append(status)
        return body.write

    for address in ("10.0.0.7", "::ffff:10.0.0.7", "", "not an address"):
        environ = {"PATH_INFO": "/policy", "REQUEST_METHOD": "PUT", "REMOTE_ADDR": address}
        list(app(environ | {"CONTENT_LENGTH": "3", "wsgi.input": body}, start))

    assert ["403 Forbidden"] * 4 == statuses
    assert engine.policy == before


def test_markers_that_fit_no_open_block_are_counted() -> None:
    engine = Engine([b"</think>"], CHAT)
    server = export_metrics(engine, dict, free_port())
    engine.open(1, np.zeros(0, np.int32), Tags(), Sampling(), namespace="default")
    engine.close(1, FinishReason.STOP, 2, np.zeros(2, np.int32))
    samples = scrape(server.port)
    server.shutdown()

    assert samples[RECOVERIES] == [({}, float(engine.num_recoveries()))]
    assert samples[DROPPED] == [({}, float(engine.num_dropped_tokens()))]
    assert engine.num_recoveries() > 0


def test_client_of_a_draft_server_exports_what_it_sees_of_it() -> None:
    figures = LinkFigures(
        is_connected=True, num_connections=2, num_answers=7, num_late_answers=3, round_trip_s=0.5, num_resyncs=4
    )
    export = export_link_metrics(lambda: figures, lambda: {"disconnected": 9}, free_port())
    samples = scrape(export.port)
    export.shutdown()

    assert samples == {
        "agentspec_sidecar_connected": [({}, 1.0)],
        "agentspec_sidecar_connections_total": [({}, 2.0)],
        "agentspec_sidecar_answers_total": [({}, 7.0)],
        "agentspec_sidecar_late_answers_total": [({}, 3.0)],
        "agentspec_sidecar_round_trip_seconds_total": [({}, 0.5)],
        "agentspec_sidecar_resyncs_total": [({}, 4.0)],
        FALLBACKS: [({"reason": "disconnected"}, 9.0)],
    }


def test_taken_port_is_one_warning_and_no_server(
    engine: Engine, server: MetricsExport, agentspec_log: pytest.LogCaptureFixture
) -> None:
    second = export_metrics(engine, dict, server.port)
    second.shutdown()

    assert second.port == 0
    assert [record.levelname for record in agentspec_log.records] == ["WARNING"]
    assert str(server.port) in agentspec_log.text


def test_shutdown_frees_the_port(engine: Engine) -> None:
    server = export_metrics(engine, dict, free_port())
    server.shutdown()

    assert server.thread is not None
    assert not server.thread.is_alive()
    with pytest.raises(URLError):
        scrape(server.port)
    again = export_metrics(engine, dict, server.port)
    again.shutdown()


def test_two_engines_of_one_process_are_told_apart(engine: Engine, server: MetricsExport) -> None:
    other_engine = Engine([b"a"] * 8, CHAT, num_speculative_tokens=4, history_bytes=1 << 24)
    other = export_metrics(other_engine, dict, free_port())
    serve_one_request(other_engine, is_closed=False)

    assert scrape(server.port)["agentspec_open_requests"] == [({}, 0.0)]
    assert scrape(other.port)["agentspec_open_requests"] == [({}, 1.0)]
    other.shutdown()


class Collector(metrics_service_pb2_grpc.MetricsServiceServicer):
    """An OpenTelemetry collector that keeps what it got."""

    def __init__(self) -> None:
        self.resources: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802  # the contract's name
        self.resources += request.resource_metrics
        return metrics_service_pb2.ExportMetricsServiceResponse()

    def metrics(self) -> dict[str, Any]:
        scopes = [scope for resource in self.resources for scope in resource.scope_metrics]
        return {metric.name: metric for scope in scopes for metric in scope.metrics}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    """A running collector and its endpoint."""
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"http://127.0.0.1:{port}"
    server.stop(0).wait()


def test_collector_gets_the_metrics_that_prometheus_gets(
    engine: Engine, collector: tuple[Collector, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
    servicer, endpoint = collector
    export = export_metrics(engine, lambda: {"deadline": 3}, free_port(), endpoint)
    serve_one_request(engine)
    scraped = scrape(export.port)
    export.shutdown()
    pushed = servicer.metrics()

    assert {name.removesuffix("_total") for name in scraped} == set(pushed)
    [point] = pushed["agentspec_accepted_tokens"].sum.data_points
    assert point.as_int == 2
    labels = {label.key: label.value.string_value for label in point.attributes}
    assert labels.items() >= {"namespace": "default", "workflow": "w", "stage": "s"}.items()
    resource = {label.key: label.value.string_value for label in servicer.resources[0].resource.attributes}
    assert resource["service.name"] == "agentspec"
    assert resource["service.instance.id"]


def test_collector_alone_needs_no_port(engine: Engine, collector: tuple[Collector, str]) -> None:
    servicer, endpoint = collector
    export = export_metrics(engine, dict, 0, endpoint)
    export.shutdown()

    assert export.port == 0
    assert "agentspec_open_requests" in servicer.metrics()


def test_dead_collector_delays_the_shutdown_by_seconds_at_most(engine: Engine) -> None:
    export = export_metrics(engine, dict, 0, f"http://127.0.0.1:{free_port()}")
    started = time.monotonic()
    export.shutdown()

    assert time.monotonic() - started < 5
