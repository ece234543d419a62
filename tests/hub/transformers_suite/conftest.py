"""Marks that the mixins of transformers put on their tests."""

import pytest

MARKS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "is_expert_parallel_test",
    "is_fsdp_test",
    "is_pipeline_test",
    "is_tensor_parallel_test",
    "is_training_test",
    "order",
    "torch_compile_test",
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare them, since unknown marks are errors here."""
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: set by the test mixins of transformers")
