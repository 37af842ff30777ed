"""What a replay can play through: AgentSpec, its ablations and its peers, behind one interface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from agentspec.benchmarks.methods.agentspec import AgentSpec
from agentspec.benchmarks.methods.arctic import Arctic
from agentspec.benchmarks.methods.gpu_suffix import GpuSuffix
from agentspec.benchmarks.methods.interface import Method, Setting
from agentspec.benchmarks.methods.ngram import Ngram
from agentspec.benchmarks.methods.replicas import Replicas, by_group, round_robin
from agentspec.sidecar.budget import POLICIES
from agentspec.sidecar.engine import Parts

METHODS: Mapping[str, Callable[[Setting], Method]] = MappingProxyType(
    {
        "agentspec": AgentSpec,
        **{f"agentspec:{policy}": functools.partial(AgentSpec, policy=policy) for policy in POLICIES},
        "agentspec:no-own": lambda setting: AgentSpec(setting, parts=Parts(own=False)),
        "agentspec:no-block-start": lambda setting: AgentSpec(setting, parts=Parts(block_starts=False)),
        "agentspec:no-calibration": lambda setting: AgentSpec(setting, parts=Parts(calibration=False)),
        "agentspec:no-prior": lambda setting: AgentSpec(setting, parts=Parts(prior=False)),
        "agentspec:no-shared": lambda setting: AgentSpec(setting, has_shared=False),
        "agentspec:no-live": lambda setting: AgentSpec(setting, has_live=False),
        "agentspec:no-wide": lambda setting: AgentSpec(setting, has_wide=False),
        "agentspec:strict": lambda setting: AgentSpec(setting, is_strict=True),
        "replicas:group": lambda setting: Replicas(setting, by_group),
        "replicas:round-robin": lambda setting: Replicas(setting, round_robin),
        "untagged": lambda setting: AgentSpec(setting, is_tagged=False),
        "ngram": lambda _setting: Ngram(),
        "arctic-d24": lambda setting: Arctic(24, setting.num_speculative_tokens),
        "arctic-d64": lambda setting: Arctic(64, setting.num_speculative_tokens),
        "gpu-suffix": lambda setting: GpuSuffix(setting.num_speculative_tokens, setting.curve),
        "gpu-suffix:shadow": lambda setting: GpuSuffix(setting.num_speculative_tokens, setting.curve, has_shadow=True),
    }
)
"""Every method by its name; each call makes a fresh one."""

DEFAULT_METHODS = ("agentspec", "ngram", "arctic-d24", "arctic-d64", "gpu-suffix")
