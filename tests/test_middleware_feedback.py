"""What comes back: figures per stage, OpenTelemetry, trace and group headers, hashed ids."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from openai import APIStatusError, AsyncOpenAI, OpenAI
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.openai_server import OpenAIServer

from agentspec.middleware import AgentSpecMiddleware, AgentSpecToolMiddleware, stage, telemetry
from agentspec.middleware.feedback import MAX_ROWS, OTHER_STAGES, CallOutcome, Feedback

MESSAGES: Any = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
DRAFTING = {"num_draft_tokens": 8, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}
WITH_USAGE: Any = {"include_usage": True}


@pytest.fixture
def server(module_server: OpenAIServer) -> OpenAIServer:
    module_server.clear()
    module_server.drafting = DRAFTING
    return module_server


@pytest.fixture
def client(server: OpenAIServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="m", messages=MESSAGES, **options)


def run(spec: AgentSpecMiddleware, node: Callable[[], object], config: Any = None) -> None:
    def call(state: MessagesState) -> dict[str, Any]:
        node()
        return {}

    graph = StateGraph(MessagesState).add_node("a", call).add_edge(START, "a").compile()
    spec.wrap(graph).invoke({"messages": [HumanMessage("hi")]}, config)


# --- figures


def test_figures_are_summed_by_stage(server: OpenAIServer, client: OpenAI) -> None:
    spec = AgentSpecMiddleware(workflow_id="wf")

    def node() -> None:
        ask(client)
        ask(client)
        server.drafting = None
        with stage("critique"):
            ask(client)

    run(spec, node)
    first, critique = spec.stats()

    assert (first.workflow_id, first.stage, first.num_calls, first.num_measured) == ("wf", "a", 2, 2)
    assert (first.prompt_tokens, first.output_tokens) == (10, 6)
    assert (first.acceptance_rate, first.acceptance_length) == (0.75, 3.0)
    assert first.mean_latency_s is not None
    assert first.mean_latency_s > 0
    assert (critique.stage, critique.num_calls, critique.num_measured) == ("critique", 1, 0)
    assert (critique.acceptance_rate, critique.acceptance_length) == (None, None)


def test_every_way_to_answer_is_measured(server: OpenAIServer, client: OpenAI) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    spec = AgentSpecMiddleware()

    def node() -> None:
        with stage("plain"):
            ask(client)
        with stage("raw"):
            client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
        with stage("stream"):
            list(ask(client, stream=True, stream_options=WITH_USAGE))
        with stage("raw-stream"):
            raw = client.chat.completions.with_raw_response.create(
                model="m", messages=MESSAGES, stream=True, stream_options=WITH_USAGE
            )
            list(raw.parse())
        with stage("langchain"):
            llm.invoke("hi")
        with stage("langchain-stream"):
            list(llm.stream("hi", stream_usage=True))

    run(spec, node)

    assert {row.stage: (row.output_tokens, row.draft_tokens, row.accepted_tokens) for row in spec.stats()} == (
        dict.fromkeys(("plain", "raw", "stream", "raw-stream", "langchain", "langchain-stream"), (3, 8, 6))
    )


def test_the_responses_api_counts_tokens(server: OpenAIServer, client: OpenAI) -> None:
    spec = AgentSpecMiddleware()
    run(spec, lambda: client.responses.create(model="m", input="hi"))

    assert [(row.num_calls, row.prompt_tokens, row.output_tokens) for row in spec.stats()] == [(1, 5, 3)]


def test_async_answers_are_measured(server: OpenAIServer) -> None:
    spec = AgentSpecMiddleware()

    async def node(state: MessagesState) -> dict[str, Any]:
        async with AsyncOpenAI(base_url=server.url, api_key="x") as client:
            await client.chat.completions.create(model="m", messages=MESSAGES)
            stream = await client.chat.completions.create(
                model="m", messages=MESSAGES, stream=True, stream_options=WITH_USAGE
            )
            async for _ in stream:
                pass
        return {}

    graph = StateGraph(MessagesState).add_node("a", node).add_edge(START, "a").compile()
    asyncio.run(spec.wrap(graph).ainvoke({"messages": []}))

    assert [(row.num_calls, row.num_measured, row.output_tokens) for row in spec.stats()] == [(2, 2, 6)]


def test_a_stream_that_is_left_early_counts_as_a_call(server: OpenAIServer, client: OpenAI) -> None:
    spec = AgentSpecMiddleware()

    def node() -> None:
        with ask(client, stream=True) as stream:
            next(iter(stream))
        with ask(client, stream=True):
            pass

    run(spec, node)

    assert [(row.num_calls, row.num_failed, row.num_measured) for row in spec.stats()] == [(2, 0, 0)]


def test_a_stream_yields_what_the_server_sent(server: OpenAIServer, client: OpenAI) -> None:
    plain = [chunk.model_dump() for chunk in ask(client, stream=True)]
    seen: list[Any] = []
    run(AgentSpecMiddleware(), lambda: seen.extend(chunk.model_dump() for chunk in ask(client, stream=True)))

    assert seen == plain


def test_a_failed_call_is_counted_and_raised(server: OpenAIServer, client: OpenAI) -> None:
    spec = AgentSpecMiddleware()
    server.num_failures_left = 1

    def node() -> None:
        with pytest.raises(APIStatusError):
            ask(client)

    run(spec, node)

    assert [(row.num_calls, row.num_failed) for row in spec.stats()] == [(1, 1)]


@tool
def lookup(x: str) -> str:
    """Look something up."""
    return "found " + x


def test_tools_are_timed_in_a_stage_of_their_own(server: OpenAIServer) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr
    spec = AgentSpecMiddleware(workflow_id="wf")
    spec.wrap(create_agent(llm, [lookup])).invoke({"messages": [HumanMessage("hi")]})
    row = spec.stats()[1]

    assert (row.stage, row.num_calls, row.num_tool_calls) == ("tools/tool:lookup", 0, 1)
    assert row.tool_s > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_the_tool_middleware_times_tools_and_tags_calls_inside_them(server: OpenAIServer, is_async: bool) -> None:
    llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr

    @tool
    def consult(x: str) -> str:
        """Ask the model."""
        with OpenAI(base_url=server.url, api_key="x") as client:
            return str(ask(client).choices[0].message.content)

    spec = AgentSpecMiddleware(workflow_id="wf")
    agent = create_agent(llm, [consult], middleware=[spec, AgentSpecToolMiddleware(spec)])
    inputs: Any = {"messages": [HumanMessage("hi")]}
    if is_async:
        asyncio.run(agent.ainvoke(inputs))
    else:
        agent.invoke(inputs)

    assert [(tags.workflow_id, tags.stage) for tags in server.tags] == [
        ("wf", "model"),
        ("wf", "tools/tool:consult"),
        ("wf", "model"),
    ]
    assert {row.stage: row.num_tool_calls for row in spec.stats()} == {"model": 0, "tools/tool:consult": 1}


def test_the_tool_middleware_wants_a_middleware() -> None:
    with pytest.raises(TypeError, match="got str: 'wf'"):
        AgentSpecToolMiddleware("wf")  # type: ignore[arg-type]


def test_the_report_is_a_table(server: OpenAIServer, client: OpenAI) -> None:
    spec = AgentSpecMiddleware(workflow_id="code-review")
    run(spec, lambda: ask(client))
    file = io.StringIO()
    spec.report(file)
    header, _, row = file.getvalue().splitlines()

    assert header.split()[:4] == ["workflow", "stage", "calls", "tokens"]
    assert row.split()[:6] == ["code-review", "a", "1", "3", "75%", "3.00"]


def test_without_a_call_the_report_is_a_header(capsys: pytest.CaptureFixture[str]) -> None:
    AgentSpecMiddleware().report()

    assert len(capsys.readouterr().out.splitlines()) == 2


def test_stages_past_the_bound_share_a_row() -> None:
    feedback = Feedback()
    for number in range(MAX_ROWS + 50):
        feedback.add_call("wf", f"stage-{number}", CallOutcome(0.1))
    rows = feedback.stats()

    assert len(rows) == MAX_ROWS
    assert [row.num_calls for row in rows if row.stage == OTHER_STAGES] == [51]


# --- OpenTelemetry


class Telemetry:
    """An SDK of our own in the place of the process-wide one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spans = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.reader = InMemoryMetricReader()
        meters = MeterProvider([self.reader])
        monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
        telemetry._instruments.cache_clear()
        self.tracer = self.tracers.get_tracer("test")

    def points(self) -> dict[str, list[Any]]:
        data = self.reader.get_metrics_data()
        assert data is not None
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        return {metric.name: list(metric.data.data_points) for scope in scopes for metric in scope.metrics}


