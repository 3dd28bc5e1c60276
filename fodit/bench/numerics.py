"""How far outputs are from each other, and from a run in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORST_ERROR = 0.1  # relative, of bf16 runs with different summation orders; a wrong shard gives about 1
BAR = 1.1  # a way's error against fp32 may be this many times that of diffusers' own bf16


class Comparison:
    """Compares the latents of each way with those of the first one, and with `exact` ones if there are any."""

    def __init__(self, exact: torch.Tensor | None = None) -> None:
        self._exact = exact
        self._first: torch.Tensor | None = None
        self._worst, self._theirs = WORST_ERROR, 0.0

    def errors(self, latents: torch.Tensor) -> dict[str, float]:
        """`error` relative to the first way; `error_fp32`, and its `ratio` to the first way's, with exact latents.

        Raises:
            RuntimeError: the latents are not those of the same computation.
        """
        exact = {} if self._exact is None else {"error_fp32": relative(latents, self._exact)}
        if self._first is None:
            self._first = latents
            self._theirs = exact.get("error_fp32", 0.0)
            self._worst = max(WORST_ERROR, 2 * self._theirs)  # two runs, each this far from the same result
        error = relative(latents, self._first)
        if not error < self._worst:
            raise RuntimeError(f"differs from the first way by {error:.3f}: its time does not count")
        if exact:
            exact["ratio"] = exact["error_fp32"] / self._theirs
        return {"error": error, **exact}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over that of what is wanted."""
    return float((found - wanted).norm() / wanted.norm())


@contextmanager
def in_fp32(models: list[Any]) -> Iterator[None]:
    """Inside, the models compute in fp32, without TF32, with their weights as bf16 rounded them.

    The weights are widened in place, and narrowed to the same bits afterwards; nothing may be attached to the models.
    """
    weights = [(weight, weight.dtype) for model in models for weight in model.parameters()]
    products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = False
    try:
        for weight, _ in weights:
            weight.data = weight.data.float()
        yield
    finally:
        for weight, dtype in weights:
            weight.data = weight.data.to(dtype)
        products.allow_tf32, convolutions.allow_tf32 = allowed


def call_in_fp32(call: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for such models."""
    return {name: value.float() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
