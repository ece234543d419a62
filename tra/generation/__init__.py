"""Generate text: prompts, sampling, stop tokens, the CUDA graph, and serving many requests at once."""

from tra.generation.decoding import collect, continuation, prefill
from tra.generation.requests import Completion, Request
from tra.generation.sampling import Sampling
from tra.generation.serving import Server, serve

__all__ = ["Completion", "Request", "Sampling", "Server", "collect", "continuation", "prefill", "serve"]
