"""The compute floor of a model: its matrix products and attentions, and nothing else.

Products run in cuBLAS and attention in torch's fastest SDPA backend, at the sizes of one rank. No overlap and no
fusion can go below; communication and everything element-wise is what is left out.

Two floors: each operation alone, with pauses, at boosted clocks; and whole layers without a pause, at the clocks that
the GPU sustains.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fodit.tune.setting import Setting

SUSTAINED_MS = 3000.0  # clocks have settled by half of it
FEWEST_LAYERS = 3
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
Call = Callable[[], Any]


@dataclass(frozen=True)
class Product:
    """[m, k] x [k, n]"""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def calls(self, device: torch.device, dtype: torch.dtype) -> list[Call]:
        """Ways to compute it, on random data."""
        a = torch.randn(self.m, self.k, device=device, dtype=dtype)
        weight = torch.randn(self.n, self.k, device=device, dtype=dtype)
        out = torch.empty(self.m, self.n, device=device, dtype=dtype)
        return [lambda: torch.mm(a, weight.t(), out=out)]


@dataclass(frozen=True)
class Attention:
    """`query` tokens attend to `key` tokens."""

    batch: int
    heads: int
    query: int
    key: int
    dim: int

    @property
    def flops(self) -> int:
        return 4 * self.batch * self.heads * self.query * self.key * self.dim

    def calls(self, device: torch.device, dtype: torch.dtype) -> list[Call]:
        """Ways to compute it, on random data; not every one runs everywhere."""
        q = torch.randn(self.batch, self.heads, self.query, self.dim, device=device, dtype=dtype)
        k = torch.randn(self.batch, self.heads, self.key, self.dim, device=device, dtype=dtype)

        def attend(backend: SDPBackend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, k)

        return [partial(attend, backend) for backend in BACKENDS]


Operation = Product | Attention


@dataclass(frozen=True)
class Floor:
    """Times of the same operations: each alone, and in a row without pauses."""

    alone: float
    sustained: float

    def __mul__(self, factor: float) -> "Floor":
        return Floor(self.alone * factor, self.sustained * factor)


def layer_work(transformer: Any, batch: int, video_tokens: int, text_tokens: int, ulysses: int) -> list[Operation]:
    """One call of one layer, in its order, on one of the `ulysses` ranks that share the sequence."""
    config = transformer.config
    heads, dim = config.num_attention_heads, config.attention_head_dim
    width, local_heads = heads * dim, -(-heads // ulysses)
    wan = type(transformer).__name__.startswith("Wan")
    tokens = video_tokens if wan else video_tokens + text_tokens  # that attend to each other
    local = -(-tokens // ulysses)
    rows = batch * local
    inner = config.ffn_dim if wan else 4 * width
    attention: list[Operation] = [
        Product(rows, 3 * width, width),
        Attention(batch, local_heads, tokens, tokens, dim),
        Product(rows, width, width),
    ]
    cross: list[Operation] = [
        Product(rows, width, width),
        Product(batch * text_tokens, 2 * width, width),
        Attention(batch, heads, local, text_tokens, dim),
        Product(rows, width, width),
    ]
    mlp: list[Operation] = [Product(rows, inner, width), Product(rows, width, inner)]
    return attention + (cross if wan else []) + mlp


def layer_floor(setting: Setting, work: list[Operation], dtype: torch.dtype) -> Floor:
    """Milliseconds of the operations on the slowest rank, for which the others wait."""
    with setting.compute():
        fastest = [_fastest(setting, operation, dtype) for operation in work]
        alone = sum(taken for taken, _ in fastest)
        chain = _chain_ms(setting, [call for _, call in fastest], alone)
    return Floor(*setting.slowest([alone, chain]))


def layer_floor_ms(setting: Setting, work: list[Operation], dtype: torch.dtype) -> float:
    """Milliseconds of the operations, each alone: the yardstick."""
    return layer_floor(setting, work, dtype).alone


def _fastest(setting: Setting, operation: Operation, dtype: torch.dtype) -> tuple[float, Call]:
    """The least milliseconds of the operation alone, and the call that took them."""
    found: list[tuple[float, Call]] = []
    failures: list[RuntimeError] = []
    for call in operation.calls(setting.device, dtype):
        try:
            found.append((setting.time(call, repeats=5, warm_up=2), call))
        except RuntimeError as error:  # an attention backend that does not run here; another one does
            failures.append(error)
    if not found:
        raise failures[0]
    return min(found, key=lambda one: one[0])


def _chain_ms(setting: Setting, calls: list[Call], expected_ms: float) -> float:
    """Median milliseconds of a layer in the second half of a run of layers back to back, `SUSTAINED_MS` long."""
    layers = max(ceil(SUSTAINED_MS / expected_ms), FEWEST_LAYERS)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(layers + 1)]
    setting.barrier()
    marks[0].record()
    for mark in marks[1:]:
        for call in calls:
            call()
        mark.record()
    torch.cuda.synchronize()
    settled = marks[layers // 2 :]
    return median(before.elapsed_time(after) for before, after in zip(settled, settled[1:], strict=False))
