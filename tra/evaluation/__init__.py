"""Measure a trained run: exact match, perplexity, the two failures of attention, attention maps."""
