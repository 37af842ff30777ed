"""Who is calling: the run scope that travels down LangChain's callbacks, and the caller read from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables.config import var_child_runnable_config

from agentspec.middleware.tags import FLAT_PREFIX, CallerTags, check_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user said to one `AgentSpecMiddleware`.

    `endpoints` holds ``host:port`` of the servers that get tags; `None` is every one but known hosted providers.
    """

    workflow_id: str | None = None
    agent_id: str | None = None
    endpoints: frozenset[str] | None = None


class RunScope:
    """State of one top-level run of a wrapped graph; lives and dies with the run's callback handler."""

    def __init__(
        self, settings: Settings, *, graph_name: str | None, query_id: str, thread_id: str | None, batch_id: str | None
    ) -> None:
        self.settings = settings
        self.graph_name = graph_name
        self.query_id = query_id
        self.thread_id = thread_id
        self.batch_id = batch_id
        self.tool_names: dict[UUID, str] = {}
        self._tasks: dict[tuple[str, str, int | None], dict[str, int]] = {}
        self._num_calls: dict[tuple[str | None, str], int] = {}
        self._lock = threading.Lock()

    def count_call(self, instance: str, stage: str, branch: int | None, task: str) -> tuple[int, int, int]:
        """Count one LLM call and say where in the run's loops it stands, all from 1.

        Args:
            instance: namespace of the enclosing graph instance; one agent run twice has two.
            stage: stage path.
            branch: index in a Send fan-out: branches of one step do not count as iterations.
            task: namespace of the task; the same over its retries.

        Returns:
            iteration (visit of the stage in its graph instance), visit (call of the stage in the run) and
            call index (call of the stage in its task).
        """
        with self._lock:
            tasks = self._tasks.setdefault((instance, stage, branch), {})
            iteration = tasks.setdefault(task, len(tasks) + 1)
            return iteration, self._next((None, stage)), self._next((task, stage))

    def _next(self, counter: tuple[str | None, str]) -> int:
        self._num_calls[counter] = number = self._num_calls.get(counter, 0) + 1
        return number


@dataclass(slots=True, eq=False)
class LlmRun:
    """One LangChain model run, noted right before its client is called; closed when the run ends."""

    scope: RunScope
    run_id: UUID
    metadata: Mapping[str, Any]
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class ModelCall:
    """One model call of a `create_agent` loop, noted by the middleware form."""

    settings: Settings
    query_id: str | None
    iteration: int


_llm_run: ContextVar[LlmRun | None] = ContextVar("agentspec_llm_run", default=None)
_model_call: ContextVar[ModelCall | None] = ContextVar("agentspec_model_call", default=None)
_stage: ContextVar[str | None] = ContextVar("agentspec_stage", default=None)
_batch_id: ContextVar[str | None] = ContextVar("agentspec_batch_id", default=None)


