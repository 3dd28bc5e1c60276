"""Whether a kernel can be trusted on a device: it computes a small product before it is used for the first time.

Consumer cards come in more kinds than anybody has at hand. A kernel that is wrong on one of them must not draw noise.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from fodit.kernels import gemm
from fodit.kernels.binding import Kernel, KernelError
from fodit.plan import UlyssesLayout

WORST_ERROR = 2e-2  # of the largest element; rounding to bf16 gives 4e-3
# Uneven heads and tokens, a batch, tiles cut at every border: [2 * 75, 136] by three [280, 136], in two slabs.
LAYOUT = UlyssesLayout(rank=0, ranks=2, tokens=150, batch=2, heads=7, head_dim=40, shares=2)


@lru_cache(maxsize=256)
def failure(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernel's results on this device, or None. Waits for the device.

    Without addends, with one and with several: on Hopper these are three kernels.
    """
    found = (_failure(kernel, device, dtype, addends) for addends in (0, 1, 2))
    return next((one for one in found if one is not None), None)


def _failure(kernel: Kernel, device: torch.device, dtype: torch.dtype, addends: int) -> str | None:
    plan = LAYOUT.projection_plan
    table, tiles = gemm.device_program(plan, kernel.tile_m, kernel.tile_n, device)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    a, weights = draw(plan.rows, 136), [draw(width, 136) for width in plan.widths]
    biases = [draw(plan.widths[0]), None, draw(plan.widths[2])]
    added = draw(addends, plan.size)
    out = torch.full((plan.size,), torch.nan, device=device, dtype=dtype)
    counters = torch.zeros(gemm.counters_of(plan), dtype=torch.int32, device=device)
    try:
        gemm.launch(a, weights, biases, out, table, counters, kernel.index, 0, 0, added if addends else None)
    except KernelError as error:
        return str(error)
    if tuple(counters.tolist()[:-1]) != tiles:
        return f"it signals {counters.tolist()[:-1]} tiles of {list(tiles)} in a test"
    worst = 0.0
    for one in plan.segments:
        bias = biases[one.weight]
        wanted = F.linear(
            a[one.row_start : one.row_stop].float(),
            weights[one.weight][one.col_start : one.col_stop].float(),
            None if bias is None else bias[one.col_start : one.col_stop].float(),
        )
        for more in added.float():
            wanted += more.as_strided(wanted.shape, (one.ld, 1), more.storage_offset() + one.offset)
        got = out.as_strided(wanted.shape, (one.ld, 1), one.offset).float()
        worst = max(worst, float(((got - wanted).abs().max() / wanted.abs().max()).nan_to_num(torch.inf)))
    return None if worst < WORST_ERROR else f"its result is off by {worst:.2g} of the largest element in a test"
