"""Finds the model's rotary embedding and proves that ours is the same before keys are stored without it."""

from __future__ import annotations

import logging

import torch
from torch import nn

from sglang_plt.codec.rope import Rotary

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 64
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def find_rotary(model: nn.Module, head_dim: int, dtype: torch.dtype) -> Rotary | None:
    """The rotary embedding of ``model``'s keys, or None where it is not understood (keys are then stored rotated).

    Args:
        head_dim: width of one key head.
        dtype: of the KV pool, which bounds how well two roundings can agree.
    """
    modules = {id(module): module for module in model.modules() if isinstance(_table(module), torch.Tensor)}
    tables = {(_table(m).data_ptr(), bool(getattr(m, "is_neox_style", True))): m for m in modules.values()}
    if len(tables) != 1:
        logger.info("PLT cache: keys are stored rotated: %d rotary tables in the model", len(tables))
        return None
    module = next(iter(tables.values()))
    table = _table(module)
    if table.ndim != 2 or table.shape[1] % 2 or table.shape[1] > head_dim:
        logger.info("PLT cache: keys are stored rotated: rotary table of shape %s", tuple(table.shape))
        return None
    try:
        rotary = Rotary(table.float(), bool(module.is_neox_style), table.shape[1])
        error = _probe(module, rotary, head_dim)
    except Exception as exception:
        logger.info("PLT cache: keys are stored rotated: %s refused a probe: %s", type(module).__name__, exception)
        return None
    if error > _TOLERANCE.get(dtype, 1e-4):
        logger.info("PLT cache: keys are stored rotated: %s differs by %.2g", type(module).__name__, error)
        return None
    return rotary


def _table(module: nn.Module) -> torch.Tensor:
    return getattr(module, "cos_sin_cache", None)


def _probe(module: nn.Module, rotary: Rotary, head_dim: int) -> float:
    """Largest deviation of our rotation from the model's, and of a round trip from the identity."""
    table = _table(module)
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(_PROBE_TOKENS, 1, head_dim, generator=generator).to(table.device)
    last = min(table.shape[0], 4096) - 1
    positions = torch.linspace(0, last, _PROBE_TOKENS).long().to(table.device)
    flat = keys.reshape(_PROBE_TOKENS, head_dim)
    _, theirs = module.forward_native(positions, flat.clone(), flat.clone())
    ours = rotary.apply(keys, positions)
    back = rotary.undo(ours, positions)
    return max(
        float((ours.reshape(_PROBE_TOKENS, head_dim) - theirs.float()).abs().max()),
        float((back - keys).abs().max()),
    )
