"""Accounts for the memory of the process: by holder, and by allocator.

An object that holds rows for longer than a call registers a method that reports how much it holds
(`MemoryLedger.add`). `uses` adds what the allocators (Arrow's pool, C's malloc, Python's objects)
have given out in addition since the ledger was created. The process has even more from the system:
memory that was freed and is kept for reuse, and fragmentation. It is reported as well, so that the
sum is what the process uses; `release_memory` returns what it can to the system.

Holders report what they hold at this moment; the ledger stores nothing. The numbers of allocators
and the system are available on Linux with glibc and CPython; elsewhere their rows are missing.
"""

from __future__ import annotations

import ctypes
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final
from weakref import WeakMethod

import msgspec
import pyarrow as pa

ARENAS: Final = 2
"""Number of malloc's arenas, which all threads share."""
MMAP_BYTES: Final = 256 * 1024
"""Larger blocks are returned to the system as soon as they are freed."""
RELEASE_MS: Final = 10_000
"""Interval at which a process that only runs a service calls `release_memory`."""
_ARENAS: Final = re.compile(rb"# bytes in allocated blocks\s+=\s+([\d,]+)")


class MemoryUse(msgspec.Struct, frozen=True):
    """Memory of one holder: `bytes_memory` in memory, `bytes_mapped` in mapped files."""

    kind: str
    id: str
    rows: int = 0
    bytes_memory: int = 0
    bytes_mapped: int = 0


Tell = Callable[[], Iterable[MemoryUse]]


class MemoryLedger:
    """The holders of memory in a service. Holders may be added from any thread."""

    def __init__(self, *tell: Tell) -> None:
        self._holders = [WeakMethod(each) for each in tell]
        """Weak references to the holders' methods; dead ones are removed by `add`."""
        self._lock = threading.Lock()
        self._start = allocated_bytes()
        """Bytes allocated when the ledger was created."""
        self._taken = anonymous_bytes()
        """Anonymous memory of the process when the ledger was created."""

    def add(self, tell: Tell) -> None:
        """Add a holder by its bound method that reports what it holds."""
        with self._lock:
            self._holders = [each for each in self._holders if each() is not None]
            # A weak reference, so that a holder that is gone disappears from the ledger as well.
            self._holders.append(WeakMethod(tell))

    def held(self) -> list[MemoryUse]:
        """Return what the holders report."""
        with self._lock:
            holders = [each() for each in self._holders]
        return [use for tell in holders if tell is not None for use in tell()]

    def uses(self) -> list[MemoryUse]:
        """Return what the holders report, what the allocators have given out in addition, and what
        they keep unused."""
        found = self.held()
        given = {kind: now - self._start.get(kind, 0) for kind, now in allocated_bytes().items()}
        counted = sum(use.bytes_memory for use in found)
        for kind in ("arrow", "malloc"):  # rows that arrived as bytes are in C's heap
            known = min(counted, max(0, given.get(kind, 0)))
            counted -= known
            if kind in given:
                given[kind] -= known
        found += (MemoryUse(kind, "", bytes_memory=max(0, more)) for kind, more in given.items())
        taken = anonymous_bytes() - self._taken
        kept = taken - sum(use.bytes_memory for use in found)
        return [*found, MemoryUse("allocator", "", bytes_memory=max(0, kept))]


def allocated_bytes() -> dict[str, int]:
    """Return the bytes that each allocator (arrow, python, malloc) has given out.

    Allocators whose number is not available are left out.
    """
    found = {"arrow": pa.total_allocated_bytes()}
    objects = _python_bytes()
    if objects is not None:
        found["python"] = objects
    if _MALLINFO is not None:
        heap = _MALLINFO()
        found["malloc"] = heap.uordblks + heap.hblkhd
        # Arrow's memory comes from malloc in this case and must not count twice.
        if pa.default_memory_pool().backend_name == "system":
            found["malloc"] -= found["arrow"]
    return found


def anonymous_bytes() -> int:
    """Return the resident memory of the process that belongs to no file; 0 if unknown."""
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:
        return 0
    return (int(resident) - int(shared)) * resource.getpagesize()


def resident_bytes(pid: int) -> int:
    """Return the memory of another process, files that it has mapped included; 0 where that is not
    known."""
    try:
        resident = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):  # it has ended, or this is not Linux
        return 0
    return int(resident) * resource.getpagesize()


def limit_allocators() -> None:
    """Make the allocators keep less freed memory.

    Call it before threads start, in a process that only runs a service. Does nothing without glibc.

    A service keeps some rows for a while among many that it frees quickly. Arrow's own pool would
    keep many segments for a few live blocks each, and glibc would do the same in an arena for each
    thread.
    """
    if _MALLOPT is None:
        return
    # The system's pool, because all its free pages can be returned (`release_memory`).
    pa.set_memory_pool(pa.system_memory_pool())
    _MALLOPT(_ARENA_MAX, ARENAS)
    # Fix the threshold: glibc would raise it to the largest block freed, and keep such blocks.
    _MALLOPT(_MMAP_THRESHOLD, MMAP_BYTES)


def release_memory() -> None:
    """Return freed memory that the allocators keep to the system. Takes some ms."""
    pool = pa.default_memory_pool()
    pool.release_unused()
    # If it is the system's pool, it has just trimmed the same heaps.
    if _TRIM is not None and pool.backend_name != "system":
        _TRIM(0)


class _Mallinfo(ctypes.Structure):
    """Mirrors glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _of_libc(name: str, returns: Any) -> Any:
    """Return a function of the C library; None if the library does not have it."""
    function = getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
    if function is not None:
        function.restype = returns
    return function


_MALLINFO: Final = _of_libc("mallinfo2", _Mallinfo)
_TRIM: Final = _of_libc("malloc_trim", ctypes.c_int)
_MALLOPT: Final = _of_libc("mallopt", ctypes.c_int)
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8
_OPEN: Final = _of_libc("open_memstream", ctypes.c_void_p)
_CLOSE: Final = _of_libc("fclose", ctypes.c_int)
_FREE: Final = _of_libc("free", None)
_STATISTICS: Final = getattr(ctypes.pythonapi, "_PyObject_DebugMallocStats", None)


def _python_bytes() -> int | None:
    """Return the bytes of Python's small objects that are in use; None if unknown."""
    if _OPEN is None or _STATISTICS is None:
        return None
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(_OPEN(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        return None
    try:
        # CPython reports this number only as text.
        _STATISTICS(stream)
    finally:
        _CLOSE(stream)
    found = _ARENAS.search(text.value or b"")
    _FREE(text)
    return None if found is None else int(found[1].replace(b",", b""))
