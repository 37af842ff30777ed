"""The run scope that travels down LangChain's callbacks, and the marks that blocks of code set."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from uuid import UUID, uuid4

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langchain_core.outputs import LLMResult

from agentspec.middleware.fail_open import fail_open
from agentspec.middleware.settings import Settings
from agentspec.middleware.tags import MAX_DRAFT_TOKENS, check_name
from agentspec.middleware.telemetry import record_tool_call

T = TypeVar("T")
UNNAMED_WORKFLOW = "langgraph"
HistoryUse = Literal["rw", "read", "off"]
HISTORY_USES: tuple[HistoryUse, ...] = ("rw", "read", "off")


@dataclass(frozen=True, slots=True)
class ToolRun:
    """One tool call that is running.

    Attributes:
        stage: path of the tool's own stage: ``tools/tool:search``.
        started_s: on the monotonic clock.
    """

    name: str
    stage: str
    started_s: float


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
        self.tools: dict[UUID, ToolRun] = {}
        self._tasks: dict[tuple[str, str, int | None], dict[str, int]] = {}
        self._num_calls: dict[tuple[str | None, str], int] = {}
        self._lock = threading.Lock()

    @property
    def workflow_id(self) -> str:
        """The name that was set, else the graph's."""
        return self.settings.workflow_id or self.graph_name or UNNAMED_WORKFLOW

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a `create_agent` loop, noted by the middleware form."""

    settings: Settings
    name: str


@dataclass(frozen=True, slots=True)
class StageMark:
    """What `stage()` says of the LLM calls inside it; `None` leaves it to others."""

    name: str | None = None
    block: str | None = None
    speculate: bool | None = None
    max_draft_tokens: int | None = None
    history: HistoryUse | None = None


_NO_MARK = StageMark()

_llm_run: ContextVar[LlmRun | None] = ContextVar("agentspec_llm_run", default=None)
_model_call: ContextVar[ModelCall | None] = ContextVar("agentspec_model_call", default=None)
_tool_call: ContextVar[ToolCall | None] = ContextVar("agentspec_tool_call", default=None)
_stage: ContextVar[StageMark] = ContextVar("agentspec_stage", default=_NO_MARK)
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
        """Note the tool's name for LLM calls made inside the tool, and the time."""
        name = (serialized or {}).get("name") or kwargs.get("name")
        if name:
            task = str((kwargs.get("metadata") or {}).get("langgraph_checkpoint_ns") or "")
            stage = "/".join([*node_path(task), f"tool:{name}"])
            self.scope.tools[run_id] = ToolRun(str(name), stage, time.perf_counter())

    def on_tool_end(self, output: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget the tool and add up its time."""
        self._close_tool(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: UUID, **kwargs: Any) -> None:
        """Forget the tool and add up its time."""
        self._close_tool(run_id)

    def _close_tool(self, run_id: UUID) -> None:
        tool = self.scope.tools.pop(run_id, None)
        if tool is not None:
            add_tool_call(self.scope.settings, self.scope.workflow_id, tool.stage, time.perf_counter() - tool.started_s)


def add_tool_call(settings: Settings, workflow_id: str, stage: str, duration_s: float) -> None:
    """Count a tool call in the middleware's own sums and in the metrics."""
    with fail_open:
        settings.feedback.add_tool_call(workflow_id, stage, duration_s)
        record_tool_call({"workflow_id": workflow_id, "stage": stage}, duration_s)


def node_path(checkpoint_ns: str) -> list[str]:
    """``writer:<task>|1|draft:<task>`` → ``["writer", "draft"]``."""
    return [part.partition(":")[0] for part in checkpoint_ns.split("|") if part and not part.isdigit()]


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


def current_llm_run() -> LlmRun | None:
    """The LangChain model run that is about to call its client here."""
    run = _llm_run.get()
    return run if run is not None and run.is_open else None


def current_model_call() -> ModelCall | None:
    """The model call of the middleware form that is running here."""
    return _model_call.get()


def current_tool_call() -> ToolCall | None:
    """The tool call of the middleware form that is running here."""
    return _tool_call.get()


def current_mark() -> StageMark:
    """What the `stage()` blocks around this place say."""
    return _stage.get()


def stage(
    name: str | None = None,
    *,
    block: str | None = None,
    speculate: bool | None = None,
    max_draft_tokens: int | None = None,
    history: HistoryUse | None = None,
) -> AbstractContextManager[None]:
    """Name the LLM calls made inside the block, or say more of them; without it they carry the path of their node.

    What an inner block leaves out, the outer one says.

    !!! example

        ```python
        def review(state):
            draft = llm.invoke(state["task"])
            with stage("critique", max_draft_tokens=4):
                verdict = llm.invoke(draft.content)
        ```

    Args:
        name: stage path, at most 256 bytes.
        block: block path that the answers start in, such as ``code``, where no marker announces it.
        speculate: False: no drafts for these calls.
        max_draft_tokens: longest draft of a verification step, 0 to 64.
        history: ``read``: these answers are not kept for others; ``off``: nor is the history used.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that is empty, too long or out of bounds; the message holds it.
    """
    said = StageMark(
        None if name is None else check_name("stage", name),
        None if block is None else check_name("block", block),
        speculate,
        max_draft_tokens,
        history,
    )
    _check_mark(said)
    return _marked(said)


def _check_mark(mark: StageMark) -> None:
    if mark.speculate is not None and not isinstance(mark.speculate, bool):
        raise TypeError(f"speculate: expected a bool, got {type(mark.speculate).__name__}: {mark.speculate!r}")
    tokens = mark.max_draft_tokens
    if tokens is not None:
        if not isinstance(tokens, int) or isinstance(tokens, bool):
            raise TypeError(f"max_draft_tokens: expected an int, got {type(tokens).__name__}: {tokens!r}")
        if not 0 <= tokens <= MAX_DRAFT_TOKENS:
            raise ValueError(f"max_draft_tokens: expected 0 to {MAX_DRAFT_TOKENS}, got {tokens}")
    if mark.history is not None and mark.history not in HISTORY_USES:
        raise ValueError(f"history: expected one of {', '.join(HISTORY_USES)}, got {mark.history!r}")


@contextmanager
def _marked(said: StageMark) -> Iterator[None]:
    new = {name: value for name in StageMark.__slots__ if (value := getattr(said, name)) is not None}
    with bound(_stage, replace(_stage.get(), **new)):
        yield


def in_model_call(call: ModelCall | None) -> AbstractContextManager[None]:
    """Note a model call of the middleware form while the block runs."""
    return bound(_model_call, call)


def in_tool_call(call: ToolCall | None) -> AbstractContextManager[None]:
    """Note a tool call of the middleware form while the block runs."""
    return bound(_tool_call, call)


def new_batch_id() -> str:
    """An id for one batch."""
    return uuid4().hex[:12]


@contextmanager
def in_batch(batch_id: str | None = None) -> Iterator[str]:
    """Give the runs started inside the block one batch id: the given one, else the running batch's, else a new one."""
    chosen = batch_id or _batch_id.get() or new_batch_id()
    with bound(_batch_id, chosen):
        yield chosen


@contextmanager
def bound(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable while the block runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
