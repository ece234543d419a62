"""Imports the package that a saved model needs."""

try:
    from tra.hub import (
        TRAConfig,
        TRAForCausalLM,
        TRAForQuestionAnswering,
        TRAForSequenceClassification,
        TRAForTokenClassification,
        TRAModel,
    )
except ImportError as error:
    raise ImportError(
        f"this model needs the package threshold-relative-attention, with its extra hub ({error})"
    ) from None

__all__ = [
    "TRAConfig",
    "TRAForCausalLM",
    "TRAForQuestionAnswering",
    "TRAForSequenceClassification",
    "TRAForTokenClassification",
    "TRAModel",
]
