"""A model without weights: its shape and a tokenizer, for runs whose outputs are forced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

QWEN_05B: Mapping[str, Any] = MappingProxyType(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    }
)
"""Qwen2.5-0.5B."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_random_model(folder: Path, tokenizer_json: Path, shape: Mapping[str, Any] = QWEN_05B) -> Path:
    """Write a model folder without weights; vLLM loads it with `load_format="dummy"`.

    Args:
        folder: made if it is not there.
        tokenizer_json: in the format of Hugging Face's tokenizers library.
        shape: entries of `config.json`.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(shape), indent=1))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1))
    shutil.copyfile(tokenizer_json, folder / "tokenizer.json")
    return folder


def has_weights(folder: Path) -> bool:
    """Whether a model folder holds weights that vLLM can load."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"))


def kv_bytes_per_token(config: Mapping[str, Any], element_bytes: int) -> int:
    """Memory of keys and values of one token."""
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * kv_heads * head_size * element_bytes
