"""Host memory that processes of one host share, pinned so that their GPUs can copy to and from it."""

import ctypes
import mmap
import os
import weakref

from fodit.kernels.binding import Library

PAGE = mmap.PAGESIZE
Place = tuple[str, tuple[int, int]]  # path of a file, and by what other processes know it again


def whole_pages(size: int) -> int:
    """`size` bytes, rounded up."""
    return -(-size // PAGE) * PAGE


class SharedFile:
    """A file in memory that other processes of this user open by its path. It takes no room in /dev/shm."""

    def __init__(self, size: int) -> None:
        self._descriptor = os.memfd_create("fodit")
        os.ftruncate(self._descriptor, size)

    @property
    def place(self) -> Place:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}", _identity(self._descriptor)

    def close(self) -> None:
        """No other process can open it any more; those that mapped it keep it."""
        os.close(self._descriptor)


class PinnedMapping:
    """A part of a shared file in this process's memory, pinned for the current device.

    Args:
        place: of the file.
        offset, size: multiples of the page size.

    Attributes:
        address, device_address: where it begins for the host and for the GPU.

    Raises:
        OSError: the file cannot be opened or mapped.
        KernelError: CUDA does not pin it.
    """

    def __init__(self, library: Library, place: Place, offset: int, size: int) -> None:
        path, identity = place
        descriptor = os.open(path, os.O_RDWR)
        try:
            if _identity(descriptor) != identity:  # in containers of one host processes may have the same numbers
                raise OSError(f"{path} is another file for this process: it runs in another container")
            self._memory = mmap.mmap(descriptor, size, offset=offset)
        finally:
            os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.device_address = library.host_register(self.address, size)
        self._closer = weakref.finalize(self, _unpin, library, self.address, self._memory)
        self._closer.atexit = False  # then CUDA ends with the process

    def close(self) -> None:
        """After all work of the device that uses it."""
        self._closer()


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _unpin(library: Library, address: int, memory: mmap.mmap) -> None:
    """While the memory is still mapped: that is why it is an argument."""
    library.host_unregister(address)