@pytest.fixture
def otel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Telemetry]:
    yield Telemetry(monkeypatch)
    telemetry._instruments.cache_clear()


def test_the_current_span_has_tags_and_figures(server: OpenAIServer, client: OpenAI, otel: Telemetry) -> None:
    spec = AgentSpecMiddleware(workflow_id="wf", agent_id="helper")

    def node() -> None:
        with otel.tracer.start_as_current_span("chat"):
            ask(client)

    run(spec, node, {"configurable": {"thread_id": "thread-1"}})
    attributes = dict(otel.spans.get_finished_spans()[0].attributes or {})

    assert attributes["gen_ai.workflow.name"] == "wf"
    assert attributes["gen_ai.agent.name"] == "helper"
    assert attributes["gen_ai.conversation.id"] == "thread-1"
    assert attributes["agentspec.stage"] == "a"
    assert (attributes["gen_ai.usage.input_tokens"], attributes["gen_ai.usage.output_tokens"]) == (5, 3)
    assert (attributes["agentspec.draft_tokens"], attributes["agentspec.accepted_tokens"]) == (8, 6)


def test_metrics_have_the_figures_by_stage(server: OpenAIServer, client: OpenAI, otel: Telemetry) -> None:
    run(AgentSpecMiddleware(workflow_id="wf"), lambda: ask(client))
    points = otel.points()
    (accepted,) = points["agentspec.client.accepted_tokens"]
    tokens = {point.attributes["gen_ai.token.type"]: point.sum for point in points["gen_ai.client.token.usage"]}

    assert accepted.value == 6
    assert accepted.attributes == {
        "gen_ai.workflow.name": "wf",
        "agentspec.stage": "a",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
    }
    assert tokens == {"input": 5, "output": 3}
    assert [point.count for point in points["gen_ai.client.operation.duration"]] == [1]


