"""The hook for vLLM's Model Runner V2: drafts are asked for after sampling and cut in when the next step begins.

The scheduler schedules K placeholders for each row, as for any asynchronous drafter. The worker asks when a step's
tokens are sampled, on a side stream and a thread of its own, collects the answer at the start of the next step and cuts
that step to the drafts that there are ("late trim"); the scheduler books what was cut as rejected, as it does for
adaptive verification. So asynchronous scheduling, CUDA graphs and every attention backend stay as they are.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import vllm.v1.worker.gpu.model_runner as runner_module
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.async_utils import async_copy_to_np, stream
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
from vllm.v1.worker.gpu_worker import Worker

from agentspec.sidecar.engine import FinishReason

from .batch_follower import AskedStep, BatchFollower, NewRequest, SampledStep
from .drafting import Drafting
from .mailbox import Fallbacks
from .scheduler_v2 import WorkerNews, fail_open

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")


_Base: Any = object  # of the mixins, whose attributes are those of what they are mixed over


class AskingSpeculator(BaseSpeculator):
    """What vLLM asks for drafts once a step is sampled: asks in turn, and answers with what stands there anyway.

    Args:
        vllm_config, device: of vLLM's contract.
        request_states: of the runner.
    """

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: Any, request_states: Any) -> None:
        del vllm_config, device
        self._draft_tokens = request_states.draft_tokens
        self.runner: LateTrim | None = None

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Nothing is captured."""

    def capture(self) -> None:
        """Nothing is captured."""

    def propose(self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        """Never waits for the device."""
        if dummy_run or self.runner is None:
            return self._draft_tokens[: input_batch.num_reqs]
        self.runner.ask(input_batch)
        return self._draft_tokens[input_batch.idx_mapping]


class _StepClock:
    """How long the device computed a step: by its events on a GPU, by the wall on a CPU, where nothing runs ahead."""

    def __init__(self, *, is_cpu: bool) -> None:
        self._is_cpu = is_cpu
        self._started: Any = None

    def start(self) -> None:
        self._started = self._now()

    def stop(self) -> Any:
        """A function that tells the milliseconds once the device is done; None: the clock was not started."""
        started, self._started = self._started, None
        ended = self._now()

        def elapsed_ms() -> float | None:
            if started is None:
                return None
            return (ended - started) * 1e3 if self._is_cpu else float(started.elapsed_time(ended))

        return elapsed_ms

    def _now(self) -> Any:
        if self._is_cpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class LateTrim(_Base):
    """Mixin over a model runner of vLLM's V2: asks, collects and trims. Other than rank 0 only hears of the drafts."""

    def __init__(self, vllm_config: Any, device: Any) -> None:
        stock = runner_module.init_speculator
        runner_module.init_speculator = AskingSpeculator
        try:
            super().__init__(vllm_config, device)
        finally:
            runner_module.init_speculator = stock
        self.speculator.runner = self
        self._is_on = False
        self._ranks = get_tp_group()
        self._asked: AskedStep | None = None
        self._has_asked = False  # on every rank
        self._drafts: dict[str, list[int]] = {}
        self._trimmed: dict[str, list[int]] = {}  # drafts of the running step, by request
        self._num_scheduled: dict[str, int] = {}  # placeholders of the running step
        self._num_prefill_tokens = 0
        self._sampled: tuple[Any, Any] | None = None
        self._clock = _StepClock(is_cpu=vllm_config.device_config.device_type == "cpu")
        self._drafting: Drafting | None = None
        self._follower: BatchFollower | None = None
        self._fallbacks = Fallbacks()

    def switch_on(self) -> None:
        """Begin to draft; until then, while vLLM warms up with requests of its own, everything passes through."""
        if self._ranks.rank_in_group == 0:
            self._drafting = Drafting(self.vllm_config, self.num_speculative_steps)
            self._fallbacks = self._drafting.fallbacks
            self._follower = BatchFollower(self._drafting, self.scheduler_config.max_num_batched_tokens)
            self._drafting.log_start("v2")
        self._is_on = True

    # --- requests come and go ---

    def add_requests(self, scheduler_output: Any) -> None:
        """Follow requests that start or go on."""
        super().add_requests(scheduler_output)
        if self._follower is None:
            return
        with fail_open(self._fallbacks):
            news = getattr(scheduler_output, "agentspec_news", None) or WorkerNews()
            for new in scheduler_output.scheduled_new_reqs:
                if new.sampling_params is not None and new.req_id not in news.sessions:
                    self._follower.open(self._read_request(new, news))

    def _read_request(self, new: Any, news: WorkerNews) -> NewRequest:
        return NewRequest(
            request_id=new.req_id,
            prompt_token_ids=new.prompt_token_ids,
            prompt_is_token_ids=new.prompt_is_token_ids,
            output=(new.prefill_token_ids or [])[new.prompt_len :],
            sampling_params=new.sampling_params,
            cache_salt=news.salts.get(new.req_id),
            lora_request=new.lora_request,
            max_length=self.max_model_len,
            traceparent=news.traceparents.get(new.req_id, ""),
        )

    def finish_requests(self, scheduler_output: Any) -> None:
        """Close requests that ended, at the length that their clients got."""
        super().finish_requests(scheduler_output)
        if self._follower is None:
            return
        with fail_open(self._fallbacks):
            news = getattr(scheduler_output, "agentspec_news", None) or WorkerNews()
            for request_id in scheduler_output.finished_req_ids:
                reason, length = news.ended.get(request_id, (FinishReason.ABORT, None))
                self._follower.close(request_id, reason, length)

    # --- ask ---

    def postprocess_sampled(
        self, idx_mapping: Any, sampled_tokens: Any, num_sampled: Any, num_rejected: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Note the sampled tokens, which `propose` is not given."""
        self._sampled = sampled_tokens, num_sampled
        super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, num_rejected, *args, **kwargs)

    def ask(self, input_batch: Any) -> None:
        """Copy what was sampled to the host on the side stream, and let the follower's thread wait for it."""
        self._has_asked = self._is_on
        if self._follower is None or self._sampled is None:
            return
        with fail_open(self._fallbacks):
            tokens, num_sampled = self._sampled
            event = torch.cuda.Event(blocking=True)
            timing = self._clock.stop()
            with stream(self.output_copy_stream, self.main_stream):
                self.output_copy_stream.wait_stream(self.main_stream)
                tokens_np, num_sampled_np = async_copy_to_np(tokens), async_copy_to_np(num_sampled)
                event.record(self.output_copy_stream)
                for each in (tokens, num_sampled):
                    each.record_stream(self.output_copy_stream)
            step = SampledStep(
                request_ids=list(input_batch.req_ids),
                tokens=tokens_np,
                num_sampled=num_sampled_np,
                num_draft_tokens={request_id: len(draft) for request_id, draft in self._trimmed.items()},
                num_prefill_tokens=self._num_prefill_tokens,
                timing=timing,
            )
            self._asked = self._follower.ask(step, event.synchronize)

    def _collect(self) -> None:
        """Wait for the drafts of the last step; every rank does so at the same places."""
        if not self._has_asked:
            return
        self._has_asked = False
        drafts: dict[str, list[int]] = {}
        asked, self._asked = self._asked, None
        if self._follower is not None and asked is not None:
            drafts = self._follower.collect(asked)
        if self._ranks.world_size > 1:
            drafts = self._ranks.broadcast_object(drafts if self._follower is not None else None, src=0)
        self._drafts = drafts

    # --- use ---

    def take_draft_token_ids(self) -> Any:
        """The drafts, where the scheduler waits for them: synchronous scheduling, structured output."""
        if not self._is_on:
            return super().take_draft_token_ids()
        self._collect()
        return DraftTokenIds([*self._drafts], [*self._drafts.values()])

    def execute_model(self, scheduler_output: Any, *args: Any, dummy_run: bool = False, **kwargs: Any) -> Any:
        """Cut the step to the drafts that there are."""
        if self._is_on and not dummy_run:
            self._collect()
            scheduler_output = self._trim(scheduler_output)
            self._clock.start()
        return super().execute_model(scheduler_output, *args, dummy_run=dummy_run, **kwargs)

    def _trim(self, scheduler_output: Any) -> Any:
        scheduled: Mapping[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        started = {new.req_id for new in scheduler_output.scheduled_new_reqs}
        self._num_scheduled = {request_id: len(tokens) for request_id, tokens in scheduled.items()}
        self._trimmed = {
            request_id: [] if request_id in started else self._drafts.get(request_id, [])[: len(tokens)]
            for request_id, tokens in scheduled.items()
        }
        self._drafts = {}
        num_rows = len(scheduler_output.num_scheduled_tokens)
        num_placeholders = sum(self._num_scheduled.values())
        self._num_prefill_tokens = scheduler_output.total_num_scheduled_tokens - num_placeholders - num_rows
        if not scheduled:
            return scheduler_output
        cut = {request_id: len(tokens) - len(self._trimmed[request_id]) for request_id, tokens in scheduled.items()}
        trimmed = copy.copy(scheduler_output)
        trimmed.scheduled_spec_decode_tokens = {name: draft for name, draft in self._trimmed.items() if draft}
        trimmed.num_scheduled_tokens = {
            request_id: count - cut.get(request_id, 0)
            for request_id, count in scheduler_output.num_scheduled_tokens.items()
        }
        trimmed.total_num_scheduled_tokens = scheduler_output.total_num_scheduled_tokens - sum(cut.values())
        return trimmed

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Put the draft tokens where vLLM reads them."""
        rows = {
            self.req_states.req_id_to_index[request_id]: draft for request_id, draft in self._trimmed.items() if draft
        }
        if self._is_on and rows:
            values = np.zeros((len(rows), self.num_speculative_steps), np.int64)
            for number, draft in enumerate(rows.values()):
                values[number, : len(draft)] = draft
            places = async_tensor_h2d(np.array([*rows], np.int64), device=self.device)
            self.req_states.draft_tokens[places] = async_tensor_h2d(values, device=self.device)
        input_batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if self._is_on and self._num_scheduled and scheduler_output.has_structured_output_requests:
            # vLLM 0.32 lays the grammar's bitmask out as the scheduler had planned the step.
            input_batch.num_draft_tokens_per_req = np.array(
                [self._num_scheduled.get(request_id, 0) for request_id in input_batch.req_ids], np.int32
            )
        return input_batch

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Tell the scheduler how many drafts were verified."""
        verified = {request_id: len(draft) for request_id, draft in self._trimmed.items()}
        output = super().sample_tokens(grammar_output)
        if self._is_on and verified and output is not None:
            getattr(output, "model_runner_output", output).agentspec_num_verified = verified
        return output

    # --- CUDA graphs ---

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Capture full graphs for rows of any length, where the attention backend can replay them."""
        stock = runner_module.ModelCudaGraphManager

        def make(*manager_args: Any, **manager_kwargs: Any) -> Any:
            obstacle = get_varlen_cudagraph_unsupported_backend(
                self.attn_groups, self.vllm_config, self.num_speculative_steps + 1
            )
            if obstacle is None:
                manager_kwargs["varlen_decode"] = True
            else:
                logger.info(
                    "agentspec: attention backend %s replays full CUDA graphs for rows of one length only; steps with "
                    "drafts of different lengths take piecewise graphs",
                    obstacle[0],
                )
            return stock(*manager_args, **manager_kwargs)

        runner_module.ModelCudaGraphManager = make
        try:
            super().initialize_kv_cache(*args, **kwargs)
        finally:
            runner_module.ModelCudaGraphManager = stock

    def shutdown(self) -> None:
        """End our threads before vLLM's own parts."""
        with fail_open(self._fallbacks):
            if self._follower is not None:
                self._follower.shutdown()
            if self._drafting is not None:
                self._drafting.shutdown()
        super().shutdown()


class AgentSpecRunner(LateTrim, runner_module.GPUModelRunner):
    """vLLM's GPU runner with late trim."""


class AgentSpecWorker(Worker):
    """vLLM's GPU worker with our runner; drafts begin when vLLM has warmed up."""

    is_agentspec_worker = True

    def _make_model_runner(self) -> Any:
        return AgentSpecRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up without drafts."""
        times = super().compile_or_warm_up_model()
        self.model_runner.switch_on()
        return times
