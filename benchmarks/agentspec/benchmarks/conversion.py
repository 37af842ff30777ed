"""A llama model in a GGUF file becomes a folder in Hugging Face format, float32, without torch and without a hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Progress = Callable[[str, float | None], None]
"""Called with what is being done and the share of it that is done, in [0, 1]; None where that is unknown."""

WEIGHTS_FILE = "model.safetensors"
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLOBAL_WEIGHTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL_TOKEN = 3


class ConversionError(ValueError):
    """The GGUF file is not a llama model with tied embeddings and a byte-level BPE vocabulary."""


def convert_gguf(source: Path, folder: Path, on_progress: Progress) -> None:
    """Write weights, tokenizer, chat template, `config.json` and `generation_config.json` into a folder.

    Args:
        source: GGUF file; quantised weights are expanded to float32.
        folder: exists already; files of the same names are replaced.
        on_progress: see `Progress`.

    Raises:
        ConversionError: the architecture or the vocabulary is one that we do not convert.
        OSError: the disk is full or the folder cannot be written.
    """
    from gguf import GGUFReader  # noqa: PLC0415 - two seconds of import that a cached model never needs

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise ConversionError(
            "expected a llama model with a gpt2 vocabulary, got "
            f"{fields.get('general.architecture')!r} with {fields.get('tokenizer.ggml.model')!r}"
        )
    weights = _read_weights(reader, fields, on_progress)
    on_progress("writing the weights", None)
    _write_weights(weights, folder)
    _write_json(folder / "config.json", _model_config(fields, num_tokens=len(fields["tokenizer.ggml.tokens"])))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_tokenizer(fields, folder)


def _read_weights(reader: Any, fields: Mapping[str, Any], on_progress: Progress) -> dict[str, NDArray[np.float32]]:
    from gguf.quants import dequantize  # noqa: PLC0415 - see convert_gguf

    num_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, NDArray[np.float32]] = {}
    for index, tensor in enumerate(reader.tensors):
        on_progress("converting the weights", index / len(reader.tensors))
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if kind in num_heads:
            weight = _undo_rope_permutation(weight, num_heads[kind])
        weights[_weight_name(tensor.name)] = np.ascontiguousarray(weight)
    return weights


def _weight_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk" and parts[2] in _LAYER_WEIGHTS:
        return f"model.layers.{parts[1]}.{_LAYER_WEIGHTS[parts[2]]}.{parts[3]}"
    if parts[0] in _GLOBAL_WEIGHTS:
        return f"{_GLOBAL_WEIGHTS[parts[0]]}.{parts[1]}"
    raise ConversionError(f"unexpected weight {name!r}; expected a llama model with tied embeddings")


def _undo_rope_permutation(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """GGUF interleaves the two halves of each head's rotary dimensions; Hugging Face keeps them apart."""
    num_rows, num_columns = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def _write_weights(weights: dict[str, NDArray[np.float32]], folder: Path) -> None:
    from safetensors.numpy import save_file  # noqa: PLC0415 - see convert_gguf

    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _model_config(fields: Mapping[str, Any], *, num_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF holds both as float32; the digits past its precision are noise.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(f"{fields['llama.rope.freq_base']:.6g}"),
        "vocab_size": num_tokens,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "do_sample": False,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415 - see convert_gguf

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "add_prefix_space": False,
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