def test_traceparent_is_that_of_the_current_span(server: OpenAIServer, client: OpenAI, otel: Telemetry) -> None:
    spans: list[trace.Span] = []

    def node() -> None:
        with otel.tracer.start_as_current_span("chat") as span:
            spans.append(span)
            ask(client)
            ask(client, extra_headers={"traceparent": "mine"})

    run(AgentSpecMiddleware(), node)
    run(AgentSpecMiddleware(propagate_trace=False), node)
    context = spans[0].get_span_context()
    sent = [headers.get("traceparent") for headers in server.headers]

    assert sent == [
        f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}",
        "mine",
        None,
        "mine",
    ]


def test_without_a_span_there_is_no_trace_header(server: OpenAIServer, client: OpenAI) -> None:
    run(AgentSpecMiddleware(), lambda: ask(client))

    assert "traceparent" not in server.headers[0]


def test_without_opentelemetry_calls_are_tagged_and_counted(
    server: OpenAIServer, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "HAS_OPENTELEMETRY", False)
    spec = AgentSpecMiddleware(workflow_id="wf")
    run(spec, lambda: ask(client))

    assert (server.tags[0].workflow_id, spec.stats()[0].accepted_tokens) == ("wf", 6)


# --- the group header


def groups_of(server: OpenAIServer) -> list[str | None]:
    return [headers.get("x-agentspec-group") for headers in server.headers]


