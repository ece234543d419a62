"""How text goes on: prompts, sampling, stop tokens, the CUDA graph."""

from tra.generation.decoding import collect, continuation, prefill
from tra.generation.sampling import Sampling

__all__ = ["Sampling", "collect", "continuation", "prefill"]
