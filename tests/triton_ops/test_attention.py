"""Attention over restored rows: FlashInfer's paged plan, SGLang's torch-native backend, FlashInfer itself on a GPU."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.triton_ops import restore_cases as slow
from tests.triton_ops.restore_cases import Case
from triton_ops import band_codes, rope
from triton_ops.band_codes import kernel as bands_kernel
from triton_ops.band_codes.cpu_encode import encode as encode_bands
from triton_ops.int_groups.blocks import Block
from triton_ops.int_groups.kernel import decode as decode_groups
from triton_ops.paged import PagedPool
from triton_ops.paged.reference import to_float, to_pool
from triton_ops.rotated import kernel as rotated_kernel
from triton_ops.rotated import reference as rotated
from triton_ops.transform.kernel import restore_unit
from triton_ops.transform.reference import Unit, scatter, synthesise

LENGTHS = (1, 37, 130)
QUERY_HEADS = 8
POOL_SLOTS = 512
LAYOUTS = [(1, "nhd"), (16, "nhd"), (64, "nhd"), (1, "hnd"), (16, "hnd"), (64, "hnd")]


@dataclass(frozen=True)
class Plan:
    """FlashInfer's: pages ``indices[indptr[i] : indptr[i + 1]]`` hold sequence i, the last of them in part."""

    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray


