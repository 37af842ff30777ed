"""One engine in a process of its own: `python -m agentspec.benchmarks.serving.worker FD`.

It steps when it is told to, so that several engines share a core and a clock fairly.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from agentspec.benchmarks.serving.engines import call_tags, llm_arguments, make_drafter
from agentspec.benchmarks.serving.figures import cell_figures
from agentspec.benchmarks.serving.forcing import FORCED_KEY, force_outputs
from agentspec.benchmarks.serving.player import CellPlayer, Step
from agentspec.benchmarks.serving.protocol import (
    CellDone,
    CellJob,
    EngineSettings,
    Failed,
    Ready,
    ServedCall,
    Signal,
    StepDone,
)
from agentspec.serving_patch.compat import skip_rejection_without_drafts
from agentspec.sidecar.engine import TokenIds

logger = logging.getLogger("vllm.agentspec.bench")

_MAX_DRAIN_STEPS = 8


class VllmEngine:
    """vLLM in this process, stepped by hand.

    Args:
        settings: see `EngineSettings`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        import torch  # noqa: PLC0415  # after the environment is set, and only in this process
        from vllm import LLM  # noqa: PLC0415

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        self._settings = settings
        self._llm = LLM(**llm_arguments(settings)).llm_engine
        core = self._llm.engine_core.engine_core
        self._scheduler = core.scheduler
        runner = core.model_executor.driver_worker.worker.model_runner
        self.device = str(self._llm.vllm_config.device_config.device_type)
        skip_rejection_without_drafts()  # as our hook does; for every method, so that all have the same sampler
        if settings.is_forced:
            force_outputs(runner)
        self.drafter = make_drafter(settings.kind, core.scheduler, runner)
        self.salt: str | None = None
        self._num_seen: dict[str, int] = {}
        self._record: dict[str, Any] = {}
        self._watch_steps()
        if settings.core is not None:
            os.sched_setaffinity(0, {settings.core})

    def facts(self) -> dict[str, Any]:
        """What the results' conditions name."""
        import vllm  # noqa: PLC0415  # see above

        config = self._llm.vllm_config
        return {"vllm": vllm.__version__, "device": self.device, "dtype": str(config.model_config.dtype)}

    def step_s(self, step: Step) -> float:
        """CPU time on a CPU, where neighbours distort the wall clock; wall time on a GPU."""
        return step.cpu_s if self.device == "cpu" else step.wall_s

    def submit(
        self, request_id: str, call: ServedCall, prompt: TokenIds, output: TokenIds, *, is_recorded: bool
    ) -> None:
        """See `player.Engine`."""
        from vllm import SamplingParams  # noqa: PLC0415  # see above

        extra: dict[str, Any] = dict(call_tags(call, is_recorded=is_recorded))
        if self._settings.is_forced:
            extra[FORCED_KEY] = output.tolist()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(output),
            ignore_eos=self._settings.is_forced,
            detokenize=False,
            extra_args=extra,
        )
        request: dict[str, Any] = {"prompt_token_ids": prompt.tolist()}
        if self.salt is not None:
            request["cache_salt"] = self.salt
        self._num_seen[request_id] = 0
        self._llm.add_request(request_id, request, params)

    def step(self) -> Step:
        """See `player.Engine`."""
        self._record = {"rows": (), "drafts": {}, "accepted": {}, "prefill": 0}
        cpu, wall = time.process_time(), time.perf_counter()
        outputs = self._llm.step()
        cpu_s, wall_s = time.process_time() - cpu, time.perf_counter() - wall
        token_ids, finished = {}, set()
        for output in outputs:
            name = output.request_id
            tokens = list(output.outputs[0].token_ids)
            token_ids[name] = tokens[self._num_seen[name] :]
            self._num_seen[name] = len(tokens)
            if output.finished:
                finished.add(name)
                del self._num_seen[name]
        record = self._record
        return Step(
            record["rows"], record["drafts"], record["accepted"], record["prefill"],
            token_ids, frozenset(finished), cpu_s, wall_s,
        )  # fmt: skip

    def abort(self, request_ids: list[str]) -> None:
        """See `player.Engine`."""
        self._llm.abort_request(request_ids)
        for _ in range(_MAX_DRAIN_STEPS):
            if not self._llm.has_unfinished_requests():
                break
            self._llm.step()
        self._num_seen.clear()

    def reset(self) -> None:
        """End whatever runs."""
        self.abort(list(self._num_seen))

    def shutdown(self) -> None:
        """Stop vLLM's own threads."""
        self._llm.engine_core.shutdown()

    def _watch_steps(self) -> None:
        """Note what each step schedules and verifies, where vLLM's scheduler learns of it."""
        stock = self._scheduler.update_from_output

        def update_from_output(scheduler_output: Any, model_runner_output: Any) -> Any:
            self._note(scheduler_output, model_runner_output)
            return stock(scheduler_output, model_runner_output)

        self._scheduler.update_from_output = update_from_output

    def _note(self, scheduler_output: Any, model_runner_output: Any) -> None:
        sampled = model_runner_output.sampled_token_ids
        scheduled = scheduler_output.num_scheduled_tokens
        requests = self._scheduler.requests
        names = {request_id: self._own_name(request_id) for request_id in scheduled}
        drafts, accepted = {}, {}
        for request_id, draft in scheduler_output.scheduled_spec_decode_tokens.items():
            tokens = sampled[model_runner_output.req_id_to_index[request_id]] if sampled else []
            if draft and len(tokens):
                drafts[names[request_id]] = len(draft)
                accepted[names[request_id]] = len(tokens) - 1
        prefill = 0
        if not self._settings.is_decode_only:
            prefill = sum(n for request_id, n in scheduled.items() if not requests[request_id].num_output_tokens)
        self._record = {"rows": tuple(names.values()), "drafts": drafts, "accepted": accepted, "prefill": prefill}

    def _own_name(self, request_id: str) -> str:
        """Our name of a request: vLLM's is ours with a random ending."""
        return request_id if request_id in self._num_seen else request_id.rpartition("-")[0]


