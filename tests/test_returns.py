"""The out projection of what comes back, with exchanges that are played."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fodit.models.returns import Return, copy_rows, project
from fodit.ops import Communicator
from fodit.plan import UlyssesLayout

TOKENS, BATCH, HEADS, DIM, COLUMNS = 11, 2, 7, 4, 10


class Played:
    """An exchange that ends when it is waited for: until then nothing is there."""

    def __init__(self, log, received, arrives):
        self._log, self._received, self._arrives = log, received, arrives

    def wait(self):
        self._log.append("wait")
        self._received.copy_(self._arrives)


class Products(TorchFunctionMode):
    def __init__(self, log):
        super().__init__()
        self._log = log

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (nn.functional.linear, torch.Tensor.addmm_):
            self._log.append("product")
        return function(*args, **(kwargs or {}))


def played(layout, log, dtype=torch.float64):
    """What `layout.rank` has attended and will receive, and the output [local tokens * batch, heads * dim]."""
    whole = torch.randn(TOKENS, BATCH, HEADS, DIM, dtype=dtype)
    local = whole[slice(*layout.token_ranges[layout.rank])]
    returns = []
    for group in range(layout.groups):
        heads = [slice(*layout.head_ranges[rank][group]) for rank in range(layout.ranks)]
        arrives = [local[:, :, one].flatten() for rank, one in enumerate(heads) if rank != layout.rank]
        attended = whole[:, :, heads[layout.rank]].contiguous()
        received = torch.full((sum(map(len, arrives)),), float("nan"), dtype=dtype)
        returns.append(Return(Played(log, received, torch.cat(arrives)), attended, received))
    return returns, local.reshape(-1, HEADS * DIM)


LAYOUTS = [(0, 2, 1), (1, 2, 1), (1, 2, 3), (0, 3, 1), (1, 3, (1, 2)), (2, 3, 2)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize(("rank", "ranks", "shares"), LAYOUTS)
def test_as_the_projection_of_all_heads(rank, ranks, shares, in_parts, bias):
    layout, log = UlyssesLayout(rank, ranks, TOKENS, BATCH, HEADS, DIM, shares), []
    returns, output = played(layout, log)
    projection = nn.Linear(HEADS * DIM, COLUMNS, bias=bias, dtype=torch.float64).requires_grad_(False)
    with Products(log):
        result = project(projection, returns, layout, Communicator(None, torch.device("cpu")), in_parts)
    torch.testing.assert_close(result, projection(output))
    assert log[0] == ("product" if in_parts else "wait"), "own heads wait for nobody"
    assert log.count("wait") == layout.groups


class Scaled(nn.Linear):
    """Not a plain Linear: its weight is only half of what it does."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_other_modules_are_called():
    layout = UlyssesLayout(1, 2, TOKENS, BATCH, HEADS, DIM)
    returns, output = played(layout, [])
    projection = Scaled(HEADS * DIM, COLUMNS, dtype=torch.float64).requires_grad_(False)
    result = project(projection, returns, layout, Communicator(None, torch.device("cpu")), True)
    torch.testing.assert_close(result, projection(output))


def test_autocast_is_a_fallback():
    layout, comm = UlyssesLayout(1, 2, TOKENS, BATCH, HEADS, DIM), Communicator(None, torch.device("cpu"))
    returns, output = played(layout, [], torch.float32)
    projection = nn.Linear(HEADS * DIM, COLUMNS).requires_grad_(False)
    with torch.autocast("cpu", torch.bfloat16):
        result = project(projection, returns, layout, comm, True)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, projection(output))
    assert any("autocast" in one for one in comm.fallbacks)


@pytest.mark.parametrize("width", [1, 3, 4, 8, 12])
@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_copied_bit_by_bit(width, offset, dtype):
    source = torch.randn(5, 24, dtype=dtype)[:, offset : offset + width]
    target = torch.zeros(5, 16, dtype=dtype)
    copy_rows(target[:, :width], source)
    assert torch.equal(target[:, :width], source) and not target[:, width:].any()
