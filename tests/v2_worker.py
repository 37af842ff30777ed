"""The V2 hook over vLLM's CPU worker, by name for `worker_cls`, so that every rank's process has it."""

from __future__ import annotations

from typing import Any

from tests import v2_cpu  # noqa: F401  # before vLLM
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from agentspec.serving_patch.hook_v2 import LateTrim


class AgentSpecCPURunner(LateTrim, model_runner.CPUModelRunner):
    """vLLM's CPU runner of V2 with late trim."""


class AgentSpecCPUWorker(CPUWorker):
    """vLLM's CPU worker, which looks its runner up by name, with ours."""

    is_agentspec_worker = True

    def init_device(self) -> None:
        stock, model_runner.CPUModelRunner = model_runner.CPUModelRunner, AgentSpecCPURunner
        try:
            super().init_device()
        finally:
            model_runner.CPUModelRunner = stock

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.switch_on()
        return times
