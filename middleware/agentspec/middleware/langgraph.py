"""`AgentSpecMiddleware`: a LangGraph graph, wrapped in one line, tags every LLM call it makes."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Context
from typing import Any, TextIO, TypeVar, cast
from uuid import uuid4

from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
from langchain_core.callbacks import BaseCallbackHandler, BaseCallbackManager
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.pregel import Pregel
from langgraph.types import Command

from agentspec.middleware.destinations import endpoints
from agentspec.middleware.fail_open import fail_open
from agentspec.middleware.feedback import StageStats, table
from agentspec.middleware.grammar import BlockGrammar
from agentspec.middleware.inject import instrument_openai
from agentspec.middleware.scope import (
    ModelCall,
    RunScope,
    ScopeHandler,
    current_batch_id,
    in_batch,
    in_model_call,
    scope_of,
)
from agentspec.middleware.settings import (
    Settings,
    check_grammars,
    check_hash_key,
    check_prompt_versions,
    check_switch,
)
from agentspec.middleware.tags import check_name

GraphT = TypeVar("GraphT", bound=Pregel[Any, Any, Any, Any])

MAX_THREADS = 10_000  # whose last query id is remembered, so that a resumed run keeps it
_UNNAMED = "LangGraph"  # what LangGraph calls a graph without a name


class AgentSpecMiddleware(AgentMiddleware):
    """Tag every LLM call of a LangGraph program, so that vLLM with AgentSpec drafts from the right histories.

    The tags travel in the request body, as one JSON string under ``vllm_xargs["agentspec"]``. They never change an
    output, and an error while tagging never reaches the call: it goes out untagged.

    !!! example

        ```python
        spec = AgentSpecMiddleware(workflow_id="code-review", base_urls=["http://gpu-1:8000"])
        graph = spec.wrap(builder.compile())  # StateGraph, create_agent, @entrypoint
        ```

    As ``create_agent(..., middleware=[AgentSpecMiddleware()])`` it tags the agent's own model calls only; for those
    made inside its tools add `AgentSpecToolMiddleware`. Where other middlewares call models, put it first.

    Args:
        workflow_id: name of the program, at most 256 bytes; default: the graph's name.
        agent_id: stable role of its agents, for those without a name; default: the graph's name or its path.
        base_urls: servers that get tags; default: every one but known hosted providers, which refuse unknown fields.
        grammars: block markers of the answers: a `BlockGrammar` or the id of one that the server knows, for all stages
            or by stage: its path, the last part of it, or ``*``.
        prompt_versions: name of the prompt's version by stage, as above, for prompts whose text changes with each call;
            default: a hash of the system text without ids, numbers and URLs, or ``dyn`` once it has changed 16 times.
        hash_ids: send the ids of query, thread and batch as hashes. True: with a key of this process; for hashes that
            are equal in several processes, give the key: 16 to 64 bytes.
        group_header: send the header `x-agentspec-group`, a hash of workflow, stage, prompt version and tool set, for
            routers that keep similar requests on one replica.
        propagate_trace: send `traceparent` when an OpenTelemetry span is active.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a name that is empty or too long, a URL without scheme or host, a key of the wrong length.
    """

    def __init__(
        self,
        *,
        workflow_id: str | None = None,
        agent_id: str | None = None,
        base_urls: Sequence[str] | None = None,
        grammars: Mapping[str, BlockGrammar | str] | BlockGrammar | str | None = None,
        prompt_versions: Mapping[str, str] | None = None,
        hash_ids: bool | bytes = False,
        group_header: bool = False,
        propagate_trace: bool = True,
    ) -> None:
        super().__init__()
        self._settings = Settings(
            workflow_id=None if workflow_id is None else check_name("workflow_id", workflow_id),
            agent_id=None if agent_id is None else check_name("agent_id", agent_id),
            endpoints=None if base_urls is None else endpoints(base_urls),
            grammars=check_grammars(grammars),
            prompt_versions=check_prompt_versions(prompt_versions),
            hash_key=check_hash_key(hash_ids),
            sends_group=check_switch("group_header", group_header),
            propagates_trace=check_switch("propagate_trace", propagate_trace),
        )
        self._classes: dict[type, type] = {}
        self._queries: dict[str, str] = {}
        self._lock = threading.Lock()
        instrument_openai()

    def wrap(self, graph: GraphT) -> GraphT:
        """Return a copy of `graph` whose runs tag their LLM calls; `graph` itself stays as it is.

        The copy is an instance of a subclass of the graph's own class. Called inside a run of another wrapped graph,
        it belongs to that run: the outer wrapping counts.

        Args:
            graph: a compiled graph: ``StateGraph(...).compile()``, ``create_agent(...)``, ``@entrypoint``.

        Raises:
            TypeError: not a compiled graph.
        """
        if not isinstance(graph, Pregel):
            hint = "; call .compile() on it first" if hasattr(graph, "compile") else ""
            raise TypeError(
                "wrap() expects a compiled graph (StateGraph(...).compile(), create_agent(...), @entrypoint), "
                f"got {type(graph).__name__}{hint}"
            )
        tagging = graph.copy()
        with self._lock:
            if type(graph) not in self._classes:
                self._classes[type(graph)] = _tagging_class(type(graph), self)
            tagging.__class__ = self._classes[type(graph)]
        return tagging

    def batch(self, batch_id: str | None = None) -> AbstractContextManager[str]:
        """Give all runs started inside the block one batch id; without it each `batch` or `abatch` call has its own.

        !!! example

            ```python
            with spec.batch("nightly-7"):
                await graph.abatch(inputs, {"max_concurrency": 64})
            ```

        Args:
            batch_id: at most 256 bytes; default: that of the batch around it, else a new one.

        Returns:
            A context manager that gives the id.

        Raises:
            TypeError: not a string.
            ValueError: empty or too long.
        """
        return in_batch(None if batch_id is None else check_name("batch_id", batch_id))

    def stats(self) -> tuple[StageStats, ...]:
        """What the calls brought so far, one element per workflow and stage.

        Tokens are known where the answers hold `usage`, acceptance where the server runs with
        ``--per-request-spec-decode-metrics summary``; of a stream, both come with
        ``stream_options={"include_usage": True}``.
        """
        return self._settings.feedback.stats()

    def report(self, file: TextIO | None = None) -> None:
        """Print `stats` as a table.

        Args:
            file: default: standard output.
        """
        (file or sys.stdout).write(table(self.stats()) + "\n")

    @property
    def settings(self) -> Settings:
        """What was said to it, checked."""
        return self._settings

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Say which agent's model call runs; the request itself is not touched."""
        with self._in_model_call(request):
            return handler(request)

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Say which agent's model call runs; the request itself is not touched."""
        with self._in_model_call(request):
            return await handler(request)

    def _in_model_call(self, request: ModelRequest[Any]) -> AbstractContextManager[None]:
        call = None
        with fail_open:
            query_id, iteration = _loop_position(request.messages)
            call = ModelCall(self._settings, query_id, iteration)
        return in_model_call(call)

    def _run_config(
        self, graph: Pregel[Any, Any, Any, Any], graph_input: object, config: RunnableConfig | None
    ) -> RunnableConfig | None:
        """The config for one run of `graph` with the handler that carries a new run scope.

        Unchanged inside a run that has a scope already.
        """
        opened = config
        with fail_open:
            ambient = var_child_runnable_config.get()
            if not scope_of(config) and not scope_of(ambient):
                scope = self._open_scope(graph, graph_input, config or {})
                opened = {
                    **(config or {}),
                    "callbacks": _with_handler(ScopeHandler(scope), config, graph.config, ambient),
                }
        return opened

    def _open_scope(self, graph: Pregel[Any, Any, Any, Any], graph_input: object, config: RunnableConfig) -> RunScope:
        configurable = config.get("configurable") or {}
        name = graph.get_name()
        thread = configurable.get("thread_id")
        query = (config.get("metadata") or {}).get("query_id") or configurable.get("query_id")
        return RunScope(
            self._settings,
            graph_name=None if name == _UNNAMED else name,
            query_id=self._query_id(graph_input, query or config.get("run_id"), thread),
            thread_id=None if thread is None else str(thread),
            batch_id=current_batch_id(),
        )

    def _query_id(self, graph_input: object, chosen: object, thread: object) -> str:
        """The id chosen by the caller; else, when an interrupted run resumes, its thread's last one; else a new one."""
        with self._lock:
            is_resumed = graph_input is None or isinstance(graph_input, Command)
            last = self._queries.pop(str(thread), None) if thread is not None else None
            query_id = str(chosen or (last if is_resumed else None) or uuid4())
            if thread is not None:
                self._queries[str(thread)] = query_id
                if len(self._queries) > MAX_THREADS:
                    del self._queries[next(iter(self._queries))]
        return query_id


