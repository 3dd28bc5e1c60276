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
    tile_k: int
    stages: int
    min_arch: int
    max_arch: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the main loop's stages, the least that a block needs."""
        return self.stages * (self.tile_m + self.tile_n) * self.tile_k * 2


def _kernel(index: int, found: _Kernel) -> Kernel:
    return Kernel(
        index,
        found.name.decode(),
        Family(found.family),
        found.tile_m,
        found.tile_n,
        found.tile_k,
        found.stages,
        found.min_arch,
        found.max_arch,
    )


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
        self.kernels = tuple(_kernel(i, k) for i, k in enumerate(found))

    @property
    def build_info(self) -> str:
        return self._lib.fodit_build_info().decode()

    @property
    def architectures(self) -> tuple[str, ...]:
        """That it was compiled for, such as 89 or 90a."""
        return tuple(self.build_info.partition(";")[0].removeprefix("architectures ").replace(",", " ").split())

    def kernels_on(self, capability: tuple[int, int], shared_bytes: int) -> tuple[Kernel, ...]:
        """The kernels that run on a device of this compute capability with this shared memory for a block.

        Machine code runs on its own major version from its own minor version on; that of 90a on 9.0 alone.
        """
        major, minor = capability
        plain = [divmod(int(arch), 10) for arch in self.architectures if arch.isdigit()]
        compiled = {
            Family.AMPERE: any(arch[0] == major and arch[1] <= minor for arch in plain),
            Family.HOPPER: capability == (9, 0) and "90a" in self.architectures,
        }
        return tuple(
            one
            for one in self.kernels
            if compiled[one.family]
            and one.min_arch <= 10 * major + minor <= one.max_arch
            and one.shared_bytes <= shared_bytes
        )

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
