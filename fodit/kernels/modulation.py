"""What row operations are given beside the rows: modulation vectors and rotary tables."""

from dataclasses import dataclass, replace

import torch

Rotary = tuple[torch.Tensor, torch.Tensor]  # cos, sin: [tokens, dim], each angle twice, for pairs (0, 1), (2, 3), ...


@dataclass(frozen=True)
class Modulation:
    """The vectors that shift, scale and gate rows, as a transformer computes them from the timestep.

    Attributes:
        vectors: [1 or batch, 1 or tokens, n, C], for all items or each, for a whole sequence or for each token.
        table: [n, C] that is added to them in fp32, or None.
        first: `vectors[:, :, first]` is the shift, the next one the scale, the next the gate.
        text: so many tokens at the front take the three vectors that follow these instead.
    """

    vectors: torch.Tensor
    table: torch.Tensor | None = None
    first: int = 0
    text: int = 0

    def of(self, items: slice) -> "Modulation":
        """For some items of the batch."""
        return self if self.vectors.shape[0] == 1 else replace(self, vectors=self.vectors[items])

    def shift(self, tokens: int) -> torch.Tensor:
        """[1 or batch, 1 or tokens, C]"""
        return self._vector(0, tokens)

    def scale(self, tokens: int) -> torch.Tensor:
        return self._vector(1, tokens)

    def gate(self, tokens: int) -> torch.Tensor:
        return self._vector(2, tokens)

    def _vector(self, which: int, tokens: int) -> torch.Tensor:
        def of(index: int) -> torch.Tensor:
            found = wide(self.vectors[:, :, index])
            return found if self.table is None else found + self.table[index]

        video = of(self.first + which)
        if not self.text:
            return video
        text = of(self.first + 3 + which)
        return torch.cat([text.expand(-1, self.text, -1), video.expand(-1, tokens - self.text, -1)], dim=1)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In the type of the arithmetic."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
