"""Replays request traces over the trie and the eviction policies of the server; torch-free.

:mod:`trace` reads, :mod:`agents` generates, :mod:`replay` runs one policy at one capacity, :mod:`bound` is the best
that any policy could do, :mod:`report` prints.
"""
