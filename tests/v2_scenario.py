"""What a run of `v2_run.py` is to do, and what it says of it."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

K = 4
"""Longest draft."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its prompt, fields of `SamplingParams`, and tags."""

    prompt: list[int]
    sampling: dict[str, Any]
    extra_args: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """An engine and what it serves.

    Attributes:
        model: folder.
        requests: of each round.
        has_hook: False: plain vLLM.
        is_v1: the V1 runner and its hook instead.
        is_async: how it schedules.
        num_rounds: how often the requests are served; later ones find the text of earlier ones.
        engine: arguments of `LLM`.
        options: of AgentSpec.
        disturbance: `raises`, `late` or `syncs`; see `v2_run.Spy`.
    """

    model: str
    requests: list[Request]
    has_hook: bool = True
    is_v1: bool = False
    is_async: bool = True
    num_rounds: int = 1
    engine: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    disturbance: str = ""


@dataclass(slots=True)
class Outcome:
    """Tokens by round and request, what vLLM counted, and what our side did."""

    tokens: list[list[list[int]]]
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    engine_draft_tokens: int = 0
    engine_tokens: int = 0
    history_tokens: int = 0
    num_open_requests: int = 0
    num_syncs: int = 0
    stages: list[str] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)


def write_scenario(path: Path, scenario: Scenario) -> Path:
    path.write_text(json.dumps(asdict(scenario)))
    return path


def read_scenario(path: str) -> Scenario:
    values = json.loads(Path(path).read_text())
    values["requests"] = [Request(**request) for request in values["requests"]]
    return Scenario(**values)


def mixed_requests(vocab_size: int = 256, **sampling: Any) -> list[Request]:
    """Eight requests: short and long prompts, some that repeat themselves, different lengths."""
    rng = random.Random(1)  # noqa: S311  # no secret
    shapes = [(7, 3), (40, 1), (5, 8), (3, 1), (90, 1), (11, 2), (6, 6), (1, 1)]
    lengths = [24, 40, 60, 9, 33, 50, 20, 64]
    tags = json.dumps({"workflow_id": "wf", "stage": "plan"})
    return [
        Request(
            prompt=[rng.randrange(2, vocab_size) for _ in range(size)] * repeats,
            sampling={"max_tokens": length, "temperature": 0, "ignore_eos": True, **sampling},
            extra_args={"agentspec": tags},
        )
        for (size, repeats), length in zip(shapes, lengths, strict=True)
    ]


def write_tiny_llama(folder: Path, tokenizer_json: Path, vocab_size: int) -> Path:
    """A Llama of two layers whose random weights make it write something else after each prompt."""
    import torch  # noqa: PLC0415  # slow
    from safetensors.torch import save_file  # noqa: PLC0415

    from agentspec.benchmarks.serving.random_model import write_random_model  # noqa: PLC0415

    hidden, inner, heads, layers = 64, 128, 2, 2
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "max_position_embeddings": 512,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    write_random_model(folder, tokenizer_json, shape)
    torch.manual_seed(0)
    sizes = {"model.embed_tokens": (vocab_size, hidden), "lm_head": (vocab_size, hidden)}
    for layer in range(layers):
        name = f"model.layers.{layer}"
        sizes |= {f"{name}.self_attn.{part}_proj": (hidden, hidden) for part in "qkvo"}
        sizes |= {f"{name}.mlp.{part}_proj": (inner, hidden) for part in ("gate", "up")}
        sizes |= {f"{name}.mlp.down_proj": (hidden, inner)}
    weights = {f"{name}.weight": torch.randn(size) * 0.2 for name, size in sizes.items()}
    blocks = [
        f"model.layers.{layer}.{name}_layernorm" for layer in range(layers) for name in ("input", "post_attention")
    ]
    norms = ["model.norm", *blocks]
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder
