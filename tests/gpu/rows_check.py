"""Row kernels and fused blocks on a GPU: right, and how near to memory bandwidth and the compute floor.

    python tests/gpu/rows_check.py rows                                     kernels against their formulas
    python tests/gpu/rows_check.py heads
    python tests/gpu/rows_check.py time                                     kernels against memory bandwidth
    python tests/gpu/rows_check.py blocks                                   one GPU, next to diffusers
    torchrun --nproc-per-node 2 tests/gpu/rows_check.py blocks no-p2p       Ulysses over all ranks

Kernels are compared with the formulas in fp64 on fresh random data; what they allocate is filled with NaN first.
"""

import copy
import sys
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import CogVideoXPipeline, WanPipeline
from torch import nn

from fodit.bench.floor import layer_floor_ms, layer_work
from fodit.kernels import rows
from fodit.kernels.modulation import Modulation
from fodit.models import attach
from fodit.parallel import ParallelConfig, ProcessGroups
from fodit.testing import dummy
from fodit.tune.setting import Setting

BANDWIDTH = 4.0e12  # bytes a second, read and written
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}  # rms of one rounding is below
LAYERS = 2


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def milliseconds(work: Callable[[], Any], repeats: int = 30) -> float:
    """Median of single timings; what a call touches is larger than the L2 cache."""
    taken = []
    for _ in range(repeats + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        taken.append((begin, end))
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in taken[3:])


# --- kernels against their formulas ---------------------------------------------------------------------------------


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def layer_norm(width: int, affine: bool) -> nn.LayerNorm:
    norm = nn.LayerNorm(width, 1e-6, elementwise_affine=affine, device="cuda")
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def in_double(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double()
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Modulation):
        table = None if value.table is None else value.table.double()
        return Modulation(value.vectors.double(), table, value.first, value.text)
    if isinstance(value, tuple):
        return tuple(in_double(one) for one in value)
    return value


def check(name: str, operation: Callable, *args: Any, limit: float | None = None) -> None:
    """The operation on these arguments against its formula in fp64."""
    wanted = operation(*in_double(args))
    dtype = next(a for a in args if isinstance(a, torch.Tensor)).dtype
    got = operation(*args)  # may overwrite its arguments
    results = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for one, other in results:
        assert one.shape == other.shape, (name, one.shape, other.shape)
        error = relative(one, other)
        assert error < (limit or ROUNDING[dtype]), (name, tuple(one.shape), dtype, error)


def check_rows() -> int:
    small, cases = (2, 37, 80), []
    cases += [(torch.bfloat16, small, kind) for kind in ("whole", "table", "token", "text")]
    cases += [(dtype, small, "text") for dtype in ROUNDING]
    cases += [(torch.bfloat16, (1, 1, 64), "text"), (torch.bfloat16, (3, 9, 1536), "token")]
    cases += [(torch.bfloat16, (2, 130, 3072), "text"), (torch.bfloat16, (1, 77, 5120), "table")]
    cases += [(torch.bfloat16, (1, 5, 9000), "whole")]
    for index, (dtype, (batch, tokens, width), kind) in enumerate(cases):
        text = min(3, tokens) if kind == "text" else 0
        vectors = draw(batch, tokens if kind == "token" else 1, 6, width, dtype=dtype)
        table = draw(6, width, dtype=torch.float32) if kind in ("table", "token") else None
        modulation = Modulation(vectors, table, 3 if kind == "table" else 0, text)
        x = draw(batch, tokens + 2, width, dtype=dtype)[:, 1 : tokens + 1]
        y = draw(tokens, batch, width, dtype=dtype).transpose(0, 1)
        norm = layer_norm(width, index % 2 == 0)
        check(f"normalise {kind}", rows.normalise, x, norm, modulation)
        check(f"add_normalise {kind}", rows.add_normalise, x, y, norm, modulation, modulation)
        check("add_normalise plain", rows.add_normalise, x, y, norm, None, None)
        check(f"add {kind}", rows.add, x, y, modulation)
        check("add to itself", rows.add, x, x, None)
    return 5 * len(cases)


