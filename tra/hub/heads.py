"""The decoder with a head that classifies sequences or tokens, or finds answers in a text."""

from __future__ import annotations

from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)

from tra.hub.model import TRAPreTrainedModel


class TRAForSequenceClassification(GenericForSequenceClassification, TRAPreTrainedModel):
    """Classifies by the hidden state of a row's last token that isn't padding."""

    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012


class TRAForTokenClassification(GenericForTokenClassification, TRAPreTrainedModel):
    """Classifies every token by its own hidden state, so by what stands before it."""

    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012


class TRAForQuestionAnswering(GenericForQuestionAnswering, TRAPreTrainedModel):
    """Scores every token as the first and as the last of an answer."""

    _keys_to_ignore_on_load_unexpected = ["lm_head.weight"]  # noqa: RUF012
