"""Builds the stand-in for NCCL with gcc and puts it under CuPy, whose real bindings then run without a GPU.

A process has one NCCL: the stand-in, or the real one. ``load_standin`` must come before the first import of CuPy, so
import CuPy within tests and functions only; tests of the real library run in processes of their own.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = [
    "COMPILE",
    "LIBRARY_VARIABLE",
    "REPOSITORY",
    "STANDIN_VERSION",
    "build",
    "load_standin",
    "why_no_cupy",
    "why_not",
]

LIBRARY_VARIABLE = "MICRODDP_STANDIN"  # where child processes find the library that their parent built
STANDIN_VERSION = 29999  # what the stand-in's ncclGetVersion says; no NCCL will
COMPILE = ("gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC")
SOURCES = Path(__file__).parent
REPOSITORY = SOURCES.parents[1]  # where children start, so that they can import the tests


def why_no_cupy() -> str | None:
    """What keeps this machine from importing CuPy, and what to install; None if nothing does."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'microddp[cuda12]' (no GPU is needed for these tests)"
    return None


def why_not() -> str | None:
    """What keeps this machine from running the stand-in under CuPy, and what to install; None if nothing does."""
    if sys.platform != "linux":
        return "the stand-in for NCCL needs Linux"
    if LIBRARY_VARIABLE not in os.environ and shutil.which("gcc") is None:
        return "gcc, which builds the stand-in for NCCL, is not installed"
    return why_no_cupy()


def build(directory: Path) -> Path:
    """Compiles the stand-in into ``directory`` unless it is there already; processes may do so at the same time.

    Raises:
        RuntimeError: gcc is missing or failed; holds what it printed.
    """
    sources = sorted(SOURCES.glob("standin_*.c"))
    texts = b"".join(path.read_bytes() for path in [*sources, *sorted(SOURCES.glob("standin*.h"))])
    folder = directory / f"standin-{hashlib.sha256(texts + ' '.join(COMPILE).encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnccl.so.2"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released as the file closes
        if not library.exists():
            _compile(sources, library)
    return library


def _compile(sources: list[Path], library: Path) -> None:
    if shutil.which("gcc") is None:
        raise RuntimeError("the stand-in for NCCL is built with gcc, which is not installed")
    unfinished = library.with_suffix(".unfinished")
    command = [*COMPILE, "-Wl,-soname,libnccl.so.2", *map(str, sources), "-o", str(unfinished), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"gcc failed with {done.returncode}:\n{done.stderr}")
    unfinished.rename(library)


@functools.lru_cache(maxsize=1)
def load_standin(library: Path | None = None) -> ctypes.CDLL:
    """Loads the stand-in, makes CuPy use it, and returns it with its functions declared.

    Args:
        library: what ``build`` returned; by default what ``MICRODDP_STANDIN`` names, or else it is built.

    Raises:
        RuntimeError: CuPy uses another NCCL, as it was imported before; or the library cannot be built.
    """
    if library is None:
        named = os.environ.get(LIBRARY_VARIABLE)
        library = Path(named) if named else build(Path(tempfile.gettempdir()) / f"microddp-{os.getuid()}")
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    from cupy.cuda import nccl  # only now: see above

    if not nccl.available or nccl.get_version() != STANDIN_VERSION:
        found = nccl.get_version() if nccl.available else "none"
        raise RuntimeError(
            f"CuPy uses NCCL {found}, not the stand-in: it, or another library that brings NCCL, was imported before"
            " load_standin(). Import CuPy only after it, or run in a process of its own."
        )
    os.environ[LIBRARY_VARIABLE] = str(library)
    _declare(loaded)
    return loaded


def _declare(library: ctypes.CDLL) -> None:
    handle = ctypes.c_void_p
    library.standin_issue.argtypes, library.standin_issue.restype = [handle], ctypes.c_uint64
    library.standin_run.argtypes, library.standin_run.restype = [handle, ctypes.c_uint64], ctypes.c_int
    library.standin_free.argtypes, library.standin_free.restype = [handle], None
    library.standin_captured.argtypes, library.standin_captured.restype = [handle], None
    library.standin_counters.argtypes = [handle, ctypes.POINTER(ctypes.c_uint64)]
    library.standin_set_enqueue.restype = None
    library.ncclGetLastError.argtypes, library.ncclGetLastError.restype = [handle], ctypes.c_char_p
