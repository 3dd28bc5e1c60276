"""The formulas of the row operations against the plain torch modules they stand for."""

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.embeddings import apply_rotary_emb
from torch import nn

from fodit.kernels import rows
from fodit.kernels.modulation import Modulation

BATCH, TOKENS, WIDTH = 2, 7, 24


def close(got, wanted, limit=1e-6):
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert (got.double() - wanted.double()).norm() < limit * wanted.double().norm()


def layer_norm(affine, width=WIDTH):
    norm = nn.LayerNorm(width, 1e-6, elementwise_affine=affine)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm.requires_grad_(False)


def operands(per_token=False, dtype=torch.float32):
    x, y = torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype), torch.randn(TOKENS, BATCH, WIDTH, dtype=dtype)
    vectors = torch.randn(BATCH, TOKENS if per_token else 1, 6, WIDTH, dtype=dtype)
    return x, y.transpose(0, 1), vectors, torch.randn(6, WIDTH)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_norm_and_modulation_with_a_table(affine, per_token):
    x, y, vectors, table = operands(per_token)
    norm = layer_norm(affine)
    shift, scale, gate = (vectors + table)[:, :, 3:].unbind(2)
    modulation = Modulation(vectors, table, first=3)
    close(rows.normalise(x, norm, modulation), norm(x) * (1 + scale) + shift)
    close(rows.add(x, y, modulation), x + gate * y)
    total, normed = rows.add_normalise(x, y, norm, modulation, modulation)
    close(total, x + gate * y)
    close(normed, norm(x + gate * y) * (1 + scale) + shift)


def test_plain_sum_and_norm():
    x, y, _, _ = operands()
    norm = layer_norm(True)
    close(rows.normalise(x, norm), norm(x))
    close(rows.add(x, y), x + y)
    total, normed = rows.add_normalise(x, y, norm)
    close(total, x + y)
    close(normed, norm(x + y))


@pytest.mark.parametrize("text", [0, 1, 4, TOKENS])
def test_text_rows_take_their_own_vectors(text):
    x, y, vectors, _ = operands()
    norm = layer_norm(True)
    parts = [vectors[:, 0, which, None].expand(-1, TOKENS, -1).clone() for which in range(3)]
    for which, part in enumerate(parts):
        part[:, :text] = vectors[:, :, 3 + which]
    shift, scale, gate = parts
    modulation = Modulation(vectors, text=text)
    total, normed = rows.add_normalise(x, y, norm, modulation, modulation)
    close(total, x + gate * y)
    close(normed, norm(x + gate * y) * (1 + scale) + shift)


def test_gate_and_modulation_must_agree_on_the_text():
    x, y, vectors, _ = operands()
    with pytest.raises(ValueError, match="2 text tokens, the modulation for 3"):
        rows.add_normalise(x, y, layer_norm(False), Modulation(vectors, text=2), Modulation(vectors, text=3))


def test_values_are_rounded_only_where_they_are_stored():
    x, y, vectors, table = operands(dtype=torch.bfloat16)
    norm, modulation = layer_norm(True), Modulation(vectors, table)
    exact = rows.add_normalise(x.double(), y.double(), norm.double(), modulation, modulation)
    assert exact[1].dtype == torch.float64
    for got, wanted in zip(rows.add_normalise(x, y, norm.float(), modulation, modulation), exact, strict=True):
        assert torch.equal(got, wanted.bfloat16())


def test_linear_gelu():
    x, weight, bias = torch.randn(2, 5, WIDTH), torch.randn(8, WIDTH), torch.randn(8)
    close(rows.linear_gelu(x, weight, bias), F.gelu(F.linear(x, weight, bias), approximate="tanh"))
    close(rows.linear_gelu(x, weight, None), F.gelu(F.linear(x, weight), approximate="tanh"))


def rotary(tokens, dim):
    angles = torch.randn(tokens, dim // 2).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("turned", [True, False])
def test_rms_norm_over_all_heads_on_arrival_of_some(turned):
    heads, dim = 5, 8
    norms = tuple(nn.RMSNorm(heads * dim, eps).requires_grad_(False) for eps in (1e-6, None))
    for norm in norms:
        nn.init.normal_(norm.weight)
    projected = torch.randn(TOKENS, BATCH, 3, heads * dim)
    widths = [3 * dim, 2 * dim]
    sent = [part.flatten() for part in projected.split(widths, dim=-1)]
    buffer = torch.cat([sent[1], torch.full((5,), torch.nan), sent[0]])  # other things may lie between them
    places = [(sent[1].numel() + 5, widths[0]), (0, widths[1])]
    totals = rows.squares_of_slabs(buffer, places, TOKENS * BATCH).view(TOKENS, BATCH, 2)
    close(totals, projected[:, :, :2].square().sum(-1))
    query, key, _ = projected.unflatten(-1, (heads, dim)).unbind(2)
    close(rows.squares(query, key), totals)

    tables = rotary(TOKENS, dim) if turned else None
    raw = sent[1].view(TOKENS, BATCH, 3, 2, dim)
    for got, norm, which in zip(
        rows.arrive_rms(raw[:, :, 0], raw[:, :, 1], totals, norms, (3, 5), tables), norms, (0, 1), strict=True
    ):
        wanted = norm(projected[:, :, which])[..., 3 * dim :].unflatten(-1, (2, dim))
        close(got, _turn(wanted, tables))


def _turn(heads, tables):
    """diffusers' RoPE on [tokens, batch, heads, dim]."""
    if tables is None or heads.numel() == 0:
        return heads
    return apply_rotary_emb(heads.transpose(0, 1), tables, sequence_dim=1).transpose(0, 1)


@pytest.mark.parametrize("text", [0, 2, TOKENS])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_layer_norm_over_each_head_on_arrival(normed, turned, text):
    heads, dim = 3, 8
    norms = (layer_norm(True, dim), layer_norm(True, dim)) if normed else (None, None)
    tables = rotary(TOKENS - text, dim) if turned else None
    raw = torch.randn(TOKENS, BATCH, 3, heads, dim)
    for which, got in enumerate(rows.arrive_layer_norm(raw[:, :, 0], raw[:, :, 1], norms, tables, text)):
        wanted = raw[:, :, which] if norms[which] is None else norms[which](raw[:, :, which])
        close(got, torch.cat([wanted[:text], _turn(wanted[text:], tables)]))


def test_a_cpu_has_no_kernels_and_says_so():
    assert "cpu" in rows.why_eager(torch.device("cpu"))