class ScopeHandler(BaseCallbackHandler):
    """Carries the run scope: an inheritable handler is the one thing that every merge of configs keeps."""

    # Async callback managers call it in the task of the model call: what it notes there must be seen by the client.
    run_inline = True
    ignore_chain = True
    ignore_retriever = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self, scope: RunScope) -> None:
        self.scope = scope

    def __deepcopy__(self, memo: dict[int, Any]) -> ScopeHandler:
        return self

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note the model run in the context that is about to call the client."""
        _llm_run.set(LlmRun(self.scope, run_id, kwargs.get("metadata") or {}))

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], *, run_id: UUID, **kwargs: Any) -> None:
        """Note the run of a completion model."""
        _llm_run.set(LlmRun(self.scope, run_id, kwargs.get("metadata") or {}))

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Close the noted run."""
        _close_llm_run(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Close the noted run."""
        _close_llm_run(run_id)

    def on_tool_start(self, serialized: dict[str, Any] | None, input_str: str, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the tool's name for LLM calls made inside the tool."""
        name = (serialized or {}).get("name") or kwargs.get("name")
        if name:
            self.scope.tool_names[run_id] = str(name)

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget the tool."""
        self.scope.tool_names.pop(run_id, None)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget the tool."""
        self.scope.tool_names.pop(run_id, None)


def _close_llm_run(run_id: UUID) -> None:
    run = _llm_run.get()
    if run is not None and run.run_id == run_id:
        run.is_open = False


def scope_of(config: Mapping[str, Any] | None) -> RunScope | None:
    """The run scope among the callbacks of a LangChain config, or None."""
    callbacks = config.get("callbacks") if config else None
    for handler in callbacks if isinstance(callbacks, list) else getattr(callbacks, "handlers", ()):
        if isinstance(handler, ScopeHandler):
            return handler.scope
    return None


def current_batch_id() -> str | None:
    """Id of the `batch()` or `abatch()` call that is running here."""
    return _batch_id.get()


def stage(name: str) -> AbstractContextManager[None]:
    """Name the LLM calls made inside the block; without it they carry the path of their graph node.

    !!! example

        ```python
        def review(state):
            draft = llm.invoke(state["task"])
            with stage("critique"):
                verdict = llm.invoke(draft.content)
        ```

    Args:
        name: stage path, at most 256 bytes; the innermost block counts.

    Raises:
        TypeError: not a string.
        ValueError: empty or too long.
    """
    return _bound(_stage, check_name("stage", name))


def in_model_call(call: ModelCall | None) -> AbstractContextManager[None]:
    """Note a model call of the middleware form while the block runs."""
    return _bound(_model_call, call)


def in_batch() -> AbstractContextManager[None]:
    """Give the runs started inside the block one batch id: a new one, unless a batch is already running."""
    return _bound(_batch_id, _batch_id.get() or uuid4().hex[:12])


@contextmanager
def _bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@dataclass(frozen=True, slots=True)
class Caller:
    """The graph run, model call or both that the current context belongs to."""

    settings: Settings
    config: Mapping[str, Any]
    scope: RunScope | None
    llm_run: LlmRun | None
    model_call: ModelCall | None

    def tags(self) -> CallerTags:
        """Derive the caller's tags, and count the call. To be asked once per LLM call."""
        configurable = self.config.get("configurable") or {}
        # A call with its own `metadata` loses LangGraph's in the ambient config, not in the callbacks.
        metadata = (self.llm_run.metadata if self.llm_run else None) or self.config.get("metadata") or {}
        task = metadata.get("langgraph_checkpoint_ns") or configurable.get("checkpoint_ns") or ""
        instance = task.rpartition("|")[0]
        path = _node_path(task)
        name = _stage.get() or metadata.get(FLAT_PREFIX + "stage") or "/".join([*path, *self._suffixes(metadata)])
        branch = _send_index(metadata.get("langgraph_path"))
        iteration, visit, call_index = self._position(instance, str(name), branch, task)
        workflow_id = self._workflow_id()
        return CallerTags(
            workflow_id=workflow_id,
            stage=str(name),
            agent_id=self._agent_id(metadata, path) or "/".join([workflow_id, *_node_path(instance)]),
            query_id=_text(metadata.get("query_id") or configurable.get("query_id") or self._query_id()),
            thread_id=_text(configurable.get("thread_id") or (self.scope.thread_id if self.scope else None)),
            batch_id=(self.scope.batch_id if self.scope else None) or _batch_id.get(),
            call_id=_text(self.llm_run.run_id) if self.llm_run else None,
            task_id=task.rpartition(":")[2],
            iteration=iteration,
            visit=visit,
            call_index=call_index,
            branch=branch,
        )

    def _suffixes(self, metadata: Mapping[str, Any]) -> Iterator[str]:
        parent = getattr(self.config.get("callbacks"), "parent_run_id", None)
        if self.scope and parent in self.scope.tool_names:
            yield f"tool:{self.scope.tool_names[parent]}"
        if source := metadata.get("lc_source"):  # a built-in middleware's own call, such as a summary
            yield f"@{source}"

    def _position(
        self, instance: str, name: str, branch: int | None, task: str
    ) -> tuple[int | None, int | None, int | None]:
        if self.scope:
            return self.scope.count_call(instance, name, branch, task)
        return self.model_call.iteration if self.model_call else None, None, None

    def _workflow_id(self) -> str:
        graph_name = self.scope.graph_name if self.scope else None
        return self.settings.workflow_id or graph_name or "langgraph"

    def _agent_id(self, metadata: Mapping[str, Any], path: Sequence[str]) -> str | None:
        """The most specific role that anybody named; `None` leaves the path of the enclosing graph."""
        return _text(
            metadata.get(FLAT_PREFIX + "agent_id")
            or (self.model_call.settings.agent_id if self.model_call else None)
            or metadata.get("lc_agent_name")
            or self.settings.agent_id
            or (self.scope.graph_name if self.scope and len(path) == 1 else None)
        )

    def _query_id(self) -> str | None:
        if self.scope:
            return self.scope.query_id
        return self.model_call.query_id if self.model_call else None


def current_caller() -> Caller | None:
    """Who would make an LLM call here and now; None outside wrapped graphs and tagged model calls."""
    config: Mapping[str, Any] = var_child_runnable_config.get() or {}
    llm_run = _llm_run.get()
    if llm_run is not None and not llm_run.is_open:
        llm_run = None
    scope = llm_run.scope if llm_run else scope_of(config)
    model_call = _model_call.get()
    if scope is not None:
        return Caller(scope.settings, config, scope, llm_run, model_call)
    if model_call is not None:
        return Caller(model_call.settings, config, None, None, model_call)
    return None


def _node_path(checkpoint_ns: str) -> list[str]:
    """``writer:<task>|1|draft:<task>`` → ``["writer", "draft"]``."""
    return [part.partition(":")[0] for part in checkpoint_ns.split("|") if part and not part.isdigit()]


def _send_index(langgraph_path: object) -> int | None:
    match langgraph_path:
        case ["__pregel_push", int(index), *_]:
            return index
    return None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
