"""A prefix cache for SGLang: a probabilistic language trie whose cold nodes hold compressed KV."""

__version__ = "0.1.0"
