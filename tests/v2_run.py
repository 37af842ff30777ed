"""One engine of Model Runner V2 on a CPU, in a process of its own: reads a scenario, plays it, prints what happened."""

from __future__ import annotations

from tests import v2_cpu  # isort: skip  # before vLLM

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from tests.v2_scenario import K, Outcome, Scenario, read_scenario

from agentspec.serving_patch.compat import PROPOSER_CLS, SCHEDULER_CLS
from agentspec.serving_patch.compat_v2 import V2_SCHEDULERS


def main() -> None:
    scenario = read_scenario(sys.argv[1])
    if scenario.is_v1:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    else:
        v2_cpu.force_async(is_async=scenario.is_async)
        v2_cpu.mend_kernels()
    print(json.dumps(asdict(play(scenario))))  # noqa: T201  # what the test reads


def hook_v1() -> dict[str, Any]:
    speculative = {"method": "custom_class", "model": PROPOSER_CLS, "num_speculative_tokens": K}
    return {"scheduler_cls": SCHEDULER_CLS, "speculative_config": speculative}


def hook_v2(*, is_async: bool) -> dict[str, Any]:
    speculative = {"method": "ngram_gpu", "prompt_lookup_min": 1, "prompt_lookup_max": 1, "num_speculative_tokens": K}
    worker = "tests.v2_worker.AgentSpecCPUWorker"
    return {"worker_cls": worker, "scheduler_cls": V2_SCHEDULERS[is_async], "speculative_config": speculative}


def make_engine(scenario: Scenario) -> Any:
    from vllm import LLM  # noqa: PLC0415  # after the environment

    options: dict[str, Any] = {}
    if scenario.has_hook:
        options = hook_v1() if scenario.is_v1 else hook_v2(is_async=scenario.is_async)
        ours = {"metrics_port": 0, "deadline_ms": 5000, **scenario.options}
        options["additional_config"] = {"agentspec": ours}
    return LLM(
        model=scenario.model,
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        block_size=32,
        **{"max_num_seqs": 4, "max_num_batched_tokens": 1024, **scenario.engine},
        **options,
    )


class Spy:
    """What a runner of one rank shows, and what is done to its client."""

    drafting: Any

    def __init__(self, llm: Any) -> None:
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        self.drafting = self.runner._drafting
        self.num_syncs = 0

    def disturb(self, kind: str) -> None:
        """Make the client fail or come late, or every wait for the device inside `propose` an error."""
        if kind == "syncs":
            self._forbid_syncs()
        client = getattr(self.drafting.client, "_client", None)
        if client is None or kind not in {"raises", "late"}:
            return
        stock, count = client.submit, iter(range(1 << 30))

        def submit(step: Any) -> None:
            stock(step)
            if kind == "late":
                time.sleep(0.2)
            elif next(count) % 3 == 0:
                raise RuntimeError("boom")

        client.submit = submit

    def _forbid_syncs(self) -> None:
        """Count every wait of this thread for the device inside `propose`."""
        import torch  # noqa: PLC0415

        propose = self.runner.speculator.propose
        ours = threading.get_ident()
        is_inside = False

        def counting(stock: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.num_syncs += is_inside and threading.get_ident() == ours
                return stock(*args, **kwargs)

            return call

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            is_inside = True
            try:
                return propose(*args, **kwargs)
            finally:
                is_inside = False

        class Event(torch.cuda.Event):
            synchronize: Any

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.synchronize = counting(self.synchronize)

        for name in ("item", "cpu", "tolist"):
            setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
        torch.accelerator.synchronize = counting(torch.accelerator.synchronize)
        torch.cuda.synchronize = counting(torch.cuda.synchronize)
        torch.cuda.Event = Event
        self.runner.speculator.propose = watched


def play(scenario: Scenario) -> Outcome:
    from vllm import SamplingParams  # noqa: PLC0415  # after the environment

    llm = make_engine(scenario)
    has_workers = scenario.engine.get("tensor_parallel_size", 1) > 1
    spy = None if has_workers or not scenario.has_hook or scenario.is_v1 else Spy(llm)
    params = [
        SamplingParams(detokenize=False, extra_args=request.extra_args, **constrained(request.sampling))
        for request in scenario.requests
    ]
    prompts = [{"prompt_token_ids": request.prompt} for request in scenario.requests]
    rounds: list[list[list[int]]] = []
    for _ in range(scenario.num_rounds):
        if spy is not None and scenario.disturbance:
            spy.disturb(scenario.disturbance)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rounds.append([list(output.outputs[0].token_ids) for output in outputs])
    for _ in range(4):  # a server's loop does so: the worker hears of the last ends
        llm.llm_engine.engine_core.get_output()
    outcome = Outcome(tokens=rounds)
    for name, value in vllm_counters(llm).items():
        setattr(outcome, name, value)
    if spy is not None:
        read_engine(outcome, spy)
    llm.llm_engine.engine_core.shutdown()
    return outcome


def constrained(sampling: dict[str, Any]) -> dict[str, Any]:
    """The fields with their grammar as vLLM wants it."""
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415  # after the environment

    grammar = sampling.get("structured_outputs")
    return sampling if grammar is None else {**sampling, "structured_outputs": StructuredOutputsParams(**grammar)}


def vllm_counters(llm: Any) -> dict[str, int]:
    """What vLLM itself counted."""
    names = {
        "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
        "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
        "vllm:num_preemptions": "num_preemptions",
    }
    return {names[metric.name]: int(metric.value) for metric in llm.get_metrics() if metric.name in names}


def read_engine(outcome: Outcome, spy: Spy) -> None:
    """What our side counted; waits for the threads, which have nothing to do any more."""
    spy.runner._follower.shutdown()
    drafting = spy.drafting
    deadline = time.monotonic() + 5
    engine = drafting._engine
    while engine is not None and engine.num_open_requests() and time.monotonic() < deadline:
        time.sleep(0.01)
    if engine is not None:
        rows = engine.stats()
        outcome.engine_draft_tokens = sum(row.num_draft_tokens for row in rows)
        outcome.engine_tokens = sum(row.num_tokens for row in rows)
        outcome.stages = sorted({row.stage for row in rows})
        outcome.history_tokens = engine.num_history_tokens()
        outcome.num_open_requests = engine.num_open_requests()
    outcome.fallbacks = drafting.fallbacks.counts()
    outcome.num_syncs = spy.num_syncs


if __name__ == "__main__":
    main()
