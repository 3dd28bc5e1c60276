"""The compiled kernel library (csrc/fodit.h) through ctypes. It loads next to any torch, with or without a GPU."""

import ctypes
import os
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

ABI = 3
MAX_WEIGHTS = 4
HANDLE_BYTES = 64
FILE = "libfodit_kernels.so"
_int = ctypes.c_int32
_long = ctypes.c_int64
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
        *((name, _pointer) for name in ("out", "program", "counters", "ticket", "addend")),
        ("addend_stride", _long),
        *((name, _int) for name in ("addends", "unused")),
    ]


class _Kernel(ctypes.Structure):
    """FoditKernel."""

    _fields_ = [
        *((name, _int) for name in ("family", "tile_m", "tile_n", "tile_k", "stages", "threads")),
        *((name, _int) for name in ("min_arch", "max_arch")),
        ("name", ctypes.c_char * 48),
    ]


class Lane(ctypes.Structure):
    """FoditLane: one direction between two processes, a ring of slots in host memory."""

    _fields_ = [
        *((name, _pointer) for name in ("ring", "filled", "freed")),
        ("slot_bytes", _long),
        *((name, ctypes.c_uint32) for name in ("slots", "moved")),
    ]


class Post(ctypes.Structure):
    """FoditPost: where a message may be stored, told to the sender through host memory."""

    _fields_ = [("number", _long), ("offset", _long), ("handle", ctypes.c_uint8 * HANDLE_BYTES), ("_", _long * 6)]


# Arguments of the library's functions that return 0, or not and leave a message.
SIGNATURES: dict[str, list[Any]] = {
    "gemm": [ctypes.POINTER(Gemm), _pointer],
    "stream_sms": [_pointer, ctypes.POINTER(_int)],
    "wait": [_pointer, _pointer, _int],
    "host_register": [_pointer, _long, ctypes.POINTER(_pointer)],
    "host_unregister": [_pointer],
    "import": [_pointer, ctypes.POINTER(_pointer)],
    "unimport": [_pointer],
    "stage": [ctypes.POINTER(Lane), _pointer, _long, ctypes.POINTER(Lane), _pointer, _long, _pointer, _pointer],
    "grant": [_pointer, _long, _pointer, _pointer, _pointer],
    "collect": [_pointer, _long, ctypes.c_double, _pointer, ctypes.POINTER(_long)],
    "push": [_pointer, _pointer, _pointer, _long, _pointer, _pointer, _long],
}


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
        if self._lib.fodit_abi() != ABI:
            raise KernelError(f"{path} has interface {self._lib.fodit_abi()}, fodit needs {ABI}: build it again")
        self._functions = {name: getattr(self._lib, f"fodit_{name}") for name in SIGNATURES}
        for name, arguments in SIGNATURES.items():
            self._functions[name].argtypes = arguments
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
        self._call("gemm", ctypes.byref(arguments), stream)

    def stream_sms(self, stream: int) -> int:
        """SMs that a stream's kernels can run on; fewer than the device has in a green context."""
        found = _int()
        self._call("stream_sms", stream, ctypes.byref(found))
        return found.value

    def wait(self, stream: int, counter: int, target: int) -> None:
        """Let a stream wait until the counter at this device address is at least `target`. Takes no SM."""
        self._call("wait", stream, counter, target)

    def host_register(self, address: int, size: int) -> int:
        """Pin host memory. Its address for the current device."""
        found = _pointer()
        self._call("host_register", address, size, ctypes.byref(found))
        return found.value or 0

    def host_unregister(self, address: int) -> None:
        self._call("host_unregister", address)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation; where it begins for the current device."""
        found = _pointer()
        self._call("import", handle, ctypes.byref(found))
        return found.value or 0

    def close(self, address: int) -> None:
        """Unmap what `open` mapped there."""
        self._call("unimport", address)

    def stage(
        self, out: Lane, source: int, out_bytes: int, into: Lane, to: int, in_bytes: int, sending: int, receiving: int
    ) -> None:
        """A message to another process and one from it, through the lanes' rings, on two streams."""
        lanes = ctypes.byref(out), ctypes.byref(into)
        self._call("stage", lanes[0], source, out_bytes, lanes[1], to, in_bytes, sending, receiving)

    def grant(self, post: int, number: int, address: int | None, stream: int, freed: int) -> None:
        """Say in the `Post` at this host address, and in the counter `freed` once the stream is there, that message
        `number` may be stored at this device address; None for an empty message."""
        self._call("grant", post, number, address, stream, freed)

    def collect(self, post: int, number: int, timeout_s: float) -> tuple[bytes, int] | None:
        """The handle of an allocation and the offset in it that the `Post` at this host address says for message
        `number`, or None if it does not say so in time."""
        handle, offset = ctypes.create_string_buffer(HANDLE_BYTES), _long()
        there = self._functions["collect"](post, number, timeout_s, handle, ctypes.byref(offset)) == 0
        return (handle.raw, offset.value) if there else None

    def push(self, stream: int, to: int, source: int, size: int, freed: int, filled: int, number: int) -> None:
        """Copy message `number` into another process's memory when `freed` says so, then say so in `filled`."""
        self._call("push", stream, to, source, size, freed, filled, number)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._functions[name](*arguments) != 0:
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
