"""What is refused before the engine starts, and the fixes of vLLM, with the proof that stock vLLM needs them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentspec.serving_patch import compat, model_reader
from agentspec.serving_patch.compat import CompatibilityError, check_config, check_scheduler, check_version
from agentspec.sidecar.grammars import CHAT, HARMONY, LLAMA, MISTRAL, Grammar

with_vllm = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc1", "0.33.0.dev3+g12"])
def test_supported_version_is_taken(version: str) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "0.3.2", "dev", "0.34.0+cpu"])
def test_other_version_is_refused_with_the_range(version: str) -> None:
    with pytest.raises(CompatibilityError, match=r"is not supported; install vllm>=0\.32,<0\.34"):
        check_version(version)


def test_missing_vllm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "DISTRIBUTIONS", ("no-such-distribution",))

    with pytest.raises(CompatibilityError, match="vLLM is not installed"):
        check_version()


class FittingScheduler:
    def add_request(self, request: object) -> None: ...

    def schedule(self, throttle_prefills: bool = False) -> None: ...

    def update_from_output(self, scheduler_output: object, model_runner_output: object) -> None: ...

    def update_draft_token_ids(self, draft_token_ids: object) -> None: ...

    def _free_request(self, request: object, delay_free_blocks: bool = False) -> None: ...

    def shutdown(self) -> None: ...


def test_scheduler_with_our_signatures_is_taken() -> None:
    check_scheduler(FittingScheduler)


@pytest.mark.parametrize("name", compat.SCHEDULER_METHODS)
def test_scheduler_with_another_signature_is_refused_by_method(name: str) -> None:
    changed = type("Changed", (FittingScheduler,), {name: lambda self, something_else: None})

    with pytest.raises(CompatibilityError, match=rf"Scheduler\.{name} takes .*something_else"):
        check_scheduler(changed)


def test_scheduler_without_a_method_is_refused() -> None:
    with pytest.raises(CompatibilityError, match=r"Scheduler\.add_request takes None"):
        check_scheduler(object)


def config(**changes: Any) -> Any:
    values = {
        "method": "custom_class",
        "rejection_sample_method": "standard",
        "num_stages": 1,
        "async_scheduling": False,
        "use_v2_model_runner": False,
        **changes,
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            method=values["method"], rejection_sample_method=values["rejection_sample_method"]
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["num_stages"]),
        scheduler_config=SimpleNamespace(async_scheduling=values["async_scheduling"]),
        use_v2_model_runner=values["use_v2_model_runner"],
    )


def test_fitting_configuration_is_taken() -> None:
    check_config(config())
    check_config(config(rejection_sample_method="block"))  # lossless too


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method": "ngram"}, "agentspec-vllm serve"),
        ({"num_stages": 2}, "use tensor parallelism"),
        ({"rejection_sample_method": "synthetic"}, "changes the output"),
        ({"rejection_sample_method": "fly"}, "changes the output"),
        ({"async_scheduling": True}, "remove --async-scheduling"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_configuration_that_cannot_be_lossless_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(CompatibilityError, match=reason):
        check_config(config(**changes))


def test_engine_without_speculative_configuration_is_refused() -> None:
    plain = config()
    plain.speculative_config = None

    with pytest.raises(CompatibilityError, match="agentspec-vllm flags"):
        check_config(plain)


def test_module_is_cheap_to_import() -> None:
    code = "import sys, agentspec.serving_patch.compat; print({'vllm', 'torch', 'xgrammar'} & set(sys.modules))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "set()"


@pytest.fixture
def rejection_sampler(require_vllm: None) -> Any:
    """vLLM's module with our fix, its kernels ready."""
    import vllm._custom_ops  # noqa: F401, PLC0415  # slow
    from vllm.platforms import current_platform  # noqa: PLC0415  # slow
    from vllm.v1.sample import rejection_sampler  # noqa: PLC0415  # slow

    if not current_platform.is_cpu():
        pytest.skip("a bug of vLLM CPU")
    current_platform.register_triton_kernel_overrides()
    compat.register()
    return rejection_sampler


def expand(function: Any, values: list[float], dtype: str) -> list[float]:
    import torch  # noqa: PLC0415  # slow

    counts = torch.tensor([1, 1, 3, 8], dtype=torch.int32)
    expanded: list[float] = function(torch.tensor(values, dtype=getattr(torch, dtype)), counts, 8, 0, 1).tolist()
    return expanded


