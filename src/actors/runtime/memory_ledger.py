"""Memory of the process: its holders, and what the allocators say.

An object that holds rows for longer than a call adds a method to the ledger that tells how much
(`MemoryLedger.add`). To that `uses` adds what the allocators have given out beyond it since the
ledger was made: Arrow's pool, C's malloc, Python's objects. The process has more from the system:
memory that was freed and kept for reuse, or lost between blocks. It has a row, too, so that the sum
is what the process takes; `release_memory` gives back what can be given back.

A holder tells what it holds at the moment; nothing is remembered. What allocators and the system
say is known on Linux with glibc and CPython; elsewhere those rows are missing.
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
"""Heaps of C's malloc that all threads share."""
MMAP_BYTES: Final = 256 * 1024
"""Larger blocks go back to the system as soon as they are freed."""
RELEASE_MS: Final = 10_000
"""Interval at which a process that is a service alone releases memory."""
_ARENAS: Final = re.compile(rb"# bytes in allocated blocks\s+=\s+([\d,]+)")


class MemoryUse(msgspec.Struct, frozen=True):
    """Memory of one holder: `bytes_memory` in memory, `bytes_mapped` in files that are mapped."""

    kind: str
    id: str
    rows: int = 0
    bytes_memory: int = 0
    bytes_mapped: int = 0


Tell = Callable[[], Iterable[MemoryUse]]


class MemoryLedger:
    """The holders of a service. Holders may be added from any thread."""

    def __init__(self, *tell: Tell) -> None:
        self._holders = [WeakMethod(each) for each in tell]
        self._lock = threading.Lock()
        self._start = allocated_bytes()
        self._taken = anonymous_bytes()

    def add(self, tell: Tell) -> None:
        """Add a holder by a method of its own."""
        with self._lock:
            self._holders = [each for each in self._holders if each() is not None]
            # Weakly: a holder that is gone is gone from the ledger as well.
            self._holders.append(WeakMethod(tell))

    def held(self) -> list[MemoryUse]:
        """Return what holders tell: rows, in Arrow's pool or where they came from as bytes."""
        with self._lock:
            holders = [each() for each in self._holders]
        return [use for tell in holders if tell is not None for use in tell()]

    def uses(self) -> list[MemoryUse]:
        """Return what holders tell, what the allocators have given out besides, and what these
        keep for themselves."""
        found = self.held()
        given = {kind: now - self._start.get(kind, 0) for kind, now in allocated_bytes().items()}
        counted = sum(use.bytes_memory for use in found)
        for kind in ("arrow", "malloc"):  # rows that came as bytes lie in C's heap
            known = min(counted, max(0, given.get(kind, 0)))
            counted -= known
            if kind in given:
                given[kind] -= known
        found += (MemoryUse(kind, "", bytes_memory=max(0, more)) for kind, more in given.items())
        taken = anonymous_bytes() - self._taken
        kept = taken - sum(use.bytes_memory for use in found)
        return [*found, MemoryUse("allocator", "", bytes_memory=max(0, kept))]


def allocated_bytes() -> dict[str, int]:
    """Return the bytes that allocators have given out: of Arrow's pool, of Python's objects, and of
    C's malloc; what cannot be asked for is left out."""
    found = {"arrow": pa.total_allocated_bytes()}
    objects = _python_bytes()
    if objects is not None:
        found["python"] = objects
    if _MALLINFO is not None:
        heap = _MALLINFO()
        found["malloc"] = heap.uordblks + heap.hblkhd
        # Arrow's memory comes from malloc then, and must not count twice.
        if pa.default_memory_pool().backend_name == "system":
            found["malloc"] -= found["arrow"]
    return found


def anonymous_bytes() -> int:
    """Return the bytes of the process's memory that belongs to no file; 0 where that is not
    known."""
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
    """Have the allocators keep less of what is freed. Call it before threads begin, in a process
    that is a service alone; without glibc it does nothing.

    A service keeps rows for a while among rows that it frees at once. Arrow's own pool then holds
    many segments for a few live blocks each, and glibc an arena for each thread with its own.
    """
    if _MALLOPT is None:
        return
    # The system's pool: its free pages can be given back wherever they lie (`release_memory`).
    pa.set_memory_pool(pa.system_memory_pool())
    _MALLOPT(_ARENA_MAX, ARENAS)
    # Fixed: glibc would raise it to the largest block that was freed, and then keep such blocks.
    _MALLOPT(_MMAP_THRESHOLD, MMAP_BYTES)


def release_memory() -> None:
    """Give back to the system what allocators have freed and kept. It takes some ms."""
    pool = pa.default_memory_pool()
    pool.release_unused()
    # The system's pool has just trimmed the same heaps.
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
    """Return a function of the C library; None where it has none of that name."""
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
    """Return the bytes of small objects that are in use; None where that is not known."""
    if _OPEN is None or _STATISTICS is None:
        return None
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(_OPEN(ctypes.byref(text), ctypes.byref(size)))
    if not stream:
        return None
    try:
        # CPython tells them as text only.
        _STATISTICS(stream)
    finally:
        _CLOSE(stream)
    found = _ARENAS.search(text.value or b"")
    _FREE(text)
    return None if found is None else int(found[1].replace(b",", b""))
