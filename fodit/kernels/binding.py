"""The compiled kernel library (csrc/fodit.h) through ctypes. It loads next to any torch, with or without a GPU."""

import ctypes
import os
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path

ABI = 1
MAX_WEIGHTS = 4
FILE = "libfodit_kernels.so"
_int = ctypes.c_int32
_pointer = ctypes.c_void_p


class Family(IntEnum):
    AMPERE = 0
    HOPPER = 1


class Gemm(ctypes.Structure):
    """FoditGemm."""

    _fields_ = [
        *((name, _int) for name in ("abi", "dtype", "act", "kernel", "m", "k", "lda", "weights")),
        ("n", _int * MAX_WEIGHTS),
        ("ldw", _int * MAX_WEIGHTS),
        *((name, _int) for name in ("tiles", "sms")),
        ("a", _pointer),
        ("w", _pointer * MAX_WEIGHTS),
        ("bias", _pointer * MAX_WEIGHTS),
        *((name, _pointer) for name in ("out", "program", "counters", "ticket")),
    ]


class _Kernel(ctypes.Structure):
    """FoditKernel."""

    _fields_ = [
        *((name, _int) for name in ("family", "tile_m", "tile_n", "tile_k", "stages", "threads")),
        *((name, _int) for name in ("min_arch", "max_arch")),
        ("name", ctypes.c_char * 48),
    ]


@dataclass(frozen=True)
class Kernel:
    """One kernel of the library: its index there, its tile shape and the architectures it runs on (90 is 9.0)."""

    index: int
    name: str
    family: Family
    tile_m: int
    tile_n: int
    min_arch: int
    max_arch: int


class KernelError(RuntimeError):
    """A call of the kernel library failed; the message names the call, its arguments and what CUDA said."""


class Library:
    """The loaded library.

    Raises:
        KernelError: the file does not load or is of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelError(f"{path} does not load: {error}") from error
        self._lib.fodit_last_error.restype = ctypes.c_char_p
        self._lib.fodit_build_info.restype = ctypes.c_char_p
        self._lib.fodit_gemm.argtypes = [ctypes.POINTER(Gemm), _pointer]
        self._lib.fodit_wait.argtypes = [_pointer, _pointer, _int]
        if self._lib.fodit_abi() != ABI:
            raise KernelError(f"{path} has interface {self._lib.fodit_abi()}, fodit needs {ABI}: build it again")
        count = self._lib.fodit_kernels(None, 0)
        found = (_Kernel * count)()
        self._lib.fodit_kernels(found, count)
        self.kernels = tuple(
            Kernel(i, k.name.decode(), Family(k.family), k.tile_m, k.tile_n, k.min_arch, k.max_arch)
            for i, k in enumerate(found)
        )

    @property
    def build_info(self) -> str:
        return self._lib.fodit_build_info().decode()

    def gemm(self, arguments: Gemm, stream: int) -> None:
        """Enqueue a product on a stream (its cudaStream_t)."""
        if self._lib.fodit_gemm(ctypes.byref(arguments), stream) != 0:
            raise KernelError(self._lib.fodit_last_error().decode())

    def wait(self, stream: int, counter: int, target: int) -> None:
        """Let a stream wait until the counter at this device address is at least `target`. Takes no SM."""
        if self._lib.fodit_wait(stream, counter, target) != 0:
            raise KernelError(self._lib.fodit_last_error().decode())


@lru_cache(maxsize=1)
def load() -> Library | str:
    """The library, or the reason why there is none. `FODIT_KERNEL_LIBRARY` names a file elsewhere."""
    given = os.environ.get("FODIT_KERNEL_LIBRARY")
    path = Path(given) if given else Path(__file__).parent / FILE
    if not path.is_file():
        return f"{path} is not there; `make kernels` (or `pip install .` with nvcc) builds it"
    try:
        return Library(path)
    except KernelError as error:
        return str(error)