class TestCpuSamplingFix:
    pytestmark = with_vllm

    @pytest.mark.parametrize("dtype", ["int32", "int64", "float32"])
    def test_each_value_is_repeated_for_the_tokens_of_its_row(self, rejection_sampler: Any, dtype: str) -> None:
        assert expand(rejection_sampler.expand_batch_to_tokens, [2, 9, 0, 7], dtype) == [2, 1, 1, 7, 7, 7, 7, 7]

    @pytest.mark.parametrize("dtype", ["int32", "float32"])
    def test_stock_vllm_gets_it_wrong(self, rejection_sampler: Any, dtype: str) -> None:
        stock = rejection_sampler.expand_batch_to_tokens.__wrapped__

        assert expand(stock, [2, 9, 0, 7], dtype) != [2, 1, 1, 7, 7, 7, 7, 7]  # else the fix may go

    def test_registering_again_changes_nothing(self, rejection_sampler: Any) -> None:
        fixed = rejection_sampler.expand_batch_to_tokens
        compat.register()

        assert rejection_sampler.expand_batch_to_tokens is fixed

    def test_vllm_without_the_function_is_left_alone(
        self, rejection_sampler: Any, monkeypatch: pytest.MonkeyPatch, agentspec_log: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.delattr(rejection_sampler, "expand_batch_to_tokens")
        compat.register()

        assert not hasattr(rejection_sampler, "expand_batch_to_tokens")
        assert len(agentspec_log.records) == 1


class TestVLLM:
    pytestmark = with_vllm

    def test_installed_scheduler_is_supported(self, require_vllm: None) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  # slow

        check_scheduler(Scheduler)
        check_version()

    def test_steps_without_drafts_take_the_plain_sampler(self, require_vllm: None) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # noqa: PLC0415  # slow

        compat.skip_rejection_without_drafts()
        sampled = []
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(sampling_metadata=None, update_async_output_token_ids=lambda: None),
            sampler=lambda **_: sampled.append("plain"),
            rejection_sampler=lambda *_: sampled.append("rejection"),
            use_async_scheduling=False,
            _get_spec_decode_draft_probs=lambda _: None,
        )
        for num_draft_tokens in ([0, 0], [0, 1], []):
            GPUModelRunner._sample(runner, None, SimpleNamespace(num_draft_tokens=num_draft_tokens))
        GPUModelRunner._sample(runner, None, None)

        assert sampled == ["plain", "rejection", "plain", "plain"]


class TestVocabulary:
    pytestmark = with_vllm

    @pytest.fixture
    def read(self, require_vllm: None) -> Any:
        """Vocabulary of a tokenizer folder, for a model with so many rows in its output layer."""

        def read(folder: str, vocab_size: int, *, has_tokenizer: bool = True) -> list[bytes]:
            from vllm.config import ModelConfig  # noqa: PLC0415  # slow

            config = ModelConfig(model=folder, skip_tokenizer_init=not has_tokenizer, dtype="float32")
            config.get_vocab_size = lambda: vocab_size
            return model_reader.read_vocabulary(config)

        return read

    def test_bytes_of_tokens_make_up_the_text(self, read: Any, model_path: str) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415  # slow

        vocabulary = read(model_path, 49152)
        text = "def é(): return '你好 <tool_call>'\n\n"
        token_ids = AutoTokenizer.from_pretrained(model_path).encode(text, add_special_tokens=False)

        assert len(vocabulary) == 49152
        assert b"".join(vocabulary[token_id] for token_id in token_ids) == text.encode()
        assert {type(token) for token in vocabulary} == {bytes}

    def test_special_tokens_are_their_text(self, read: Any, model_path: str) -> None:
        assert read(model_path, 49152)[:3] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]

    def test_rows_past_the_tokenizer_are_empty(self, read: Any, model_path: str) -> None:
        vocabulary = read(model_path, 49200)

        assert len(vocabulary) == 49200
        assert vocabulary[49152:] == [b""] * 48

    def test_model_with_fewer_rows_than_the_tokenizer_is_cut(self, read: Any, model_path: str) -> None:
        assert len(read(model_path, 49000)) == 49000

    def test_engine_without_tokenizer_has_empty_tokens(self, read: Any, model_path: str) -> None:
        assert read(model_path, 100, has_tokenizer=False) == [b""] * 100

    def test_added_tokens_are_their_text_as_in_qwen(self, read: Any, model_path: str, tmp_path: Path) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415  # slow

        tokenizer = AutoTokenizer.from_pretrained(model_path)
        tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>"])
        tokenizer.save_pretrained(tmp_path)
        shutil.copy(Path(model_path) / "config.json", tmp_path)

        assert read(str(tmp_path), 49160)[49152:] == [b"<tool_call>", b"</tool_call>", b"<think>", *[b""] * 5]

    def test_tokenizer_that_is_not_understood_costs_the_blocks_only(
        self, monkeypatch: pytest.MonkeyPatch, agentspec_log: pytest.LogCaptureFixture, require_vllm: None
    ) -> None:
        import vllm.tokenizers  # noqa: PLC0415  # slow

        monkeypatch.setattr(vllm.tokenizers, "cached_tokenizer_from_config", lambda _: object())
        vocabulary = model_reader.read_vocabulary(SimpleNamespace(get_vocab_size=lambda: 3))

        assert vocabulary == [b""] * 3
        assert "not understood" in agentspec_log.text


def tokenizer(template: str | dict[str, str] | None, *added: str) -> Any:
    added_tokens = dict.fromkeys(added, 0)
    return SimpleNamespace(chat_template=template, all_special_tokens=[], get_added_vocab=lambda: added_tokens)


@pytest.mark.parametrize(
    ("tokenizer", "grammar"),
    [
        (tokenizer("{{ '<|python_tag|>' }}"), LLAMA),
        (tokenizer({"default": "{{ content }}", "tool_use": "{{ '<|python_tag|>' }}"}), LLAMA),
        (tokenizer(None, "[TOOL_CALLS]"), MISTRAL),
        (SimpleNamespace(all_special_tokens=["<|constrain|>"], get_added_vocab=dict), HARMONY),
        (tokenizer(None), CHAT),
    ],
)
def test_tokenizer_chooses_the_grammar(tokenizer: Any, grammar: Grammar) -> None:
    assert model_reader.grammar_of(tokenizer) is grammar