def _loop_position(messages: Sequence[AnyMessage]) -> tuple[str | None, int]:
    """Id of the human message that an agent loop answers, and the number of its model call, from 1."""
    iteration = 1
    for message in reversed(messages):
        if isinstance(message, HumanMessage):
            return message.id, iteration
        iteration += isinstance(message, AIMessage)
    return None, iteration


def _with_handler(
    handler: ScopeHandler, config: RunnableConfig | None, bound: RunnableConfig | None, ambient: RunnableConfig | None
) -> list[Any] | BaseCallbackManager:
    """The callbacks to run with: the run's own and `handler`, with the bound or inherited ones if those were lost."""
    callbacks = (config or {}).get("callbacks")
    if not callbacks and not _merges_callbacks():
        callbacks = (bound or {}).get("callbacks") or (ambient or {}).get("callbacks")
    if isinstance(callbacks, BaseCallbackManager):
        manager = callbacks.copy()
        manager.add_handler(handler, inherit=True)
        return manager
    return [*(callbacks or ()), handler]


@functools.cache
def _merges_callbacks() -> bool:
    """Whether this LangGraph adds a run's own callbacks to bound and inherited ones; 1.0 replaces them."""
    try:
        from langgraph._internal._config import ensure_config  # noqa: PLC0415 - private: only here, only to look
    except ImportError:
        return True
    handlers = [BaseCallbackHandler(), BaseCallbackHandler()]
    merged = Context().run(ensure_config, *(RunnableConfig(callbacks=[handler]) for handler in handlers))
    return merged["callbacks"] == handlers


def _tagging_class(cls: type, spec: AgentSpecMiddleware) -> type:
    """A subclass of a graph's class whose runs open a scope: every way to run a graph ends in these four methods.

    The middleware belongs to the class, not to the instance, so that the graph's own `copy` and all that builds on
    it keep working.
    """

    class TaggingGraph(cls):  # type: ignore[misc]  # a base known only at run time
        def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
            return cast("Iterator[Any]", super().stream(input, spec._run_config(self, input, config), **kwargs))

        def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:
            return super().astream(input, spec._run_config(self, input, config), **kwargs)

        def batch(self, inputs: Iterable[Any], config: Any = None, **kwargs: Any) -> list[Any]:
            with in_batch():
                return cast("list[Any]", super().batch(inputs, config, **kwargs))

        async def abatch(self, inputs: Iterable[Any], config: Any = None, **kwargs: Any) -> list[Any]:
            with in_batch():
                return cast("list[Any]", await super().abatch(inputs, config, **kwargs))

    TaggingGraph.__name__, TaggingGraph.__qualname__, TaggingGraph.__module__ = (
        cls.__name__,
        cls.__qualname__,
        cls.__module__,
    )
    return TaggingGraph
