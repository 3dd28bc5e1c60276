"""The signaling product as a torch custom op, and the choice of a kernel for it."""

from collections.abc import Sequence
from functools import lru_cache

import torch

from fodit.environment import KERNEL
from fodit.kernels.binding import ABI, MAX_WEIGHTS, Family, Gemm, Kernel, Library, load
from fodit.plan import TILE_FIELDS, Plan, tile_program

DTYPES = {torch.bfloat16: 0, torch.float16: 1}
ACTIVATIONS = {"none": 0, "gelu-tanh": 1}
PROGRAMS = 1024  # kept; making one takes the host milliseconds, and a sum by exchanges has up to eleven


def launch(
    a: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    out: torch.Tensor,
    program: torch.Tensor,
    counters: torch.Tensor,
    kernel: int,
    act: int,
    sms: int,
    addends: torch.Tensor | None = None,
) -> None:
    """`out[...] = act(a @ weight.T + bias) + sum(addends)`, tile by tile as the program says, on the current stream.

    `counters[s]` rises by one for every tile of slab s, after the tile's stores are visible to other streams. The
    kernel waits for nothing but its own operands: whatever waits for it cannot make it wait.

    Args:
        a: [M, K] bf16 or fp16, rows contiguous.
        weights: up to four [N_i, K] of the same dtype.
        biases: [N_i] or None each.
        out: flat buffer.
        program: int32 [tiles, 12] on the device; see `fodit.plan.tiles`.
        counters: int32 [slabs + 1], zero before; the last one is the kernel's own, from which its blocks draw tiles.
        kernel: index into the library's kernels.
        act: 0 none, 1 gelu-tanh.
        sms: at most this many SMs; 0 takes all of the stream's.
        addends: [count, elements], each row laid out like `out`; they are added to the rounded product in fp32.

    Raises:
        KernelError: with the call's name and arguments.
    """
    arguments = Gemm(abi=ABI, dtype=DTYPES[a.dtype], act=act, kernel=kernel, sms=sms, tiles=program.shape[0])
    arguments.m, arguments.k, arguments.lda = a.shape[0], a.shape[1], a.stride(0)
    arguments.a, arguments.out, arguments.program = a.data_ptr(), out.data_ptr(), program.data_ptr()
    arguments.counters = counters.data_ptr()
    arguments.ticket = counters.data_ptr() + 4 * (counters.numel() - 1)
    if addends is not None and addends.numel() > 0:  # an empty piece lies nowhere
        arguments.addend, arguments.addend_stride = addends.data_ptr(), addends.stride(0)
        arguments.addends = addends.shape[0]
    arguments.weights = len(weights)
    for index, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        arguments.n[index], arguments.ldw[index] = weight.shape[0], weight.stride(0)
        arguments.w[index] = weight.data_ptr()
        arguments.bias[index] = bias.data_ptr() if bias is not None else None
    device = a.get_device()
    with torch.cuda.device(device):  # the library launches on the current one
        binding().gemm(arguments, torch.cuda.current_stream(device).cuda_stream)


# The same for torch.compile. Otherwise its way through torch's dispatcher takes the host longer than all the rest.
signaling_gemm = torch.library.custom_op("fodit::signaling_gemm", launch, mutates_args=("out", "counters"))


@signaling_gemm.register_fake
def _(a, weights, biases, out, program, counters, kernel, act, sms, addends=None) -> None:  # type: ignore[no-untyped-def]
    return None


def counters_of(plan: Plan) -> int:
    """How many a launch takes: one for each slab, and one from which the kernel's blocks draw tiles."""
    return len(plan.slabs) + 1


def binding() -> Library:
    found = load()
    assert isinstance(found, Library), found
    return found


@lru_cache(maxsize=64)
def kernels_for(device: torch.device) -> tuple[Kernel, ...] | str:
    """The library's kernels that run on a device, best family first, or the reason why none does.

    `FODIT_KERNEL=ampere` or `hopper` keeps one family, `FODIT_KERNEL=torch` none.
    """
    wanted = KERNEL.value
    if wanted == "torch":
        return "FODIT_KERNEL=torch"
    if (wrong := KERNEL.wrong(wanted)) is not None:
        return wrong
    if device.type != "cuda":
        return f"the device is {device.type}"
    found = load()
    if isinstance(found, str):
        return found
    major, minor = torch.cuda.get_device_capability(device)
    properties = torch.cuda.get_device_properties(device)
    fitting = found.kernels_on((major, minor), properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]
    if wanted:
        fitting = tuple(one for one in fitting if one.family == Family[wanted.upper()])
    if not fitting:
        return f"{found.path} has no {wanted or 'kernel'} for compute capability {major}.{minor} ({found.build_info})"
    best = max(one.family for one in fitting)
    return tuple(one for one in fitting if one.family == best)


def refusal(a: torch.Tensor, weights: Sequence[torch.Tensor]) -> str | None:
    """Why no kernel takes these operands, or None."""
    found = kernels_for(a.device)
    if isinstance(found, str):
        return found
    if a.dtype not in DTYPES:
        return f"the dtype is {a.dtype}, kernels take bfloat16 and float16"
    if len(weights) > MAX_WEIGHTS:
        return f"{len(weights)} weights, kernels take {MAX_WEIGHTS}"
    if a.shape[0] == 0:
        return "there are no rows"
    for name, matrix in (("a", a), *(("a weight", weight) for weight in weights)):
        if matrix.shape[1] % 8 or matrix.stride(1) != 1 or matrix.stride(0) % 8 or matrix.data_ptr() % 16:
            return (
                f"{name} {tuple(matrix.shape)} with strides {matrix.stride()}: kernels take contiguous rows, K and "
                "the row stride multiples of 8, 16-byte aligned"
            )
    return None


@lru_cache(maxsize=PROGRAMS)
def device_program(plan: Plan, tile_m: int, tile_n: int, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The plan's tile program as int32 [tiles, 12] on the device, and the tiles of each slab."""
    program = tile_program(plan, tile_m, tile_n)
    table = torch.tensor(program.table, dtype=torch.int32).view(-1, len(TILE_FIELDS))
    return table.to(device), program.tiles_per_slab
