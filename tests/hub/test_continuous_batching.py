"""transformers' continuous batching says what `generate` says of each prompt alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.hub.models import language_model, tokens
from tests.hub.test_generation import sharp
from tests.slow import slow
from tra.hub import TRAForCausalLM, _continuous_batching

pytestmark = pytest.mark.skipif(not _continuous_batching.is_supported(), reason="needs transformers 5.19")

NEW = 12
LENGTHS = (150, 3, 70, 1, 200, 64, 33)
FAR: dict[str, Any] = {"gate_bias": 6.0}
"""Heads that hardly forget, so that keys of all pages count."""


def prompts(*lengths: int) -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in lengths]


def alone(model: TRAForCausalLM, prompt: list[int], new: int) -> tuple[list[int], Tensor]:
    """Return the tokens and their log probabilities, `[new]`, that `generate` gives."""
    out: Any = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    found = out.sequences[0, len(prompt) :]
    return found.tolist(), torch.cat(out.logits).log_softmax(-1).gather(1, found[:, None])[:, 0]


def check(model: TRAForCausalLM, results: list[Any], new: int = NEW) -> None:
    for result in results:
        assert result.error is None
        expected, log_probabilities = alone(model, result.prompt_ids, new)
        assert result.generated_tokens == expected
        torch.testing.assert_close(
            torch.tensor(result.logprobs), log_probabilities.float(), rtol=0, atol=2e-5, check_dtype=False
        )


def configs(**options: Any) -> dict[str, Any]:
    """Small pages, and a step that can't read a long prompt at once."""
    options = {"page_size": 64, "num_blocks": 40, "max_batch_tokens": 90, "return_logprobs": True} | options
    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1)
    return {
        "generation_config": generation,
        "continuous_batching_config": transformers.ContinuousBatchingConfig(**options),
    }


def answers(model: TRAForCausalLM, inputs: list[list[int]], **options: Any) -> list[Any]:
    return list(model.generate_batch(inputs, **configs(**options)).values())


@contextmanager
def serving(model: TRAForCausalLM, **options: Any) -> Iterator[Any]:
    """Yield a function that submits a prompt and returns the next result; a None submits nothing."""
    with model.continuous_batching_context_manager(**configs(**options)) as manager:

        def ask(prompt: list[int] | None, wait: bool = True, **request: Any) -> Any:
            if prompt is not None:
                manager.add_request(prompt, **request)
            return manager.get_result(timeout=60) if wait else None

        yield ask