def test_no_group_is_sent_unless_it_is_asked_for(server: OpenAIServer, client: OpenAI) -> None:
    run(AgentSpecMiddleware(), lambda: ask(client))

    assert groups_of(server) == [None]


def test_calls_that_write_alike_are_one_group(server: OpenAIServer, client: OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "t", "parameters": {}}}]

    def node() -> None:
        ask(client)
        ask(client)
        with stage("other"):
            ask(client)
        ask(client, tools=tools)
        ask(client, extra_body={"vllm_xargs": {"agentspec_stage": "other"}})

    run(AgentSpecMiddleware(workflow_id="wf", group_header=True), node)
    run(AgentSpecMiddleware(workflow_id="wf", group_header=True), node)
    first, second, other, with_tools, by_hand, *again = groups_of(server)

    assert first == second != other != with_tools
    assert by_hand == other
    assert again == [first, second, other, with_tools, by_hand]


# --- prompt versions and ids


def test_a_prompt_version_can_be_given(server: OpenAIServer, client: OpenAI) -> None:
    run(AgentSpecMiddleware(prompt_versions={"a": "v7"}), lambda: ask(client))

    assert [tags.prompt_version for tags in server.tags] == ["v7"]


def test_a_prompt_that_changes_with_each_call_has_no_version(server: OpenAIServer, client: OpenAI) -> None:
    def node() -> None:
        for letter in "abcdefghijklmnopqrst":
            messages: Any = [{"role": "system", "content": f"You are {letter}."}]
            client.chat.completions.create(model="m", messages=messages)
        client.chat.completions.create(model="m", messages=[{"role": "system", "content": "You are a."}])

    run(AgentSpecMiddleware(), node)
    versions = [tags.prompt_version for tags in server.tags]

    assert len(set(versions[:16])) == 16
    assert versions[16:20] == ["dyn"] * 4
    assert versions[20] == versions[0]


def ids_with(server: OpenAIServer, client: OpenAI, hash_ids: bool | bytes) -> tuple[str, str, str]:
    spec = AgentSpecMiddleware(hash_ids=hash_ids)
    with spec.batch("ann's batch"):
        run(spec, lambda: ask(client), {"configurable": {"thread_id": "ann@home.test"}, "metadata": {"query_id": "q"}})
    tags = server.tags[-1]
    return tags.query_id, tags.thread_id, tags.batch_id


def test_ids_travel_as_hashes_when_asked_for(server: OpenAIServer, client: OpenAI) -> None:
    key = b"0123456789abcdef"
    plain = ids_with(server, client, False)
    hashed = ids_with(server, client, True)

    assert plain == ("q", "ann@home.test", "ann's batch")
    assert not set(plain) & set(hashed)
    assert len(set(hashed)) == 3
    assert "ann" not in str(server.bodies[1]["vllm_xargs"])
    assert ids_with(server, client, key) == ids_with(server, client, key) != hashed


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hash_ids": b"short"}, ValueError, "got 5"),
        ({"hash_ids": "yes"}, TypeError, "got str"),
        ({"group_header": 1}, TypeError, "got int: 1"),
        ({"propagate_trace": None}, TypeError, "got NoneType: None"),
        ({"prompt_versions": {"a": ""}}, ValueError, "got ''"),
        ({"prompt_versions": ["a"]}, TypeError, r"got list: \['a'\]"),
    ],
)
def test_bad_options_are_refused_with_their_value(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AgentSpecMiddleware(**options)
