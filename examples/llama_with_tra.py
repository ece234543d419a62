"""TRA in the place of a Llama's attention: masks, caches, generation and training stay those of transformers.

transformers' attention interface passes on rotated queries and keys, and not the input that TRA's gate reads, so this
replaces the layer and not the function in it. Llama's positions are not used: TRA counts the keys that it keeps.
"""

from __future__ import annotations

import torch
from transformers import Cache, LlamaConfig, LlamaForCausalLM

import tra
from tra.hub import HubLayerCache


class LlamaTRA(tra.ThresholdRelativeAttention):
    """Called as `LlamaAttention` is."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__(config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
        self.layer = layer

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **_others: object,
    ) -> tuple[torch.Tensor, None]:
        # [B, 1, T, cached + T]: the last query may see every key that is real
        key_mask = None if attention_mask is None else attention_mask[:, 0, -1]
        cache = None if past_key_values is None else HubLayerCache(past_key_values, self.layer)
        return super().forward(hidden_states, key_mask, cache), None


def with_tra(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Replace every attention; its projections keep their weights, the gate is new."""
    for layer, block in enumerate(model.model.layers):
        old, new = block.self_attn, LlamaTRA(model.config, layer)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(new, name).weight = getattr(old, name).weight
        block.self_attn = new.to(old.q_proj.weight)
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = with_tra(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(41):
        text = torch.randint(32, (16, 1)) + torch.arange(24)  # counting, from anywhere
        loss = model(text % 32, labels=text % 32).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(model.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False).tolist())
