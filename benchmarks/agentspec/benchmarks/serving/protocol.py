"""What the benchmark and its engine processes say to each other over a pipe."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.benchmarks.serving.tool_time import ToolTime
from agentspec.sidecar.engine import TokenIds


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine process is started with.

    Attributes:
        kind: how it decodes; a key of `engines.ENGINE_KINDS`.
        model: folder in Hugging Face format, or hub id.
        load_format: of vLLM: `auto`, or `dummy` for random weights.
        dtype: of the weights, as vLLM names it.
        is_forced: outputs follow the traces; otherwise the model answers.
        is_decode_only: prompts count as computed already, at their true length.
        max_batch_size: requests that run at once, > 0.
        max_model_len: tokens of prompt and output together.
        kv_cache_bytes: memory for keys and values.
        core: CPU core that the process keeps to once it has started; None: all.
    """

    kind: str
    model: str
    load_format: str
    dtype: str
    is_forced: bool
    is_decode_only: bool
    max_batch_size: int
    max_model_len: int
    kv_cache_bytes: int
    core: int | None


@dataclass(frozen=True, slots=True)
class ServedCall:
    """One recorded call, cut to what the engine is given.

    Attributes:
        call_id: index among the calls of the corpus.
        workflow, node, agent_id, run_id: as in `traces.Call`.
        prompt: its last tokens; int32.
        output: its first tokens; int32, not empty.
        blocks: block of each output token, index into the corpus' names; shape of `output`.
    """

    call_id: int
    workflow: str
    node: str
    agent_id: str
    run_id: str
    prompt: TokenIds
    output: TokenIds
    blocks: NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class ServedRun:
    """Calls that one agent makes one after the other; `is_recorded` as in `replay.Piece`."""

    calls: tuple[ServedCall, ...]
    is_recorded: bool


@dataclass(frozen=True, slots=True)
class CellJob:
    """What an engine is to play.

    Attributes:
        method: as the user names it.
        policy: of AgentSpec's budget; None: the engine's own.
        batch_size: agents at the same time.
        runs: in the order in which they begin.
        past: calls of the past, for histories.
        tool_time: how long an agent waits for its tool.
        num_warm_up_steps: steps before those that count.
        seed: of what is drawn: tool times, and where the first outputs begin.
    """

    method: str
    policy: str | None
    batch_size: int
    runs: tuple[ServedRun, ...]
    past: tuple[ServedCall, ...]
    tool_time: ToolTime
    num_warm_up_steps: int
    seed: int


class Signal(enum.Enum):
    """Requests without content: one step, end the cell, end the process."""

    STEP = enum.auto()
    FINISH = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine has started, or the cell is set up; `facts` say what the engine is."""

    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """What was asked for went wrong; the engine itself may go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepDone:
    """One step has run.

    Attributes:
        num_steps: that count so far.
        is_dry: an agent found no run to play, so the cell has to end.
    """

    num_steps: int
    is_dry: bool


@dataclass(frozen=True, slots=True)
class CellDone:
    """A cell has ended.

    Attributes:
        figures: see `figures.cell_figures`.
        outputs: of the finished calls, by `call_id`; empty where they were forced.
    """

    figures: Mapping[str, Any]
    outputs: Mapping[int, tuple[int, ...]]
