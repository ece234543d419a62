"""What `generate` promises of a causal language model, in tests of our own.

transformers checks this by a mixin of the same name, which its source distribution leaves out.
"""

from __future__ import annotations

import copy
import inspect
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel, QuantizedCache, StaticCache
from transformers.generation import (
    GenerateBeamDecoderOnlyOutput,
    GenerateDecoderOnlyOutput,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

NEW = 6
"""Tokens that each test generates, unless it says otherwise."""


class Forbid(LogitsProcessor):
    """Gives one token no chance."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([self.token]), -torch.inf)


class Stop(StoppingCriteria):
    """Ends generation at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **_others: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


class GenerationTesterMixin:
    """Asks for `all_generative_model_classes` and a `model_tester`."""

    model_tester: Any
    all_generative_model_classes: tuple[type[PreTrainedModel], ...]

    def models(self, **changes: Any) -> Iterator[tuple[PreTrainedModel, dict[str, Tensor]]]:
        """Yield each model, sharp enough that tokens differ, with a batch of 2 prompts without padding."""
        for model_class in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            for name, value in changes.items():
                setattr(config, name, value)
            torch.manual_seed(0)
            model = model_class(config).eval()
            if model._supports_sdpa:
                model.set_attn_implementation("eager")  # which alone gives maps
            with torch.no_grad():
                model.get_output_embeddings().weight.mul_(20)
            model.generation_config.eos_token_id = None  # so that lengths are known
            model.generation_config.pad_token_id = config.pad_token_id
            ids = inputs["input_ids"][:2]
            yield model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def outputs(self, model: PreTrainedModel, inputs: dict[str, Tensor], **options: Any) -> Any:
        """Generate with scores and logits beside the tokens."""
        extras = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        return model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False} | extras | options)

    def check_same(self, first: Any, second: Any, tolerance: float = 1e-4) -> None:
        """Check that tokens agree and that logits are close."""
        assert torch.equal(first.sequences, second.sequences)
        for a, b in zip(first.logits, second.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    def test_inherits_generation_mixin(self) -> None:
        for model_class in self.all_generative_model_classes:
            assert issubclass(model_class, GenerationMixin)

    def test_greedy_generate(self) -> None:
        for model, inputs in self.models():
            texts = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
            assert texts.shape == (2, inputs["input_ids"].shape[1] + NEW)
            for _ in range(NEW):
                logits = model(**inputs).logits[:, -1]
                inputs["input_ids"] = torch.cat([inputs["input_ids"], logits.argmax(-1, keepdim=True)], 1)
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            assert torch.equal(texts, inputs["input_ids"])

    def check_dict_outputs(self, kind: type, use_cache: bool, **options: Any) -> None:
        """Check scores, hidden states and, without a cache, maps of each step."""
        for model, inputs in self.models():
            out = self.outputs(
                model,
                inputs,
                use_cache=use_cache,
                output_hidden_states=True,
                output_attentions=not use_cache,
                **options,
            )
            assert isinstance(out, kind)
            assert len(out.scores) == len(out.logits) == NEW
            assert len(out.hidden_states) == NEW
            layers = model.config.num_hidden_layers
            prompt, rows = inputs["input_ids"].shape[1], out.logits[0].shape[0]
            for step, states in enumerate(out.hidden_states):
                width = 1 if use_cache and step else prompt + (0 if use_cache else step)
                assert len(states) == layers + 1
                assert all(x.shape == (rows, width, model.config.hidden_size) for x in states)
            if not use_cache:
                for step, maps in enumerate(out.attentions):
                    size = prompt + step
                    heads = model.config.num_attention_heads
                    assert [x.shape for x in maps] == [(rows, heads, size, size)] * layers
            elif options.get("num_beams", 1) == 1:
                assert out.past_key_values.get_seq_length() == prompt + NEW - 1

    def test_greedy_generate_dict_outputs(self) -> None:
        self.check_dict_outputs(GenerateDecoderOnlyOutput, use_cache=False)

    def test_greedy_generate_dict_outputs_use_cache(self) -> None:
        self.check_dict_outputs(GenerateDecoderOnlyOutput, use_cache=True)

    def test_beam_search_generate_dict_output(self) -> None:
        self.check_dict_outputs(GenerateBeamDecoderOnlyOutput, use_cache=False, num_beams=2)

    def test_beam_search_generate_dict_outputs_use_cache(self) -> None:
        self.check_dict_outputs(GenerateBeamDecoderOnlyOutput, use_cache=True, num_beams=2)

    def test_maps_with_a_cache(self) -> None:
        """Each step gives maps of its new queries over all keys."""
        for model, inputs in self.models():
            out = self.outputs(model, inputs, use_cache=True, output_attentions=True)
            prompt, heads = inputs["input_ids"].shape[1], model.config.num_attention_heads
            for step, maps in enumerate(out.attentions):
                rows = 1 if step else prompt
                assert all(x.shape == (2, heads, rows, prompt + step) for x in maps)

    def test_sample_generate(self) -> None:
        for model, inputs in self.models():
            draw = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.7}
            torch.manual_seed(0)
            first = self.outputs(model, inputs, num_return_sequences=2, **draw)
            torch.manual_seed(0)
            second = self.outputs(model, inputs, num_return_sequences=2, **draw)
            assert first.sequences.shape[0] == 4
            self.check_same(first, second)

    def test_beam_search_generate(self) -> None:
        for model, inputs in self.models():
            found = self.outputs(model, inputs, num_beams=3, num_return_sequences=2)
            without = self.outputs(model, inputs, num_beams=3, num_return_sequences=2, use_cache=False)
            self.check_same(found, without)
            assert found.sequences.shape[0] == 4

    def test_beam_sample_generate(self) -> None:
        for model, inputs in self.models():
            texts = model.generate(**inputs, num_beams=2, do_sample=True, max_new_tokens=NEW)
            assert texts.shape == (2, inputs["input_ids"].shape[1] + NEW)

    def test_generate_without_input_ids(self) -> None:
        for model, _ in self.models():
            if model.config.bos_token_id is not None:
                assert model.generate(do_sample=False, max_new_tokens=NEW).shape == (1, NEW + 1)

    def test_generation_stops(self) -> None:
        """An end token fills the rest of a row with padding; processors and criteria are obeyed."""
        for model, inputs in self.models():
            free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
            prompt = inputs["input_ids"].shape[1]
            end = int(free[0, prompt + 2])
            ended = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, eos_token_id=end)
            last = prompt + free[0, prompt:].tolist().index(end)
            assert ended[0, : last + 1].tolist() == free[0, : last + 1].tolist()
            assert (ended[0, last + 1 :] == model.config.pad_token_id).all()

            text = model.generate(
                **inputs,
                max_new_tokens=NEW,
                do_sample=False,
                logits_processor=LogitsProcessorList([Forbid(end)]),
                stopping_criteria=StoppingCriteriaList([Stop(prompt + 3)]),
            )
            assert text.shape[1] == prompt + 3
            assert end not in text[:, prompt:]

    def test_past_key_values_format(self) -> None:
        for model, inputs in self.models():
            cache = model(**inputs, use_cache=True).past_key_values
            config = model.config
            heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
            shape = (2, heads, inputs["input_ids"].shape[1], config.hidden_size // config.num_attention_heads)
            assert isinstance(cache, DynamicCache)
            assert len(cache) == config.num_hidden_layers
            assert all(layer.keys.shape == layer.values.shape == shape for layer in cache.layers)

    def test_generate_continue_from_past_key_values(self) -> None:
        for model, inputs in self.models():
            whole = self.outputs(model, inputs, max_new_tokens=4)
            begun = self.outputs(model, inputs, max_new_tokens=3)
            mask = torch.ones_like(begun.sequences)
            rest = {"input_ids": begun.sequences, "attention_mask": mask, "past_key_values": begun.past_key_values}
            ended = self.outputs(model, rest, max_new_tokens=1)
            assert torch.equal(ended.sequences, whole.sequences)
            torch.testing.assert_close(ended.logits[-1], whole.logits[-1], rtol=1e-4, atol=1e-4)

    def test_generate_continue_from_inputs_embeds(self) -> None:
        for model, inputs in self.models():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            whole = self.outputs(model, {"inputs_embeds": embeds}, max_new_tokens=4)
            begun = self.outputs(model, {"inputs_embeds": embeds}, max_new_tokens=3)
            more = torch.cat([embeds, model.get_input_embeddings()(begun.sequences)], 1)
            rest = {"inputs_embeds": more, "past_key_values": begun.past_key_values}
            ended = self.outputs(model, rest, max_new_tokens=1)
            assert torch.equal(torch.cat([begun.sequences, ended.sequences], 1), whole.sequences)

    def check_embeds(self, **options: Any) -> None:
        """Check that embeddings of a prompt are continued as its tokens are."""
        for model, inputs in self.models():
            from_ids = self.outputs(model, inputs, **options)
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            both = self.outputs(model, inputs | {"inputs_embeds": embeds}, **options)
            alone = self.outputs(model, {"inputs_embeds": embeds}, **options)
            self.check_same(from_ids, both)
            assert torch.equal(alone.sequences, from_ids.sequences[:, -NEW:])
            other = self.outputs(model, {"inputs_embeds": torch.rand_like(embeds)}, **options)
            assert not torch.allclose(other.logits[0], alone.logits[0])

    def test_generate_from_inputs_embeds_greedy(self) -> None:
        self.check_embeds()

    def test_generate_from_inputs_embeds_beam_search(self) -> None:
        self.check_embeds(num_beams=2)

    def test_generate_from_inputs_embeds_with_static_cache(self) -> None:
        self.check_embeds(cache_implementation="static", disable_compile=True)

    def test_left_padding_compatibility(self) -> None:
        for model, inputs in self.models():
            ids, pad = inputs["input_ids"], model.config.pad_token_id
            padding = torch.full((2, 5), pad)
            padded = torch.cat([padding, ids], 1)
            mask = torch.cat([torch.zeros_like(padding), inputs["attention_mask"]], 1)
            batch = {"input_ids": padded, "attention_mask": mask}
            if "position_ids" in inspect.signature(model.forward).parameters:
                batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
            plain = model(**inputs).logits[:, -1]
            torch.testing.assert_close(model(**batch).logits[:, -1], plain, rtol=1e-4, atol=1e-4)
            for options in ({}, {"num_beams": 2}):
                alone = self.outputs(model, inputs, **options).sequences[:, -NEW:]
                batch.pop("position_ids", None)
                together = self.outputs(model, batch, **options).sequences[:, -NEW:]
                assert torch.equal(alone, together)

    def test_generate_with_and_without_position_ids(self) -> None:
        """Positions that count the real tokens are what a model works out by itself."""
        for model, inputs in self.models():
            positions = torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])
            given = model(**inputs, position_ids=positions).logits
            torch.testing.assert_close(given, model(**inputs).logits, rtol=1e-4, atol=1e-4)
            self.check_same(self.outputs(model, inputs | {"position_ids": positions}), self.outputs(model, inputs))

    def check_candidates(self, **options: Any) -> None:
        """Check that tokens proposed by something else change nothing."""
        for model, inputs in self.models():
            row = {name: value[:1] for name, value in inputs.items()}
            plain = self.outputs(model, row)
            if options.get("assistant_model") == "itself":
                options = options | {"assistant_model": model}
            if options.get("assistant_model") == "another":
                torch.manual_seed(1)
                other = type(model)(copy.deepcopy(model.config)).eval()
                other.generation_config.eos_token_id = None
                options = options | {"assistant_model": other}
            helped = self.outputs(model, row, **options)
            self.check_same(plain, helped)

    def test_assisted_decoding_by_itself(self) -> None:
        self.check_candidates(assistant_model="itself")

    def test_assisted_decoding_by_another(self) -> None:
        self.check_candidates(assistant_model="another")

    def test_assisted_decoding_by_early_exit(self) -> None:
        self.check_candidates(assistant_early_exit=1)

    def test_prompt_lookup_decoding(self) -> None:
        self.check_candidates(prompt_lookup_num_tokens=3)

    def test_assisted_decoding_sample(self) -> None:
        for model, inputs in self.models():
            row = {name: value[:1] for name, value in inputs.items()}
            out = self.outputs(model, row, assistant_model=model, do_sample=True, max_new_tokens=10)
            assert out.sequences.shape == (1, row["input_ids"].shape[1] + 10)

    def test_chunked_prefill(self) -> None:
        for model, inputs in self.models():
            self.check_same(self.outputs(model, inputs), self.outputs(model, inputs, prefill_chunk_size=3))

    def test_static_cache(self) -> None:
        for model, inputs in self.models():
            static = self.outputs(model, inputs, cache_implementation="static", disable_compile=True)
            self.check_same(self.outputs(model, inputs), static)
            cache = static.past_key_values
            assert isinstance(cache, StaticCache)
            assert len(cache) == model.config.num_hidden_layers
            assert cache.layers[0].keys.shape[2] >= inputs["input_ids"].shape[1] + NEW - 1

    def test_static_cache_left_padded_beams(self) -> None:
        for model, inputs in self.models():
            ids, mask = inputs["input_ids"].clone(), inputs["attention_mask"].clone()
            ids[0, :3], mask[0, :3] = model.config.pad_token_id, 0
            batch = {"input_ids": ids, "attention_mask": mask}
            static = self.outputs(model, batch, cache_implementation="static", disable_compile=True, num_beams=2)
            self.check_same(self.outputs(model, batch, num_beams=2), static)

    def test_offloaded_cache(self) -> None:
        if not torch.cuda.is_available():
            raise unittest.SkipTest("an offloaded cache needs a GPU")
        for model, inputs in self.models():
            model, inputs = model.cuda(), {name: value.cuda() for name, value in inputs.items()}
            self.check_same(self.outputs(model, inputs), self.outputs(model, inputs, cache_implementation="offloaded"))

    def test_quantized_cache(self) -> None:
        for model, inputs in self.models():
            try:
                cache = QuantizedCache("quanto", model.config)
            except ImportError:
                raise unittest.SkipTest("a quantized cache needs optimum-quanto") from None
            assert model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW).shape[0] == 2

    def test_crop_and_copy_of_a_cache(self) -> None:
        for model, inputs in self.models():
            ids = inputs["input_ids"]
            with torch.no_grad():
                cache = model(ids, use_cache=True).past_key_values
                again = copy.deepcopy(cache)
                again.crop(-2)
                last = model(ids[:, -2:], past_key_values=again).logits
                torch.testing.assert_close(last, model(ids).logits[:, -2:], rtol=1e-4, atol=1e-4)
            assert cache.get_seq_length() == ids.shape[1]

    def test_forward_with_logits_to_keep(self) -> None:
        for model, inputs in self.models():
            whole = model(**inputs).logits
            for keep in (1, 3):
                torch.testing.assert_close(model(**inputs, logits_to_keep=keep).logits, whole[:, -keep:])
            places = torch.tensor([0, 2])
            torch.testing.assert_close(model(**inputs, logits_to_keep=places).logits, whole[:, places])

    def test_prepare_inputs_for_generation_kwargs_forwards(self) -> None:
        for model, inputs in self.models():
            prepared = model.prepare_inputs_for_generation(**inputs, use_cache=False, is_first_iteration=True)
            assert torch.equal(prepared["input_ids"], inputs["input_ids"])
            assert prepared["use_cache"] is False

    def test_cache_dependent_input_preparation(self) -> None:
        """Only tokens that the cache lacks are handed to the model."""
        for model, inputs in self.models():
            cache = model(**{name: value[:, :-2] for name, value in inputs.items()}, use_cache=True).past_key_values
            prepared = model.prepare_inputs_for_generation(
                **inputs, past_key_values=cache, next_sequence_length=2, use_cache=True
            )
            assert torch.equal(prepared["input_ids"], inputs["input_ids"][:, -2:])

    def test_config_is_left_as_it_was(self) -> None:
        for model, inputs in self.models():
            before = model.config.to_dict(), model.generation_config.to_dict()
            self.outputs(model, inputs, num_beams=2, temperature=0.5, do_sample=True)
            config = GenerationConfig(max_new_tokens=2, do_sample=False, pad_token_id=model.config.pad_token_id)
            model.generate(**inputs, generation_config=config)
            assert before == (model.config.to_dict(), model.generation_config.to_dict())

    @pytest.mark.torch_compile_test
    def test_generate_compile_model_forward_fullgraph(self) -> None:
        for model, inputs in self.models():
            eager = self.outputs(model, inputs, cache_implementation="static", disable_compile=True)
            torch.compiler.reset()
            model.forward = torch.compile(model.forward, fullgraph=True, backend="eager", dynamic=False)
            compiled = self.outputs(model, inputs, cache_implementation="static", disable_compile=True)
            self.check_same(eager, compiled)
