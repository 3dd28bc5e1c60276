"""The kernel library without a GPU: it compiles for all architectures, loads, and refuses politely."""

import ctypes
import subprocess
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fodit
from fodit.doctor import harmful_environment
from fodit.kernels import build, gemm
from fodit.kernels.binding import (
    ABI,
    HANDLE_BYTES,
    SIGNATURES,
    Family,
    Gemm,
    Kernel,
    KernelError,
    Library,
    Post,
    load,
)
from fodit.ops import executor
from fodit.ops.executor import choose_kernel
from fodit.plan import all_reduce_plan

INTERFACE = sorted(f"fodit_{name}" for name in (*SIGNATURES, "abi", "build_info", "kernels", "last_error"))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    """Built from the sources, for all five architectures."""
    try:
        build.find_nvcc()
        build.find_cutlass()
    except build.BuildError as error:
        pytest.skip(str(error))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of kernels that would be slow
        return Library(build.build(tmp_path_factory.mktemp("kernels")))


def test_library_has_all_architectures(library):
    info = library.build_info
    assert all(arch in info for arch in build.DEFAULT_ARCHS.split(",")), info
    assert {kernel.family for kernel in library.kernels} == set(Family)
    assert len({kernel.name for kernel in library.kernels}) == len(library.kernels)
    for arch in (80, 86, 89, 90, 120):
        assert any(kernel.min_arch <= arch <= kernel.max_arch for kernel in library.kernels), arch


def test_library_exports_exactly_its_interface(library):
    listed = subprocess.run(["nm", "-D", "--defined-only", library.path], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in listed.stdout.splitlines() if line.split()[-2] in "TDBRV"]
    assert sorted(symbols) == INTERFACE
    needed = subprocess.run(["objdump", "-p", library.path], capture_output=True, text=True, check=True).stdout
    for other in ("libcuda.so", "libnccl", "libtorch", "libcudart"):
        assert other not in needed


@pytest.mark.parametrize(
    "change, words",
    [
        ({"abi": ABI + 1}, "version"),
        ({"dtype": 7}, "dtype 7 is neither bf16"),
        ({"act": 9}, "act 9"),
        ({"k": 12}, "K a positive multiple of 8"),
        ({"lda": 8}, "lda is 8"),
        ({"a": 8}, "16-byte aligned"),
        ({"weights": 5}, "5 weights were given, 1 to 4 work"),
        ({"sms": -1}, "negative"),
        ({"kernel": 10_000}, "there is no kernel 10000"),
    ],
)
def test_bad_arguments_are_refused(library, change, words):
    arguments = Gemm(abi=ABI, m=16, k=16, lda=16, weights=1, a=16, out=16, program=16, tiles=1)
    arguments.n[0], arguments.ldw[0], arguments.w[0] = 16, 16, 16
    for name, value in change.items():
        setattr(arguments, name, value)
    with pytest.raises(KernelError, match=words):
        library.gemm(arguments, 0)


