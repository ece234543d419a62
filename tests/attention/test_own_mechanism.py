"""Your own mechanism needs only public names of `tra.attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from tra.attention import AttentionInputs, DenseAttention, LayerCache, NoPositionAttention, scores, visible_keys


class Windowed(DenseAttention):
    """Softmax attention over the nearest keys."""

    window = 100

    def logits(self, inputs: AttentionInputs, rows: Tensor) -> Tensor:
        distance = (inputs.past + rows)[:, None] - torch.arange(inputs.key.shape[2])
        hidden = ~visible_keys(inputs, rows) | (distance >= self.window)
        return scores(inputs, rows).masked_fill(hidden, -torch.inf)


def test_a_mechanism_of_public_parts() -> None:
    """With a wide window it is plain attention, with a narrow one each token alone; it decodes and has a map."""
    torch.manual_seed(0)
    x, layer, plain = torch.randn(2, 12, 32).double(), Windowed(32, 4).double(), NoPositionAttention(32, 4).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), plain(x))
    cache = LayerCache()
    with torch.no_grad():
        pieces = [layer(piece, cache=cache) for piece in x.split([5, 1, 6], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), plain(x).detach())
    layer.window = 1
    torch.testing.assert_close(layer(x), layer.o_proj(layer.v_proj(x)))
    assert torch.equal(layer.attention_map(x).weights, torch.eye(12).double().expand(2, 4, -1, -1))
