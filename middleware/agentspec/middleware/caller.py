"""Who makes an LLM call here and now, read from the run scope and LangGraph's own metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from agentspec.middleware.scope import (
    UNNAMED_WORKFLOW,
    LlmRun,
    ModelCall,
    RunScope,
    StageMark,
    ToolCall,
    current_batch_id,
    current_llm_run,
    current_mark,
    current_model_call,
    current_tool_call,
    node_path,
    scope_of,
)
from agentspec.middleware.settings import Settings, for_stage
from agentspec.middleware.tags import FLAT_PREFIX, CallerTags


@dataclass(frozen=True, slots=True)
class Caller:
    """The graph run, model call, tool call or several of them that the current context belongs to."""

    settings: Settings
    config: Mapping[str, Any]
    scope: RunScope | None
    llm_run: LlmRun | None
    model_call: ModelCall | None
    tool_call: ToolCall | None
    mark: StageMark

    def tags(self) -> CallerTags:
        """Derive the caller's tags, and count the call. To be asked once per LLM call."""
        configurable = self.config.get("configurable") or {}
        # A call with its own `metadata` loses LangGraph's in the ambient config, not in the callbacks.
        metadata = (self.llm_run.metadata if self.llm_run else None) or self.config.get("metadata") or {}
        task = metadata.get("langgraph_checkpoint_ns") or configurable.get("checkpoint_ns") or ""
        instance = task.rpartition("|")[0]
        path = node_path(task)
        chosen = self.mark.name or metadata.get(FLAT_PREFIX + "stage")
        stage = str(chosen or "/".join([*path, *self._suffixes(metadata)]))
        branch = _send_index(metadata.get("langgraph_path"))
        iteration, visit, call_index = self._position(instance, stage, branch, task)
        workflow_id = self.scope.workflow_id if self.scope else self.settings.workflow_id or UNNAMED_WORKFLOW
        shown = self.settings.shown_id
        return CallerTags(
            workflow_id=workflow_id,
            stage=stage,
            agent_id=self._agent_id(metadata, path) or "/".join([workflow_id, *node_path(instance)]),
            query_id=shown(_text(metadata.get("query_id") or configurable.get("query_id") or self._query_id())),
            thread_id=shown(_text(configurable.get("thread_id") or (self.scope.thread_id if self.scope else None))),
            batch_id=shown((self.scope.batch_id if self.scope else None) or current_batch_id()),
            call_id=_text(self.llm_run.run_id) if self.llm_run else None,
            task_id=task.rpartition(":")[2],
            iteration=iteration,
            visit=visit,
            call_index=call_index,
            branch=branch,
            prompt_version=for_stage(self.settings.prompt_versions, stage),
            grammar=for_stage(self.settings.grammars, stage),
            block=self.mark.block,
            speculate=self.mark.speculate,
            max_draft_tokens=self.mark.max_draft_tokens,
            history=self.mark.history,
        )

    def _suffixes(self, metadata: Mapping[str, Any]) -> Iterator[str]:
        parent = getattr(self.config.get("callbacks"), "parent_run_id", None)
        if tool := (self.scope.tools.get(parent) if self.scope and parent else None) or self.tool_call:
            yield f"tool:{tool.name}"
        if source := metadata.get("lc_source"):  # a built-in middleware's own call, such as a summary
            yield f"@{source}"

    def _position(
        self, instance: str, name: str, branch: int | None, task: str
    ) -> tuple[int | None, int | None, int | None]:
        if self.scope:
            return self.scope.count_call(instance, name, branch, task)
        return self.model_call.iteration if self.model_call else None, None, None

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
    """Who would make an LLM call here and now; None outside wrapped graphs and tagged model or tool calls."""
    config: Mapping[str, Any] = var_child_runnable_config.get() or {}
    llm_run = current_llm_run()
    scope = llm_run.scope if llm_run else scope_of(config)
    model_call, tool_call = current_model_call(), current_tool_call()
    noted = scope or model_call or tool_call
    if noted is None:
        return None
    return Caller(noted.settings, config, scope, llm_run if scope else None, model_call, tool_call, current_mark())


def _send_index(langgraph_path: object) -> int | None:
    match langgraph_path:
        case ["__pregel_push", int(index), *_]:
            return index
    return None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
