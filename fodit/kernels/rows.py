"""Row operations: everything that happens to a token between the matrix products, one pass over memory each.

Every operation has one formula, in eager torch: the CPU's implementation and the reference. On a GPU a Triton kernel
computes the same. Arithmetic is fp32 inside, values are rounded only where they are stored. (fp64 tensors are
computed in fp64 by the formula, anywhere.)

Rows are tokens: [batch, tokens, C] outside attention, [tokens, batch, heads, dim] where heads are exchanged.
"""

from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

from fodit.kernels.modulation import Modulation, Rotary, wide


def normalise(
    x: torch.Tensor, norm: nn.LayerNorm, modulation: Modulation | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Layer norm of each row, modulated; into `out`, which is contiguous, if it is given::

        norm(x) * (1 + scale) + shift

    Args:
        x: [batch, tokens, C].
        norm: its weight, bias and eps are used.
    """
    if (triton := _triton(x)) is not None:
        return triton.rows(x, None, norm, None, modulation, normed=out)[1]
    normed = _normalised(wide(x), norm, modulation).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def add(
    x: torch.Tensor, y: torch.Tensor, gate: Modulation | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x + gate * y`, or `x + y`: [batch, tokens, C]; into `out`, which is contiguous, if it is given."""
    if (triton := _triton(x)) is not None:
        return triton.rows(x, y, None, gate, None, total=out)[0]
    total = _added(x, y, gate).to(x.dtype)
    return total if out is None else out.copy_(total)


def add_normalise(
    x: torch.Tensor,
    y: torch.Tensor,
    norm: nn.LayerNorm,
    gate: Modulation | None = None,
    modulation: Modulation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual stream and what the next product takes, in one pass::

        total = x + gate * y
        return total, norm(total) * (1 + scale) + shift

    Args:
        x, y: [batch, tokens, C]; any strides, each row contiguous.
        norm: its weight, bias and eps are used.
        gate: its gate is taken; None adds y as it is.
        modulation: its shift and scale are taken.

    Raises:
        ValueError: gate and modulation disagree on the number of text tokens.
    """
    if gate is not None and modulation is not None and gate.text != modulation.text:
        raise ValueError(
            f"the gate is for {gate.text} text tokens, the modulation for {modulation.text}: give one number"
        )
    if (triton := _triton(x)) is not None:
        return triton.rows(x, y, norm, gate, modulation)
    total = _added(x, y, gate)
    return total.to(x.dtype), _normalised(total, norm, modulation).to(x.dtype)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`gelu(x @ weight.T + bias)` with the tanh form of GELU; on a GPU in the product's own epilogue (cuBLASLt).

    Args:
        x: [..., K]. weight: [N, K]. bias: [N] or None.
    """
    if x.is_cuda and bias is not None:
        rows = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=True)
        return rows.view(*x.shape[:-1], -1)
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


def squares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sums of squares over all heads of q and k [tokens, batch, heads, dim]: [tokens, batch, 2] in fp32."""
    if (triton := _triton_heads(query, key)) is not None:
        return triton.squares(query, key)
    return torch.stack([wide(one).square().sum(dim=(-2, -1)) for one in (query, key)], dim=-1)


def squares_of_slabs(buffer: torch.Tensor, places: Sequence[tuple[int, int]], rows: int) -> torch.Tensor:
    """The same over all heads that lie in slabs: [rows, 2] in fp32.

    Args:
        buffer: flat.
        places: (offset, width) of each matrix [rows, 3 (q, k, v), width] in it.
    """
    if (triton := _triton(buffer)) is not None:
        return triton.squares_of_slabs(buffer, places, rows)
    parts = [buffer[offset:][: 3 * rows * width].view(rows, 3, width) for offset, width in places]
    return torch.stack([wide(part[:, :2]).square().sum(dim=-1) for part in parts]).sum(dim=0)


def arrive_rms(
    query: torch.Tensor,
    key: torch.Tensor,
    totals: torch.Tensor,
    norms: tuple[nn.RMSNorm, nn.RMSNorm],
    heads: tuple[int, int],
    rotary: Rotary | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of some heads, RMS-normalised over all heads of the model, then rotated.

    Args:
        query, key: [tokens, batch, heads, dim] as the projections gave them, each [heads, dim] contiguous; they may
            be overwritten.
        totals: [tokens, batch, 2] in fp32, from `squares`.
        norms: of q and k, over all heads together.
        heads: which of the model's heads these are.

    Returns:
        q and k, each [tokens, batch, heads, dim].
    """
    dim = query.shape[-1]
    weights = [None if norm.weight is None else norm.weight[heads[0] * dim : heads[1] * dim] for norm in norms]
    eps = [norm.eps if norm.eps is not None else torch.finfo(query.dtype).eps for norm in norms]
    width = norms[0].normalized_shape[0]
    if (triton := _triton_heads(query, key)) is not None:
        return triton.arrive(query, key, "rms", weights, (None, None), eps, rotary, 0, totals, width)

    def one(x: torch.Tensor, which: int) -> torch.Tensor:
        normed = wide(x) * torch.rsqrt(totals[..., which] / width + eps[which])[..., None, None]
        if (weight := weights[which]) is not None:
            normed = normed * weight.view(-1, dim)
        return _rotated(normed, rotary, 0).to(x.dtype)

    return one(query, 0), one(key, 1)


def arrive_layer_norm(
    query: torch.Tensor,
    key: torch.Tensor,
    norms: tuple[nn.LayerNorm | None, nn.LayerNorm | None],
    rotary: Rotary | None,
    text: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, layer norm over each head, then rotated except for the first `text` tokens.

    Args and returns as in `arrive_rms`; `norms` are over one head, None leaves q or k as it is.
    """
    if (triton := _triton_heads(query, key)) is not None and (norms[0] is None) == (norms[1] is None):
        form = "none" if norms[0] is None else "layer"
        weights, biases = ([getattr(norm, name, None) for norm in norms] for name in ("weight", "bias"))
        eps = [getattr(norm, "eps", 0.0) for norm in norms]
        return triton.arrive(query, key, form, weights, biases, eps, rotary, text, None, 1)

    def one(x: torch.Tensor, norm: nn.LayerNorm | None) -> torch.Tensor:
        normed = wide(x) if norm is None else _normalised(wide(x), norm, None)
        return _rotated(normed, rotary, text).to(x.dtype)

    return one(query, norms[0]), one(key, norms[1])


def why_eager(device: torch.device) -> str | None:
    """Why row operations on this device run in eager torch; None where kernels do."""
    if device.type != "cuda":
        return f"there are no row kernels for {device.type}"
    found = _load_triton()
    return found if isinstance(found, str) else None


def _added(x: torch.Tensor, y: torch.Tensor, gate: Modulation | None) -> torch.Tensor:
    return wide(x) + (wide(y) if gate is None else wide(y) * gate.gate(x.shape[1]))


def _normalised(x: torch.Tensor, norm: nn.LayerNorm, modulation: Modulation | None) -> torch.Tensor:
    weight, bias = (None if one is None else one.to(x.dtype) for one in (norm.weight, norm.bias))
    normed = F.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    if modulation is None:
        return normed
    return normed * (1 + modulation.scale(x.shape[1])) + modulation.shift(x.shape[1])


def _rotated(heads: torch.Tensor, rotary: Rotary | None, text: int) -> torch.Tensor:
    """RoPE on [tokens, batch, heads, dim] after the first `text` tokens."""
    if rotary is None:
        return heads
    cos, sin = (table.to(heads)[:, None, None] for table in rotary)
    video = heads[text:]
    even, odd = video.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([-odd, even], dim=-1).flatten(-2)
    return torch.cat([heads[:text], video * cos + turned * sin])


def _triton(x: torch.Tensor) -> ModuleType | None:
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None
    found = _load_triton()
    return None if isinstance(found, str) else found


def _triton_heads(query: torch.Tensor, key: torch.Tensor) -> ModuleType | None:
    dim = query.shape[-1]
    fits = dim & (dim - 1) == 0 and query.stride() == key.stride() and query.stride()[2:] == (dim, 1)
    return _triton(query) if fits else None


@cache
def _load_triton() -> ModuleType | str:
    """The kernels, or why there are none. Triton is imported when the first CUDA tensor comes."""
    try:
        from fodit.kernels import rows_triton
    except ImportError as error:
        return f"Triton cannot be imported ({error})"
    return rows_triton