class Worker:
    """Answers the benchmark's messages until it is told to stop."""

    def __init__(self, connection: Connection, engine: VllmEngine, settings: EngineSettings) -> None:
        self._connection = connection
        self._engine = engine
        self._settings = settings
        self._player: CellPlayer | None = None

    def serve(self) -> None:
        """Answer one message after the other; what goes wrong in a cell is answered, too."""
        while (message := self._connection.recv()) is not Signal.STOP:
            answer: Ready | StepDone | CellDone | Failed
            try:
                answer = self._answer(message)
            except Exception as error:  # the benchmark marks the cell as failed and goes on
                logger.exception("the cell failed")
                self._player = None
                self._engine.reset()
                answer = Failed(f"{type(error).__name__}: {error}")
            self._connection.send(answer)

    def _answer(self, message: CellJob | Signal) -> Ready | StepDone | CellDone:
        if isinstance(message, CellJob):
            if self._player is not None:
                self._player.finish()
            self._engine.salt = self._engine.drafter.start_cell(message.past, message.policy)
            is_forced = self._settings.is_forced
            self._player = CellPlayer(self._engine, message, is_forced=is_forced, step_s=self._engine.step_s)
            return Ready({})
        if self._player is None:
            raise RuntimeError("no cell is set up")
        if message is Signal.STEP:
            self._player.step()
            return StepDone(len(self._player.log.steps), self._player.is_dry)
        player, self._player = self._player, None
        log = player.finish()
        figures = cell_figures(log, step_s=self._engine.step_s, is_decode_only=self._settings.is_decode_only)
        return CellDone({**figures, "block_counts": log.blocks, **self._engine.drafter.facts()}, log.outputs)


def main(descriptor: int) -> None:
    """Serve one benchmark over a socket that is already open."""
    connection = Connection(descriptor)
    settings: EngineSettings = connection.recv()
    try:
        engine = VllmEngine(settings)
    except Exception as error:
        connection.send(Failed(f"{type(error).__name__}: {error}"))
        raise
    connection.send(Ready(engine.facts()))
    try:
        Worker(connection, engine, settings).serve()
    except EOFError:
        logger.warning("the benchmark is gone")
    engine.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