@contextmanager
def steps_of(model: TRAForCausalLM) -> Iterator[list[dict[str, Any]]]:
    """Yield a list to which the arguments of every call of the model are added, tensors as numbers of elements."""
    found: list[dict[str, Any]] = []

    def hook(_model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        found.append({name: x.numel() if isinstance(x, Tensor) else x for name, x in kwargs.items()})

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


VARIANTS = pytest.mark.parametrize(
    ("mechanism", "changes"),
    [
        ("tra", FAR),
        ("tra", FAR | {"threshold": 0.2, "margin": 2.0}),
        ("rope", {}),
        *slow(
            ("tra", {}),
            ("tra", FAR | {"margin": float("inf")}),
            ("tra", FAR | {"num_key_value_heads": 4, "rotary": True}),
            ("tra", {"qk_norm": False, "num_key_value_heads": 1}),
            ("tra-threshold-only", {}),
        ),
    ],
)


@VARIANTS
def test_text_is_that_of_generate(mechanism: str, changes: dict[str, Any]) -> None:
    """Prompts that span pages are read in pieces, next to requests that already decode."""
    model = language_model(mechanism, **changes)
    with steps_of(model) as steps:
        results = answers(model, prompts(*LENGTHS))
    assert [result.prompt_ids for result in results] == prompts(*LENGTHS)
    check(model, results)
    assert any(1 < step["cu_seq_lens_q"] - 1 < step["input_ids"] for step in steps if step["max_length_q"] > 1)
    assert any(step["max_length_q"] == 1 and step["input_ids"] > 1 for step in steps)
    # transformers builds no mask of all slots, and the model is as before
    assert all(step["attention_mask"] is None for step in steps)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("mechanism", ["tra", "rope"])
def test_tokens_of_a_sharp_model(mechanism: str) -> None:
    model = sharp(mechanism)
    results = answers(model, prompts(*LENGTHS), page_size=128, return_logprobs=False)
    for result in results:
        assert result.generated_tokens == alone(model, result.prompt_ids, NEW)[0]
    assert len({token for result in results for token in result.generated_tokens}) > 5


def test_requests_join_and_leave() -> None:
    model = language_model(**FAR)
    first, second, third, fourth = prompts(20, 130, 5, 67)
    with serving(model, max_requests_per_batch=3) as ask:
        # a stream tells when a request has begun
        assert ask(first, max_new_tokens=30, streaming=True).generated_tokens
        ask(second, wait=False, max_new_tokens=4)
        ask(third, wait=False, max_new_tokens=17)
        ask(fourth, wait=False, max_new_tokens=9)
        finished = {}
        while len(finished) < 4:
            result = ask(None)
            assert result is not None
            if result.is_finished():
                finished[len(result.prompt_ids)] = result
    for prompt, new in ((first, 30), (second, 4), (third, 17), (fourth, 9)):
        check(model, [finished[len(prompt)]], new)


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_prefix_is_read_once(shared: bool) -> None:
    model = language_model(**FAR)
    beginning, other = prompts(128, 30)
    with serving(model, allow_block_sharing=shared, max_batch_tokens=256) as ask, steps_of(model) as steps:
        results, read = [], []
        for prompt in (beginning + other, beginning + other[::-1], beginning[:64] + other, other + beginning):
            before = len(steps)
            results.append(ask(prompt))
            read.append(steps[before]["input_ids"])
    check(model, results)
    assert read == ([158, 30, 30, 158] if shared else [158, 158, 94, 158])


def test_requests_of_one_prompt() -> None:
    """The prompt is read once, its full pages are shared and the last one is copied."""
    model, options = language_model(**FAR), configs()
    options["generation_config"].num_return_sequences = 3
    results = list(model.generate_batch(prompts(100), **options).values())
    assert len(results) == 3
    for result in results:
        assert result.error is None
        assert result.generated_tokens == alone(model, prompts(100)[0], NEW)[0]


@pytest.mark.slow
def test_a_pool_that_is_too_small() -> None:
    """Requests lose their pages and are read again later."""
    model = language_model(**FAR)
    check(model, answers(model, prompts(100, 101, 102, 103, 104), num_blocks=5), NEW)
    inputs = prompts(60, 61, 62, 63)
    with steps_of(model) as steps:
        check(model, answers(model, inputs, num_blocks=5, max_batch_tokens=256))
    assert sum(step["input_ids"] for step in steps) > sum(map(len, inputs)) + 4 * (NEW - 1)


@pytest.mark.slow
def test_the_kernel_reads_transformers_pages() -> None:
    model = language_model(mechanism_arguments={"impl": "triton"}, **FAR).float()
    results = answers(model, prompts(150, 3, 70), return_logprobs=False)
    expected = language_model(**FAR).float()
    for result in results:
        assert result.error is None
        assert result.generated_tokens == alone(expected, result.prompt_ids, NEW)[0]


@pytest.mark.parametrize("mechanism", ["nope", "lstm", "forgetting"])
def test_other_mechanisms_are_refused(mechanism: str) -> None:
    with pytest.raises(ValueError, match=f"^{mechanism} can't use keys in pages"):
        answers(language_model(mechanism), prompts(3))


def test_what_does_not_go_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^page_size must be a multiple of 64 .* got 48$"):
        answers(language_model(), prompts(3), page_size=48)
    with monkeypatch.context() as patched:
        patched.setattr(transformers.ContinuousBatchingConfig, "cuda_graph_booleans", (False, True))
        with pytest.raises(ValueError, match="doesn't go with CUDA graphs: set use_cuda_graph=False"):
            answers(language_model(), prompts(3))
    [result] = answers(language_model(output_hidden_states=True), prompts(3))
    assert result.error == "continuous batching doesn't go with output_attentions or output_hidden_states"
    monkeypatch.setattr(_continuous_batching, "OLDEST_TRANSFORMERS", (99, 1))
    with pytest.raises(ValueError, match=r"needs transformers 99\.1 or newer, got 5\.\d+"):
        answers(language_model(), prompts(3))