def slots_of(page: int) -> list[torch.Tensor]:
    """Slots of every sequence, its pages anywhere in the pool."""
    order = torch.randperm(POOL_SLOTS // page, generator=torch.Generator().manual_seed(page)).tolist()
    found = []
    for length in LENGTHS:
        pages = torch.tensor([order.pop() for _ in range(-(-length // page))])
        found.append((pages[:, None] * page + torch.arange(page)).flatten()[:length])
    return found


def plan_of(slots: list[torch.Tensor], page: int) -> Plan:
    pages = [one[::page].numpy() // page for one in slots]
    last = [(len(one) - 1) % page + 1 for one in slots]
    return Plan(np.cumsum([0, *map(len, pages)]), np.concatenate(pages), np.array(last))


def softmax_attention(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One query ``[query heads, dim]`` over rows ``[n, heads, dim]``, in float64."""
    group = len(query) // keys.shape[1]
    keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
    logits = np.einsum("hd,nhd->hn", query, keys) / math.sqrt(query.shape[1])
    weights = np.exp(logits - logits.max(1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), values)


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Plan, layout: str
) -> np.ndarray:
    """What FlashInfer's batch decode computes, from the buffers as they lie: NHD or HND pages."""
    outputs = []
    for i, one in enumerate(query.double().numpy()):
        pages = plan.indices[plan.indptr[i] : plan.indptr[i + 1]]
        parts = []
        for cache in (keys, values):
            rows = cache.double().numpy()[pages]
            rows = rows.transpose(0, 2, 1, 3) if layout == "hnd" else rows
            page = rows.shape[1]
            parts.append(rows.reshape(-1, *rows.shape[2:])[: (len(pages) - 1) * page + plan.last_page_len[i]])
        outputs.append(softmax_attention(one, *parts))
    return np.stack(outputs)


def torch_native_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: list[torch.Tensor]
) -> torch.Tensor:
    """SGLang's own decode over ``[slots, heads, dim]`` buffers."""
    backend = pytest.importorskip("sglang.srt.layers.attention.torch_native_backend").TorchNativeAttnBackend
    runner = SimpleNamespace(device=query.device, req_to_token_pool=None, token_to_kv_pool=None)
    table = torch.zeros(len(slots), max(LENGTHS), dtype=torch.int64)
    for line, one in zip(table, slots, strict=True):
        line[: len(one)] = one
    return backend(runner)._run_sdpa_forward_decode(
        query, torch.full_like(query, float("nan")), keys, values, table, torch.arange(len(slots)),
        torch.tensor(LENGTHS), scaling=query.shape[-1] ** -0.5, enable_gqa=True,
    )  # fmt: skip


@dataclass
class Restored:
    """Pools of one layer: rows as they were, by the specification, and by the kernels; other slots are NaN."""

    exact: list[PagedPool]
    want: list[PagedPool]
    got: list[PagedPool]


def groups(case: Case, bits: int, pools: Restored, slots: list[torch.Tensor], device: torch.device) -> None:
    turn = slow.rotation_of(case, 200, torch.device("cpu"))
    for one in slots:
        size = slow.sizes(case, [(len(one), min(4, len(one)))], *pools.exact)[0]
        payload, block = torch.zeros(size, dtype=torch.uint8), Block(0, len(one), min(4, len(one)), 0, len(one), 0)
        slow.encode(payload, block, case, *pools.exact, one, turn)
        slow.decode(payload, block, case, *pools.want, one, turn)
        moved = slow.rotation_of(case, 200, device)
        decode_groups(payload.to(device), [block], *pools.got, one.to(device), bits, moved)


def rotated4(case: Case, pools: Restored, slots: list[torch.Tensor], device: torch.device) -> None:
    for which, (exact, want, got) in enumerate(zip(pools.exact, pools.want, pools.got, strict=True)):
        turn = slow.rotation_of(case, 200, torch.device("cpu")) if which == 0 else None
        for one in slots:
            rows, positions = to_float(exact.gather(0, one)), torch.arange(len(one))
            rows = rows if turn is None else rope.undo(turn, rows, positions)
            norms, codes = rotated.encode(rows, 4)
            decoded = rotated.decode(norms, codes, 4, case.dim)
            decoded = decoded if turn is None else rope.apply(turn, decoded, positions)
            want.scatter(0, one, to_pool(decoded, case.dtype))
            planes = codes.transpose(0, 1).contiguous().flatten().to(device)
            moved = None if turn is None else slow.rotation_of(case, 200, device)
            norms = norms.T.contiguous()[None].to(device)
            rotated_kernel.decode(norms, planes, [4] * case.heads, got, one.to(device), 0, moved)


def fast(case: Case, pools: Restored, slots: list[torch.Tensor], device: torch.device) -> None:
    width = 2 * case.heads * case.dim
    basis = torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0] * 0.02
    unit = Unit(basis.contiguous(), None, torch.zeros(width))
    moved = Unit(unit.basis.to(device), None, unit.bias.to(device))
    turn = slow.rotation_of(case, 200, torch.device("cpu"))
    for one in slots:
        keys, values = (to_float(pool.gather(0, one)) for pool in pools.exact)
        rows = torch.cat((rope.undo(turn, keys, torch.arange(len(one))).flatten(1), values.flatten(1)), 1)
        bands, _ = encode_bands((rows @ torch.linalg.inv(basis)).numpy())
        components = band_codes.to_components(bands, 0, len(one))
        scatter(synthesise(components, 1.0, None, unit), 0, *pools.want, one, 0, turn)
        components = bands_kernel.to_components(bands_kernel.upload(bands, device), 0, len(one))
        turned = slow.rotation_of(case, 200, device)
        restore_unit(components, 1.0, None, moved, 0, *pools.got, one.to(device), 0, turned)


def restore(codec: str, page: int, layout: str, device: torch.device) -> tuple[Restored, list[torch.Tensor]]:
    dtype = torch.float32 if codec == "fast" else torch.bfloat16
    case = Case(bits=4 if codec == "int4" else 8, page=page, layout=layout, layers=1, dtype=dtype)
    cpu, pages = torch.device("cpu"), POOL_SLOTS // page
    pools = Restored(
        [slow.pool(case, 64, pages, cpu, seed) for seed in (1, 2)],
        *([slow.pool(case, 64, pages, place, None) for _ in range(2)] for place in (cpu, device)),
    )
    slots = slots_of(page)
    if codec == "fast":
        fast(case, pools, slots, device)
    elif codec == "rotated4":
        rotated4(case, pools, slots, device)
    else:
        groups(case, case.bits, pools, slots, device)
    return pools, slots


def buffers(pools: list[PagedPool], layout: str) -> list[torch.Tensor]:
    """As an engine has them, pages and all."""
    views = [pool.views[0].cpu() for pool in pools]
    return [view.transpose(1, 2) for view in views] if layout == "hnd" else views


def query_of() -> torch.Tensor:
    return torch.randn(len(LENGTHS), QUERY_HEADS, 64, generator=torch.Generator().manual_seed(3))


def bound(query: torch.Tensor, pools: Restored, slots: list[torch.Tensor]) -> np.ndarray:
    """How far attention can be from that over exact rows, ``[sequences, query heads]``, by the errors of the rows.

    Where logits are off by e at most, a weight is off by a factor of exp(2 e) at most.
    """
    found = []
    for one, rows in zip(query, slots, strict=True):
        keys, values = (pool.gather(0, rows).double() for pool in pools.exact)
        key_errors, value_errors = (
            pool.gather(0, rows).double() - exact for pool, exact in zip(pools.want, (keys, values), strict=True)
        )
        group = QUERY_HEADS // keys.shape[1]
        off = torch.einsum("hd,nhd->hn", one.double(), key_errors.repeat_interleave(group, 1)).abs().amax(1) / 8
        largest, largest_error = (x.abs().amax((0, 2)).repeat_interleave(group) for x in (values, value_errors))
        found.append(largest_error + (torch.exp(2 * off) - 1) * largest)
    return torch.stack(found).numpy()


@pytest.mark.parametrize("codec", ["int8", "int4", "rotated4", "fast"])
@pytest.mark.parametrize(("page", "layout"), LAYOUTS)
def test_attention_over_restored_rows(page, layout, codec, device):
    pools, slots = restore(codec, page, layout, device)
    query, plan = query_of(), plan_of(slots, page)
    got, want, exact = (
        paged_attention(query, *buffers(part, layout), plan, layout) for part in (pools.got, pools.want, pools.exact)
    )
    assert not np.isnan(got).any()
    if codec == "fast":  # sums of products in any order
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    else:
        assert np.array_equal(got, want)
    assert (np.abs(got - exact).max(2) <= bound(query, pools, slots) + 1e-4).all()
    if codec == "int8":
        assert np.linalg.norm(got - exact) < 0.02 * np.linalg.norm(exact)
    if layout == "nhd":
        flat = [x.reshape(POOL_SLOTS, *x.shape[2:]).float() for x in buffers(pools.got, layout)]
        native = torch_native_attention(query, *flat, slots)
        np.testing.assert_allclose(native.numpy(), got, rtol=0, atol=1e-4)


def test_the_plan_is_pinned():
    plan = plan_of(
        [torch.tensor([32, 33, 34]), torch.arange(48, 64), torch.cat((torch.arange(16), torch.tensor([80])))], 16
    )
    assert plan.indptr.tolist() == [0, 1, 2, 4]
    assert plan.indices.tolist() == [2, 3, 0, 5]
    assert plan.last_page_len.tolist() == [3, 16, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashInfer needs a GPU")
@pytest.mark.parametrize(("page", "layout"), LAYOUTS)
def test_flashinfer_reads_restored_rows(page, layout, device):
    flashinfer = pytest.importorskip("flashinfer")
    pools, slots = restore("int8", page, layout, device)
    query, plan = query_of().to(device, torch.bfloat16), plan_of(slots, page)
    workspace = torch.empty(2**27, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout.upper())
    numbers = [torch.from_numpy(x).to(device, torch.int32) for x in (plan.indptr, plan.indices, plan.last_page_len)]
    kinds = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    wrapper.plan(*numbers, QUERY_HEADS, 2, 64, page, **kinds)
    views = [pool.views[0] for pool in pools.got]
    views = [view.transpose(1, 2) for view in views] if layout == "hnd" else views
    out = wrapper.run(query, tuple(view.contiguous() for view in views)).float().cpu().numpy()
    want = paged_attention(query.cpu(), *buffers(pools.want, layout), plan, layout)
    np.testing.assert_allclose(out, want, rtol=2e-2, atol=2e-2)
