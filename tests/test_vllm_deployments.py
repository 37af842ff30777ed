"""Real vLLM servers and batch runs as operators deploy them: ranks, adapters, files; plain decoding beside ours."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.vllm_lab import prompts

from agentspec.benchmarks.counters import read_samples
from agentspec.benchmarks.server import SERVED_NAME, Decoding, ServerOptions, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MAX_TOKENS = 24
NUM_ROUNDS = 3
TAGS = json.dumps({"workflow_id": "w", "stage": "s"})
# A model of random weights whose attention heads can be halved.
EVEN_HEADS = json.dumps({"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2})
TENSOR_PARALLEL = ("--tensor-parallel-size", "2", "--load-format", "dummy", "--hf-overrides", EVEN_HEADS)
DATA_PARALLEL = ("--data-parallel-size", "2")


@contextmanager
def served(decoding: Decoding, model: str, folder: Path, flags: Sequence[str]) -> Iterator[VllmServer]:
    options = ServerOptions(model, folder, 8, 8, max_model_len=256, vllm_flags=tuple(flags))
    with VllmServer(decoding, options) as server:
        server.start()
        server.wait_until_ready()
        yield server


def ask(server: VllmServer, models: Sequence[str] = (SERVED_NAME,)) -> list[str]:
    """The same prompts round by round, so that a history helps from the second round on."""
    return [_complete(server, prompt, model) for _ in range(NUM_ROUNDS) for model in models for prompt in prompts(2)]


def _complete(server: VllmServer, prompt: str, model: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.base_url}/completions", json={**body, "vllm_xargs": {"agentspec": TAGS}}, timeout=120)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["text"]
    return text


def num_accepted(server: VllmServer, rank: int = 0) -> dict[str, int]:
    """Accepted draft tokens by namespace, of one data-parallel rank."""
    (metrics_url,) = server.agentspec_metrics_urls
    url = httpx.URL(metrics_url)
    assert url.port is not None
    accepted: dict[str, int] = {}
    for (name, labels), value in read_samples(str(url.copy_with(port=url.port + rank))).items():
        if name == "agentspec_accepted_tokens_total":
            namespace = dict(labels)["namespace"]
            accepted[namespace] = accepted.get(namespace, 0) + round(value)
    return accepted


def test_tensor_parallel_ranks_write_what_they_write_without_drafts(model_path: str, tmp_path: Path) -> None:
    with served("plain", model_path, tmp_path, TENSOR_PARALLEL) as server:
        plain = ask(server)
    with served("agentspec", model_path, tmp_path, TENSOR_PARALLEL) as server:
        assert ask(server) == plain
        assert num_accepted(server)["default"] > 0


def test_data_parallel_ranks_draft_and_report_each_for_itself(model_path: str, tmp_path: Path) -> None:
    with served("plain", model_path, tmp_path, ()) as server:
        plain = ask(server)
    with served("agentspec", model_path, tmp_path, DATA_PARALLEL) as server:
        assert ask(server) + ask(server) == plain + plain
        assert [num_accepted(server, rank)["default"] > 0 for rank in (0, 1)] == [True, True]


def test_adapters_share_no_history_and_write_what_they_write_without_drafts(model_path: str, tmp_path: Path) -> None:
    adapter = make_adapter(Path(model_path), tmp_path / "adapter")
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"red={adapter}")
    with served("plain", model_path, tmp_path, flags) as server:
        plain = ask(server, [SERVED_NAME, "red"])
    with served("agentspec", model_path, tmp_path, flags) as server:
        assert ask(server, [SERVED_NAME, "red"]) == plain
        accepted = num_accepted(server)

    assert plain[:2] != plain[2:4]  # else the adapter does nothing
    assert len(accepted) == 2
    assert all(accepted.values())


def make_adapter(model: Path, folder: Path) -> Path:
    """Write a random LoRA adapter of rank 8 for the query projections of a Llama model."""
    import torch  # noqa: PLC0415  # slow
    from safetensors.torch import save_file  # noqa: PLC0415  # see above

    config = json.loads((model / "config.json").read_text())
    size, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight": torch.randn(
            *((8, size) if half == "A" else (size, 8)), generator=generator
        )
        * 0.1
        for layer in range(config["num_hidden_layers"])
        for half in ("A", "B")
    }
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "peft_type": "LORA", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def test_batch_file_is_answered_as_without_drafts(model_path: str, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    bodies = [
        {
            "model": SERVED_NAME,
            "messages": [{"role": "user", "content": f"Write a Python class Parser, version {i % 2}."}],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "vllm_xargs": {"agentspec": TAGS},
        }
        for i in range(4)
    ]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for i, body in enumerate(bodies)
    ]
    requests.write_text("\n".join(lines))
    words = subprocess.run(
        [sys.executable, "-m", "agentspec.serving_patch", "flags"], capture_output=True, text=True, check=True
    ).stdout
    ours = run_batch(model_path, requests, tmp_path / "ours.jsonl", words)

    assert all(ours.values())
    assert ours == run_batch(model_path, requests, tmp_path / "plain.jsonl", "")


def run_batch(model: str, requests: Path, answers: Path, flags: str) -> dict[str, Any]:
    """Texts by custom id; `flags` are as a shell reads them."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch", "-i", str(requests), "-o", str(answers)]
    command += ["--model", model, "--served-model-name", SERVED_NAME, "--dtype", "float32", "--enforce-eager"]
    subprocess.run(
        [*command, "--max-model-len", "256", *shlex.split(flags)],
        env={**os.environ, "AGENTSPEC_METRICS_PORT": "0"},
        check=True,
        capture_output=True,
    )
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}
