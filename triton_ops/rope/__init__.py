"""Rotary position embedding inside kernels: which channel turns with which, and the turn itself."""

from triton_ops.rope.reference import Rotation, apply, undo

__all__ = ["Rotation", "apply", "undo"]