def test_posts_reach_who_collects_them(library):
    post = Post()
    address = ctypes.addressof(post)
    assert library.collect(address, 1, 0.01) is None
    handle = bytes(range(HANDLE_BYTES))

    def say() -> None:
        post.handle[:], post.offset = handle, 1 << 40
        post.number = 1

    threading.Timer(0.05, say).start()
    assert library.collect(address, 1, 10.0) == (handle, 1 << 40)
    assert library.collect(address, 2, 0.01) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name, arguments",
    [
        ("host_register", (4096, 4096)),
        ("grant", (0, 1, 4096, 0, 4096)),
        ("open", (bytes(HANDLE_BYTES),)),
        ("push", (0, 4096, 8192, 16, 4096, 4096, 1)),
    ],
)
def test_exchanges_without_a_gpu_are_refused(library, name, arguments):
    with pytest.raises(KernelError, match="fodit_"):
        getattr(library, name)(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so(library):
    arguments = Gemm(abi=ABI, m=16, k=16, lda=16, weights=1, a=16, out=16, program=16, tiles=1)
    arguments.n[0], arguments.ldw[0], arguments.w[0] = 16, 16, 16
    with pytest.raises(KernelError, match="CUDA"):
        library.gemm(arguments, 0)
    with pytest.raises(KernelError, match="fodit_wait"):
        library.wait(0, 16, 1)


def test_another_file_is_no_library(tmp_path):
    file = tmp_path / "libfodit_kernels.so"
    file.write_text("no library")
    with pytest.raises(KernelError, match="does not load"):
        Library(file)


def test_the_struct_is_the_headers(library, tmp_path):
    """ctypes' layout is the compiler's."""
    source = tmp_path / "sizes.c"
    header = Path(build.__file__).resolve().parents[2] / "csrc" / "fodit.h"
    names = [name for name, _ in Gemm._fields_]
    offsets = ", ".join(f"offsetof(FoditGemm, {name})" for name in names)
    source.write_text(
        f'#include <stddef.h>\n#include "{header}"\nunsigned long sizes[] = {{sizeof(FoditGemm), {offsets}}};\n'
    )
    shared = tmp_path / "sizes.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(shared)], check=True)
    sizes = (ctypes.c_ulong * (len(names) + 1)).in_dll(ctypes.CDLL(str(shared)), "sizes")
    assert list(sizes) == [ctypes.sizeof(Gemm), *(getattr(Gemm, name).offset for name in names)]


@pytest.fixture
def fresh(monkeypatch):
    """Answers of this test are not kept."""
    monkeypatch.delenv("FODIT_KERNEL", raising=False)
    kept = (load, gemm.kernels_for, choose_kernel)
    for function in kept:
        function.cache_clear()
    yield monkeypatch
    for function in kept:
        function.cache_clear()


def test_why_there_are_no_kernels(fresh, tmp_path):
    fresh.setenv("FODIT_KERNEL_LIBRARY", str(tmp_path / "none.so"))
    assert "none.so is not there; `make kernels`" in load()
    assert "none.so is not there" in gemm.kernels_for(torch.device("cuda", 0))
    assert gemm.kernels_for(torch.device("cpu")) == "the device is cpu"
    assert "none.so is not there" in fodit.doctor()
    gemm.kernels_for.cache_clear()
    fresh.setenv("FODIT_KERNEL", "torch")
    assert gemm.kernels_for(torch.device("cuda", 0)) == "FODIT_KERNEL=torch"
    gemm.kernels_for.cache_clear()
    fresh.setenv("FODIT_KERNEL", "volta")
    assert "FODIT_KERNEL=volta is none of ampere, hopper, torch" in gemm.kernels_for(torch.device("cuda", 0))


def test_kernels_of_a_device(fresh, library):
    fresh.setenv("FODIT_KERNEL_LIBRARY", str(library.path))
    cuda = torch.device("cuda", 0)
    kib = 1024
    for capability, name, shared, wanted in [
        ((9, 0), "", 227 * kib, Family.HOPPER),
        ((9, 0), "ampere", 227 * kib, None),  # compiled for 90a, not for 90
        ((8, 0), "", 163 * kib, Family.AMPERE),
        ((8, 9), "", 99 * kib, Family.AMPERE),
        ((12, 0), "", 99 * kib, Family.AMPERE),
        ((12, 1), "", 99 * kib, Family.AMPERE),
        ((10, 0), "", 227 * kib, None),
        ((8, 6), "hopper", 99 * kib, None),
        ((7, 5), "", 64 * kib, None),
    ]:
        fresh.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        offered = SimpleNamespace(shared_memory_per_block_optin=shared)
        fresh.setattr(torch.cuda, "get_device_properties", lambda _, o=offered: o)
        fresh.setenv("FODIT_KERNEL", name)
        gemm.kernels_for.cache_clear()
        found = gemm.kernels_for(cuda)
        if wanted is None:
            assert f"for compute capability {capability[0]}.{capability[1]}" in found
        else:
            assert {kernel.family for kernel in found} == {wanted}
            assert max(kernel.shared_bytes for kernel in found) <= shared
            ring = {kernel.shared_bytes for kernel in library.kernels if kernel.family == Family.AMPERE}
            assert any(size > 99 * kib for size in ring), "some kernels are too large for consumer cards"


KERNELS = (
    Kernel(0, "wide", Family.AMPERE, 128, 256, 32, 4, 80, 90),
    Kernel(1, "square", Family.AMPERE, 128, 128, 32, 4, 80, 90),
    Kernel(2, "small", Family.AMPERE, 64, 64, 32, 4, 80, 90),
)


def test_operands_that_kernels_refuse(fresh):
    fresh.setattr(gemm, "kernels_for", lambda _: KERNELS)
    good = torch.zeros(16, 32, dtype=torch.bfloat16)
    assert gemm.refusal(good, [good]) is None
    assert gemm.refusal(good[:, :24], [good[:, :24]]) is None
    assert "float32" in gemm.refusal(good.float(), [good.float()])
    assert "5 weights" in gemm.refusal(good, [good] * 5)
    assert "no rows" in gemm.refusal(good[:0], [good])
    assert "multiples of 8" in gemm.refusal(good[:, :12], [good[:, :12]])
    assert "a weight (16, 24)" in gemm.refusal(good[:, :24], [good[:, 4:28]])
    assert "strides" in gemm.refusal(good.t(), [good])


def test_chosen_tile(fresh):
    fresh.setattr(gemm, "kernels_for", lambda _: KERNELS)
    fresh.setattr(executor, "failure", lambda *_: None)
    device = torch.device("cpu")
    for rows, width, wanted in [(16384, 5120, "wide"), (16384, 640, "square"), (64, 64, "small"), (1, 5000, "small")]:
        kernel, wrong = choose_kernel(all_reduce_plan(rows, width, 1, 1), device, torch.bfloat16)
        assert kernel.name == wanted and wrong == ()


def test_compilers_can_trace_the_op():
    with FakeTensorMode():
        a, out = torch.empty(4, 8), torch.empty(16)
        counters = torch.empty(2, dtype=torch.int32)
        program = torch.empty(1, 12, dtype=torch.int32)
        assert gemm.signaling_gemm(a, [a], [None], out, program, counters, 0, 0, 0) is None


def test_harmful_environment(monkeypatch):
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_NCCL_ENABLE_TIMING"):
        monkeypatch.delenv(name, raising=False)
    assert harmful_environment() == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", "1")
    first, second = harmful_environment()
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue" in first and "unset it" in first
    assert "TORCH_NCCL_ENABLE_TIMING=1" in second
    assert f"warning: {first}" in fodit.doctor()
