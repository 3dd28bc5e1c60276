"""Triton kernels of the row operations in `fodit.kernels.rows`, which holds their formulas and documentation."""

import os
import shutil
from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from fodit.kernels.modulation import Modulation, Rotary

if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
    raise ImportError("Triton needs a C compiler to launch kernels: install gcc or set CC")

ROWS = 16  # that one program takes one after the other, with the modulation vectors in registers
STAGES = 3  # rows of a program that are on their way from memory at a time
TILE = 1024  # elements of q, and of k, that one program normalises and rotates


def _on_device(x: torch.Tensor, *others: torch.Tensor | None) -> None:
    """A kernel would read a wrong address without a word (a meta tensor's is 0)."""
    for other in others:
        if other is not None and other.device != x.device:
            raise ValueError(f"rows are on {x.device}, weights of theirs on {other.device}: both must be on one device")


@triton.jit
def _vector(values, table, index, width, columns, inside, TABLE: tl.constexpr):
    found = tl.load(values + index * width + columns, mask=inside, other=0.0).to(tl.float32)
    if TABLE:
        found += tl.load(table + index * width + columns, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit
def _rows(
    x, y, total, normed, weight, bias, gates, gate_table, vectors, table,
    tokens, text, width, eps,
    x_batch, x_token, y_batch, y_token, gate_batch, gate_token, vector_batch, vector_token,
    gate_first, first,
    STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr,
    ADD: tl.constexpr, GATE: tl.constexpr, GATE_TABLE: tl.constexpr,
    NORM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, MODULATE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    # A program's rows are all text or all video, so that one set of vectors serves them.
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    text_programs = tl.cdiv(text, ROWS)
    is_text = program < text_programs
    start = tl.where(is_text, program * ROWS, text + (program - text_programs) * ROWS)
    stop = tl.minimum(start + ROWS, tl.where(is_text, text, tokens))
    other = tl.where(is_text, 3, 0)

    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x += batch * x_batch
    y += batch * y_batch
    gates += batch * gate_batch
    vectors += batch * vector_batch
    # Affine and modulation together are one factor and one offset.
    factor = tl.full([BLOCK], 1.0, tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    if WEIGHT:
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        offset = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if not PER_TOKEN:
        if GATE:
            gate = _vector(gates, gate_table, gate_first + 2 + other, width, columns, inside, GATE_TABLE)
        if MODULATE:
            scale = 1 + _vector(vectors, table, first + 1 + other, width, columns, inside, TABLE)
            offset = offset * scale + _vector(vectors, table, first + other, width, columns, inside, TABLE)
            factor *= scale

    for step in tl.range(stop - start, num_stages=STAGES):
        row = (start + step).to(tl.int64)
        stored = (batch * tokens + row) * width + columns
        value = tl.load(x + row * x_token + columns, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            added = tl.load(y + row * y_token + columns, mask=inside, other=0.0).to(tl.float32)
            if GATE:
                if PER_TOKEN:
                    gate = _vector(
                        gates + row * gate_token, gate_table, gate_first + 2 + other, width, columns, inside, GATE_TABLE
                    )
                added *= gate
            value += added
            tl.store(total + stored, value, mask=inside)
        if NORM:
            mean = tl.sum(value, axis=0) / width
            centred = tl.where(inside, value - mean, 0.0)
            scaled = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
            result = scaled * factor + offset
            if MODULATE and PER_TOKEN:
                mine = vectors + row * vector_token
                scale = 1 + _vector(mine, table, first + 1 + other, width, columns, inside, TABLE)
                result = result * scale + _vector(mine, table, first + other, width, columns, inside, TABLE)
            tl.store(normed + stored, result, mask=inside)


def rows(
    x: torch.Tensor,
    y: torch.Tensor | None,
    norm: Any,
    gate: Modulation | None,
    modulation: Modulation | None,
    *,
    total: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    each: int = ROWS,
    warps: int | None = None,
    stages: int = STAGES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + gate * y and its modulated layer norm, whichever are wanted; the other one is returned as x."""
    batch, tokens, width = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    adds = y is not None
    y = x if y is None else y if y.stride(-1) == 1 else y.contiguous()

    def target(wanted: bool, given: torch.Tensor | None) -> torch.Tensor:
        if not wanted:
            return x
        return torch.empty(x.shape, dtype=x.dtype, device=x.device) if given is None else given

    total, normed = target(adds, total), target(norm is not None, normed)
    if x.numel() == 0:
        return total, normed
    gates, gate_table, *gate_numbers = _arguments(gate, x)
    vectors, table, *numbers = _arguments(modulation, x)
    per_token = any(one is not None and one.vectors.shape[1] > 1 for one in (gate, modulation))
    text = next((one.text for one in (gate, modulation) if one is not None), 0)
    each, stages = (1, 1) if per_token else (each, stages)
    weight, bias = (norm.weight, norm.bias) if norm is not None else (None, None)
    _on_device(x, y, weight, bias, gates, gate_table, vectors, table)
    block = triton.next_power_of_2(width)
    grid = (triton.cdiv(text, each) + triton.cdiv(tokens - text, each), batch)
    with torch.cuda.device(x.device):
        _rows[grid](
            x, y, total, normed, x if weight is None else weight, x if bias is None else bias,
            gates, x if gate_table is None else gate_table, vectors, x if table is None else table,
            tokens, text, width, norm.eps if norm is not None else 0.0,
            x.stride(0), x.stride(1), y.stride(0), y.stride(1),
            gate_numbers[0], gate_numbers[1], numbers[0], numbers[1], gate_numbers[2], numbers[2],
            STAGES=stages, ROWS=each, BLOCK=block, PER_TOKEN=per_token,
            ADD=adds, GATE=gate is not None, GATE_TABLE=gate_table is not None,
            NORM=norm is not None, WEIGHT=weight is not None, BIAS=bias is not None,
            MODULATE=modulation is not None, TABLE=table is not None,
            num_warps=warps or min(max(block // 1024, 4), 16),
        )  # fmt: skip
    return total, normed


def _arguments(modulation: Modulation | None, x: torch.Tensor) -> tuple:
    """Vectors, table, strides over batch and token, index of the shift. Any tensor stands for what is not there."""
    if modulation is None:
        return x, None, 0, 0, 0
    vectors, table = modulation.vectors, modulation.table
    if vectors.stride(-1) != 1 or vectors.stride(-2) != vectors.shape[-1]:
        vectors = vectors.contiguous()
    batch, token = (vectors.stride(dim) if vectors.shape[dim] > 1 else 0 for dim in (0, 1))
    return vectors, None if table is None else table.contiguous(), batch, token, modulation.first


@triton.jit
def _squares(query, key, out, batch, q_token, q_batch, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = (row // batch).to(tl.int64) * q_token + (row % batch).to(tl.int64) * q_batch
    columns = tl.arange(0, BLOCK)
    q = tl.load(query + place + columns, mask=columns < width, other=0.0).to(tl.float32)
    k = tl.load(key + place + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(out + row * 2, tl.sum(q * q, axis=0))
    tl.store(out + row * 2 + 1, tl.sum(k * k, axis=0))


def squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    tokens, batch, heads, dim = query.shape
    out = torch.empty(tokens, batch, 2, dtype=torch.float32, device=query.device)
    block = triton.next_power_of_2(heads * dim)
    if out.numel():
        with torch.cuda.device(query.device):
            _squares[(tokens * batch,)](
                query, key, out, batch, query.stride(0), query.stride(1), heads * dim,
                BLOCK=block, num_warps=min(max(block // 512, 1), 16),
            )  # fmt: skip
    return out


@triton.jit
def _squares_of_slabs(buffer, offsets, out, WIDTHS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    query = tl.zeros([BLOCK], tl.float32)
    key = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(len(WIDTHS)):
        width = WIDTHS[index]
        offset = tl.multiple_of(tl.load(offsets + index), ALIGNED)  # for words of 16 bytes
        mine = buffer + offset + row * 3 * width + columns
        q = tl.load(mine, mask=columns < width, other=0.0).to(tl.float32)
        k = tl.load(mine + width, mask=columns < width, other=0.0).to(tl.float32)
        query += q * q
        key += k * k
    tl.store(out + row * 2, tl.sum(query, axis=0))
    tl.store(out + row * 2 + 1, tl.sum(key, axis=0))


def squares_of_slabs(buffer: torch.Tensor, places: Sequence[tuple[int, int]], rows: int) -> torch.Tensor:
    offsets, widths = zip(*places, strict=True)
    out = torch.empty(rows, 2, dtype=torch.float32, device=buffer.device)
    block = triton.next_power_of_2(max(widths))
    if rows:
        with torch.cuda.device(buffer.device):
            _squares_of_slabs[(rows,)](
                buffer, _numbers(offsets, buffer.device), out,
                WIDTHS=widths, ALIGNED=gcd(16, *offsets), BLOCK=block, num_warps=min(max(block // 256, 1), 8),
            )  # fmt: skip
    return out


@lru_cache(maxsize=256)
def _numbers(values: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 on the device. They change with the resolution, for which a kernel is not compiled again."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@triton.jit
def _arrive(
    query, key, totals, weight_q, weight_k, bias_q, bias_k, cos, sin,
    rows, batch, heads, text, width, eps_q, eps_k, q_token, q_batch, cos_token, sin_token,
    DIM: tl.constexpr, HEADS: tl.constexpr, TILE_ROWS: tl.constexpr,
    FORM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    # A tile is TILE_ROWS tokens by HEADS heads, flattened, by DIM.
    index = tl.arange(0, TILE_ROWS * HEADS)
    row = tl.program_id(0) * TILE_ROWS + index // HEADS
    head = tl.program_id(1) * HEADS + index % HEADS
    inside = ((row < rows) & (head < heads))[:, None]
    d = tl.arange(0, DIM)[None, :]
    at = (row // batch).to(tl.int64) * q_token + (row % batch).to(tl.int64) * q_batch
    place = at[:, None] + head[:, None] * DIM + d
    if ROTARY:
        token = (row // batch - text)[:, None]
        turned = inside & (token >= 0)
        cosine = tl.load(cos + token * cos_token + d, mask=turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + token * sin_token + d, mask=turned, other=0.0).to(tl.float32)
        even_cosine, odd_cosine = tl.split(tl.reshape(cosine, (TILE_ROWS * HEADS, DIM // 2, 2)))
        even_sine, odd_sine = tl.split(tl.reshape(sine, (TILE_ROWS * HEADS, DIM // 2, 2)))

    q = tl.load(query + place, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key + place, mask=inside, other=0.0).to(tl.float32)
    for which in tl.static_range(2):
        value = q if which == 0 else k
        x = query if which == 0 else key
        weight = weight_q if which == 0 else weight_k
        bias = bias_q if which == 0 else bias_k
        eps = eps_q if which == 0 else eps_k
        if FORM == "rms":
            total = tl.load(totals + row * 2 + which, mask=row < rows, other=1.0)
            value *= tl.rsqrt(total / width + eps)[:, None]
            if WEIGHT:
                value *= tl.load(weight + head[:, None] * DIM + d, mask=inside, other=0.0).to(tl.float32)
        if FORM == "layer":
            centred = value - (tl.sum(value, axis=1) / DIM)[:, None]
            value = centred * tl.rsqrt(tl.sum(centred * centred, axis=1) / DIM + eps)[:, None]
            if WEIGHT:
                value *= tl.load(weight + d).to(tl.float32)
            if BIAS:
                value += tl.load(bias + d).to(tl.float32)
        if ROTARY:
            even, odd = tl.split(tl.reshape(value, (TILE_ROWS * HEADS, DIM // 2, 2)))
            first = even * even_cosine - odd * even_sine
            second = odd * odd_cosine + even * odd_sine
            value = tl.reshape(tl.join(first, second), (TILE_ROWS * HEADS, DIM))
        tl.store(x + place, value, mask=inside)


def arrive(
    query: torch.Tensor,
    key: torch.Tensor,
    form: Literal["rms", "layer", "none"],
    weights: Sequence[torch.Tensor | None],
    biases: Sequence[torch.Tensor | None],
    eps: Sequence[float],
    rotary: Rotary | None,
    text: int,
    totals: torch.Tensor | None,
    width: int,
    *,
    tile: int = TILE,
    warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise and rotate q and k [tokens, batch, heads, dim] where they lie; they have the same strides."""
    tokens, batch, heads, dim = query.shape
    if (weights[0] is None) != (weights[1] is None) or (biases[0] is None) != (biases[1] is None):
        raise ValueError("the norms of q and k must both have a weight or both have none, and so with the bias")
    cos, sin = (query, query) if rotary is None else (table.to(query.device) for table in rotary)
    if rotary is not None and (cos.stride(-1) != 1 or sin.stride(-1) != 1):
        cos, sin = cos.contiguous(), sin.contiguous()
    _on_device(query, key, totals, *weights, *biases)
    if query.numel() and not (form == "none" and rotary is None):
        each_heads = min(triton.next_power_of_2(heads), max(tile // dim, 1))
        each_rows = max(tile // dim // each_heads, 1)
        grid = (triton.cdiv(tokens * batch, each_rows), triton.cdiv(heads, each_heads))
        q_weight, k_weight = (query if one is None else one.contiguous() for one in weights)
        q_bias, k_bias = (query if one is None else one.contiguous() for one in biases)
        with torch.cuda.device(query.device):
            _arrive[grid](
                query, key, query if totals is None else totals.contiguous(),
                q_weight, k_weight, q_bias, k_bias, cos, sin,
                tokens * batch, batch, heads, text, width, eps[0], eps[1],
                query.stride(0), query.stride(1), cos.stride(0), sin.stride(0),
                DIM=dim, HEADS=each_heads, TILE_ROWS=each_rows,
                FORM=form, WEIGHT=weights[0] is not None, BIAS=biases[0] is not None, ROTARY=rotary is not None,
                num_warps=warps,
            )  # fmt: skip
    return query, key
