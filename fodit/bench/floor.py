"""The compute floor of a model: its matrix products and attentions, and nothing else.

Products run in cuBLAS and attention in torch's fastest SDPA backend, at the sizes of one rank. No overlap and no
fusion can go below; communication and everything element-wise is what is left out.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fodit.bench.setting import Setting


@dataclass(frozen=True)
class Work:
    """One call of a transformer layer on one rank: products (M, N, K), attentions (B, H, query, key, head dim)."""

    products: tuple[tuple[int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int, int], ...]


def layer_work(transformer: Any, batch: int, video_tokens: int, text_tokens: int, ulysses: int) -> Work:
    """The work of one layer when the sequence is shared by `ulysses` ranks."""
    config = transformer.config
    heads, dim = config.num_attention_heads, config.attention_head_dim
    width, local_heads = heads * dim, -(-heads // ulysses)
    if type(transformer).__name__.startswith("Wan"):
        rows = batch * -(-video_tokens // ulysses)
        products = [(rows, 3 * width, width)] + [(rows, width, width)] * 3
        products += [(rows, config.ffn_dim, width), (rows, width, config.ffn_dim)]
        products += [(batch * text_tokens, 2 * width, width)]
        attentions = [
            (batch, local_heads, video_tokens, video_tokens, dim),
            (batch, heads, rows // batch, text_tokens, dim),
        ]
    else:
        tokens = video_tokens + text_tokens
        rows = batch * -(-tokens // ulysses)
        products = [(rows, 3 * width, width), (rows, width, width), (rows, 4 * width, width), (rows, width, 4 * width)]
        attentions = [(batch, local_heads, tokens, tokens, dim)]
    return Work(tuple(products), tuple(attentions))


def layer_floor_ms(setting: Setting, work: Work, dtype: torch.dtype) -> float:
    """Milliseconds of the work, each part timed alone on random data."""
    with setting.compute():
        products = [_product_ms(setting, *shape, dtype) for shape in work.products]
        return sum(products) + sum(_attention_ms(setting, *shape, dtype) for shape in work.attentions)


def _product_ms(setting: Setting, m: int, n: int, k: int, dtype: torch.dtype) -> float:
    a = torch.randn(m, k, device=setting.device, dtype=dtype)
    weight = torch.randn(n, k, device=setting.device, dtype=dtype)
    out = torch.empty(m, n, device=setting.device, dtype=dtype)
    return setting.time(lambda: torch.mm(a, weight.t(), out=out), repeats=5, warm_up=2)


def _attention_ms(setting: Setting, b: int, h: int, query: int, key: int, dim: int, dtype: torch.dtype) -> float:
    q = torch.randn(b, h, query, dim, device=setting.device, dtype=dtype)
    k = torch.randn(b, h, key, dim, device=setting.device, dtype=dtype)
    best = float("inf")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                taken = setting.time(lambda: F.scaled_dot_product_attention(q, k, k), repeats=3, warm_up=1)
        except RuntimeError:  # this backend does not run here; the other one does
            continue
        best = min(best, taken)
    return best
