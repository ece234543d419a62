"""Rotary positions against complex numbers, the form of the original paper."""

from __future__ import annotations

import torch

from tra.attention.shared.positions import positions
from tra.attention.shared.rotation import rotate, rotate_by_position, rotations


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    table = rotations(torch.arange(5)[None], 8, 500_000.0, torch.float64)
    rotated = torch.complex(x[..., :4], x[..., 4:])
    for place in range(5):
        for pair in range(4):
            turn = torch.polar(torch.tensor(1.0).double(), torch.tensor(place * 500_000.0 ** (-pair / 4)).double())
            rotated[:, :, place, pair] *= turn
    expected = torch.cat([rotated.real, rotated.imag], -1)
    torch.testing.assert_close(rotate(x.transpose(1, 2), table).transpose(1, 2), expected)


def test_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 16).double(), torch.randn(1, 1, 1, 16).double()

    def score(at: int, of: int) -> float:
        (query,), (key,) = (
            rotate_by_position([x], torch.tensor([[place]]), 500_000.0) for x, place in ((q, at), (k, of))
        )
        return float((query * key).sum())

    assert abs(score(7, 3) - score(1007, 1003)) < 1e-9
    assert abs(score(7, 3) - score(7, 4)) > 1e-6


def test_padding_does_not_count() -> None:
    mask = torch.tensor([[False, False, True, True, False, True]])
    assert positions(torch.zeros(1, 6, 4), mask, past=0)[0].tolist() == [0, 0, 0, 1, 1, 2]
    assert positions(torch.zeros(1, 2, 4), mask, past=4)[0].tolist() == [1, 2]