def check_heads() -> int:
    count, cases = 0, [(dtype, (33, 2, 3, 64)) for dtype in ROUNDING]
    cases += [(torch.bfloat16, shape) for shape in ((1, 1, 1, 16), (130, 1, 5, 128), (57, 2, 40, 128), (9, 1, 17, 8))]
    for dtype, (tokens, batch, heads, dim) in cases:
        angles = draw(tokens, dim // 2, dtype=torch.float32).repeat_interleave(2, dim=1)
        rotary = (angles.cos(), angles.sin())
        raw = draw(tokens, batch, 3, heads, dim, dtype=dtype)
        widths = [heads * dim, 2 * dim, dim]
        for gap in (0, 1, 8):
            buffer, places = slabs(tokens * batch, widths, gap, dtype)
            check("squares_of_slabs", rows.squares_of_slabs, buffer, places, tokens * batch, limit=1e-6)
        if dtype == torch.float16:  # batch-major, as one rank has it
            raw = raw.permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
        check("squares", rows.squares, *raw.unbind(2)[:2], limit=1e-6)
        totals = rows.squares(*raw.unbind(2)[:2])
        norms = tuple(nn.RMSNorm((heads + 3) * dim, 1e-6, device="cuda") for _ in range(2))
        heads_norms = tuple(layer_norm(dim, True) for _ in range(2))
        for norm in norms:
            nn.init.normal_(norm.weight)
        for turn in (rotary, None) if heads == 3 else (rotary,):
            check("arrive_rms", rows.arrive_rms, *fresh(raw), totals, norms, (1, heads + 1), turn)
            for text in {0, tokens // 2}:
                part = None if turn is None else (turn[0][text:], turn[1][text:])
                check("arrive_layer_norm", rows.arrive_layer_norm, *fresh(raw), heads_norms, part, text)
                check("arrive unnormed", rows.arrive_layer_norm, *fresh(raw), (None, None), part, text)
            count += 7
    return count


def slabs(
    count: int, widths: list[int], gap: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, tuple[tuple[int, int], ...]]:
    """A buffer with a matrix [count, 3, width] for each width, and their places: the last one first, NaN between."""
    buffer = torch.full((sum(3 * count * width + gap for width in widths),), torch.nan, device="cuda", dtype=dtype)
    places, offset = [], 0
    for width in reversed(widths):
        buffer[offset:][: 3 * count * width] = draw(3 * count * width, dtype=dtype)
        places.append((offset, width))
        offset += 3 * count * width + gap
    return buffer, tuple(reversed(places))


def fresh(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k in a copy, with the same strides."""
    copied = torch.empty_strided(raw.shape, raw.stride(), dtype=raw.dtype, device=raw.device).copy_(raw)
    return copied[:, :, 0], copied[:, :, 1]


def check_gelu() -> None:
    x, weight, bias = draw(500, 256), draw(520, 256) / 16, draw(520)
    wanted = F.gelu(F.linear(x.double(), weight.double(), bias.double()), approximate="tanh")
    exact = F.gelu(F.linear(x.double(), weight.double(), bias.double()))
    got = rows.linear_gelu(x, weight, bias)
    assert relative(got, wanted) < ROUNDING[torch.bfloat16]
    print(f"linear_gelu: error to the tanh form {relative(got, wanted):.2e}, to erf {relative(got, exact):.2e}")


# --- kernels against memory bandwidth -------------------------------------------------------------------------------


def line(name: str, work: Callable[[], Any], moved: int) -> None:
    taken = milliseconds(work)
    bound = moved / BANDWIDTH * 1e3
    print(f"{name:58}{taken:8.3f} ms{bound:8.3f} bound{bound / taken:6.2f}", flush=True)


def time_rows(batch: int, tokens: int, width: int, text: int) -> None:
    from fodit.kernels import rows_triton as triton

    x, y = draw(batch, tokens, width), draw(batch, tokens, width)
    one = x.numel() * 2
    table = None if text else draw(6, width, dtype=torch.float32)
    modulation = Modulation(draw(batch, 1, 6, width), table, 0, text)
    plain, affine = layer_norm(width, False), layer_norm(width, True)
    size = f"{batch} x {tokens} x {width}"
    line(f"copy {size}", lambda: y.copy_(x), 2 * one)
    line("normalise", lambda: rows.normalise(x, plain, modulation), 2 * one)
    line("add gated", lambda: rows.add(x, y, modulation), 3 * one)
    line("add gated, normalise affine", lambda: rows.add_normalise(x, y, affine, modulation), 4 * one)
    line("add, normalise", lambda: rows.add_normalise(x, y, plain, None, modulation), 4 * one)
    line("add gated, normalise", lambda: rows.add_normalise(x, y, affine, modulation, modulation), 4 * one)
    for each, warps, stages in ((16, 8, 3), (16, 16, 2), (16, 16, 4), (8, 16, 3), (32, 16, 3)):
        run = lambda s=(each, warps, stages): triton.rows(  # noqa: E731
            x, y, affine, modulation, modulation, each=s[0], warps=s[1], stages=s[2]
        )
        line(f"  the same, {each} rows a program, {warps} warps, {stages} stages", run, 4 * one)
    line("half of the columns copied as 8-byte words", lambda: _columns(x, y), one)


def _columns(x: torch.Tensor, y: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    x[..., :half].view(torch.int64).copy_(y.flatten()[: x.numel() // 2].view(*x.shape[:2], half).view(torch.int64))


def time_heads(tokens: int, batch: int, heads: int, dim: int, form: str) -> None:
    from fodit.kernels import rows_triton as triton

    raw = draw(tokens, batch, 3, heads, dim)
    angles = draw(tokens, dim // 2, dtype=torch.float32).repeat_interleave(2, dim=1)
    rotary, moved = (angles.cos(), angles.sin()), raw.numel() // 3 * 2 * 2 * 2
    totals = torch.rand(tokens, batch, 2, device="cuda") + 1
    size = heads * dim if form == "rms" else dim
    weights, biases = [draw(size) for _ in range(2)], [draw(size) if form == "layer" else None for _ in range(2)]
    name = f"arrive {form} {tokens} x {batch} x {heads} x {dim}"
    for tile, warps in ((2048, 4), (2048, 8), (4096, 8)):
        arguments = (raw[:, :, 0], raw[:, :, 1], form, weights, biases, (1e-6, 1e-6), rotary, 0, totals, size)
        run = lambda t=tile, w=warps, a=arguments: triton.arrive(*a, tile=t, warps=w)  # noqa: E731
        line(f"{name}, tile {tile}, {warps} warps", run, moved)


def time_squares(count: int, widths: list[int]) -> None:
    buffer, places = slabs(count, widths)
    moved = buffer.numel() * 2 * 2 // 3
    line(f"squares {count} x {widths}", lambda: rows.squares_of_slabs(buffer, places, count), moved)


def time_gelu(m: int, n: int, k: int) -> None:
    x, weight, bias = draw(m, k), draw(n, k) / k**0.5, draw(n)
    product = milliseconds(lambda: torch.mm(x, weight.t()), 10)
    fused = milliseconds(lambda: rows.linear_gelu(x, weight, bias), 10)
    biased = milliseconds(lambda: F.linear(x, weight, bias), 10)
    out = torch.empty(m, 3 * n, device="cuda", dtype=x.dtype)[:, :n]
    strided = milliseconds(lambda: torch.addmm(bias, x, weight.t(), out=out), 10)
    unbiased = milliseconds(lambda: torch.mm(x, weight.t(), out=out), 10)
    print(f"{m} x {n} x {k}: product {product:.3f}, + bias {biased:.3f}, + bias + gelu {fused:.3f}, into strided rows "
          f"{unbiased:.3f}, with bias {strided:.3f} ms", flush=True)  # fmt: skip


def time_attention(tokens: int, batch: int, heads: int, dim: int) -> None:
    """Whether attention minds that q, k and v lie in one slab, [token, batch, 3, head, dim]."""
    raw = draw(tokens, batch, 3, heads, dim)
    lying = [one.permute(1, 2, 0, 3) for one in raw.unbind(2)]
    apart = [one.contiguous() for one in lying]
    outputs, taken = [], []
    for operands in (apart, lying):
        outputs.append(F.scaled_dot_product_attention(*operands))
        taken.append(milliseconds(lambda o=operands: F.scaled_dot_product_attention(*o), 3))
    token_major = outputs[1].permute(2, 0, 1, 3).is_contiguous()
    difference = relative(outputs[1], outputs[0])
    print(
        f"attention {tokens} x {batch} x {heads} x {dim}: contiguous {taken[0]:.2f} ms, as it lies {taken[1]:.2f} ms,"
    )
    print(f"   difference {difference:.1e}, output token-major: {token_major}", flush=True)
    assert difference < 5e-3


def compare(what: Callable[[], int]) -> None:
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    print(f"{what.__name__}: {what()} comparisons passed", flush=True)


def times() -> None:
    check_gelu()
    time_rows(1, 32760, 5120, 0)
    time_rows(2, 17776, 3072, 226)
    time_heads(32760, 1, 5, 128, "rms")
    time_heads(32760, 1, 40, 128, "rms")
    time_heads(17776, 2, 4, 64, "layer")
    time_heads(17776, 2, 48, 64, "layer")
    time_squares(32760, [5120])
    time_squares(16380, [640] * 8)
    time_gelu(16380, 13824, 5120)
    time_gelu(17776, 12288, 3072)
    time_gelu(16380, 640, 5120)
    time_attention(32760, 1, 5, 128)
    time_attention(17776, 2, 15, 64)


# --- blocks against diffusers' and the floor ------------------------------------------------------------------------


def inputs(pipe: Any, frames: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of a transformer call at 480p with so many latent frames."""
    like = {"device": "cuda", "dtype": dtype}
    generator = torch.Generator("cuda").manual_seed(1)
    if isinstance(pipe, WanPipeline):
        return {
            "hidden_states": torch.randn(1, 16, frames, 60, 104, generator=generator, **like),
            "timestep": torch.tensor([500], device="cuda"),
            "encoder_hidden_states": torch.randn(1, 512, 4096, generator=generator, **like),
        }
    return {
        "hidden_states": torch.randn(2, frames, 16, 60, 90, generator=generator, **like),
        "timestep": torch.tensor([500, 500], device="cuda"),
        "encoder_hidden_states": torch.randn(2, 226, 4096, generator=generator, **like),
        "image_rotary_emb": pipe._prepare_rotary_positional_embeddings(480, 720, frames, torch.device("cuda")),
    }


def layer_ms(setting: Setting, transformer: Any, call: dict[str, Any]) -> float:
    """Milliseconds of one block, from the first block's start to the last one's end."""
    blocks = transformer.blocks if hasattr(transformer, "blocks") else transformer.transformer_blocks
    marks: list[torch.cuda.Event] = []

    def mark(*_: Any) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        marks.append(event)

    handles = [blocks[0].register_forward_pre_hook(mark), blocks[-1].register_forward_hook(mark)]
    for _ in range(6):
        setting.barrier()
        transformer(**call)
    torch.cuda.synchronize()
    for handle in handles:
        handle.remove()
    return median(a.elapsed_time(b) for a, b in zip(marks[2::2], marks[3::2], strict=True)) / len(blocks)


def top_kernels(transformer: Any, call: dict[str, Any], say: Callable[[str], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        transformer(**call)
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda one: -one.device_time_total)[:22]
    for one in events:
        say(f"   {one.device_time_total / 1e3 / LAYERS:8.3f} ms a layer {one.count / LAYERS:6.1f} x  {one.key[:100]}")


@torch.no_grad()
def blocks(setting: Setting, models: Iterable[str]) -> None:
    dtype = torch.bfloat16
    parallel = ParallelConfig(cfg=1, ulysses=setting.ranks, ring=1, tp=1)
    groups = ProcessGroups(parallel, setting.device)
    for name in models:
        wan = name.startswith("Wan")
        pipe = dummy.pipeline(name, WanPipeline if wan else CogVideoXPipeline, device="cuda", num_layers=LAYERS)
        transformer = pipe.transformer
        call = inputs(pipe, 21 if wan else 13, dtype)
        small = inputs(pipe, 4, dtype)
        plain_small = transformer(**small, return_dict=False)[0]
        plain_ms = layer_ms(setting, transformer, call) if setting.ranks == 1 else float("nan")
        attachment = attach(transformer, groups)
        fused_ms = layer_ms(setting, transformer, call)
        fused_small = transformer(**small, return_dict=False)[0]
        video = 32760 if wan else 17550
        work = layer_work(transformer, 1 if wan else 2, video, 512 if wan else 226, setting.ranks)
        floor = layer_floor_ms(setting, work, dtype)
        setting.say(
            f"{name}, ulysses {setting.ranks}, {setting.profile}: floor {floor:.2f}, fodit {fused_ms:.2f} "
            f"({fused_ms / floor:.3f}), diffusers {plain_ms:.2f} ms a layer; notes {attachment.notes}"
        )
        top_kernels(transformer, call, setting.say)
        attachment.detach()
        if setting.ranks == 1:
            exact_inputs = {k: v.float() if torch.is_tensor(v) and v.dtype == dtype else v for k, v in small.items()}
            exact = transformer.float()(**exact_inputs, return_dict=False)[0]
            mine, theirs = relative(fused_small, exact), relative(plain_small, exact)
            setting.say(f"   error to fp32: fodit {mine:.3e}, diffusers {theirs:.3e}, ratio {mine / theirs:.3f}")
            assert mine <= 1.1 * theirs
        else:
            setting.say(f"   difference to diffusers: {relative(fused_small, plain_small):.2e}")
            assert relative(fused_small, plain_small) < 0.05
        del pipe, transformer, attachment
        torch.cuda.empty_cache()


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "rows"
    with torch.no_grad():
        assert rows.why_eager(torch.device("cuda")) is None, rows.why_eager(torch.device("cuda"))
        if what in ("rows", "heads"):
            compare(check_rows if what == "rows" else check_heads)
        elif what == "time":
            times()
        elif what == "blocks":
            blocks(Setting(sys.argv[2] if len(sys.argv) > 2 else "nvlink"), ("Wan2.1-T2V-14B", "CogVideoX-5b"))
        else:
            raise SystemExit(f"{what!r}: give rows, heads, time or blocks")


if __name__ == "__main__":
    main()
