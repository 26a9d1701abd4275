"""What there is: versions, the GPU, and that one compiled kernel gives the right bits."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import time
from typing import Any, Final

import torch

from bench.device.records import Context

__all__ = ["run"]

_PACKAGES: Final = ("torch", "triton", "numpy", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nccl-cu13", "nvidia-nccl-cu12")
_QUERY: Final = ("driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
_MODULES: Final = (
    "microddp",
    "microddp.transport.nccl",
    "microddp_kernels.launchers.compiled",
    "cupy",
    "cupy.cuda.nccl",
)


def run(context: Context) -> None:
    """Reports versions, imports, then the GPU."""
    versions = _versions()
    context.note("versions", versions)
    shown = [f"{name} {versions[name]}" for name in ("python", "torch", "triton") if name in versions]
    shown += [f"{name} {version}" for name, version in versions.items() if name.startswith(("cupy", "nvidia"))]
    context.summary(", ".join(shown))
    for name in _MODULES:
        _import(context, name)
    nccl = _nccl_versions()
    context.note("nccl", nccl)
    if not torch.cuda.is_available():
        context.note("gpu", None)
        context.summary(f"no GPU; NCCL by CuPy {nccl.get('cupy', 'none')}")
        if not context.stand_in:
            context.check("a GPU", False, f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees none")
        return
    _describe_gpu(context, nccl)
    context.step("first kernel")
    context.check("first kernel", *_first_kernel(context))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda of torch": str(torch.version.cuda)}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _import(context: Context, name: str) -> None:
    """Imports a module; on a stand-in one that is missing is only noted."""
    context.step(f"import {name}")
    started = time.perf_counter()
    try:
        importlib.import_module(name)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if context.stand_in:
            context.note(f"import {name}", text)
        else:
            context.check(f"import {name}", False, text)
        return
    context.check(f"import {name}", True)
    context.note(f"import {name}", {"seconds": time.perf_counter() - started})


def _nccl_versions() -> dict[str, Any]:
    """As torch and CuPy see it: one process should hold one library."""
    found: dict[str, Any] = {}
    try:
        from cupy.cuda import nccl

        found["cupy"] = nccl.get_version()
    except Exception as error:
        found["cupy"] = f"{type(error).__name__}: {error}"
    try:
        found["torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception as error:  # a build without NCCL
        found["torch"] = f"{type(error).__name__}: {error}"
    return found


def _describe_gpu(context: Context, nccl: dict[str, Any]) -> None:
    context.step("GPU")
    properties = torch.cuda.get_device_properties(0)
    names = ("name", "major", "minor", "total_memory", "multi_processor_count", "L2_cache_size", "uuid")
    gpu = {name: str(getattr(properties, name)) for name in names if hasattr(properties, name)}
    smi = _smi()
    context.note("gpu", gpu)
    context.note("nvidia-smi", smi)
    context.note("count", torch.cuda.device_count())
    l2_mib = int(gpu.get("L2_cache_size", 0)) / 2**20
    context.summary(
        f"{gpu['name']}, sm_{gpu['major']}{gpu['minor']}, {properties.total_memory / 2**30:.0f} GiB, "
        f"{properties.multi_processor_count} SMs, L2 {l2_mib:.0f} MiB, driver {smi.get('driver_version', '?')}, "
        f"clocks {smi.get('clocks.sm', '?')} / {smi.get('clocks.mem', '?')}, "
        f"NCCL {nccl['torch']} (torch), {nccl['cupy']} (CuPy)"
    )


def _smi() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; only asked, nothing is set."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    return dict(zip(_QUERY, (each.strip() for each in done.stdout.strip().split(","))))


def _first_kernel(context: Context) -> tuple[bool, str]:
    """A sum of two float32 tensors by the compiled launcher, against torch on the CPU."""
    from microddp_kernels import CombineSpec, get_op, launcher_for

    device = torch.device("cuda", 0)
    first, second = (torch.randn(4099, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    out = torch.empty(4099, device=device)
    started = time.perf_counter()
    operands = [first.to(device), second.to(device)]
    launcher_for(device).combine(out, operands, CombineSpec(get_op("sum")))
    found = out.cpu()
    context.note("first kernel, seconds", time.perf_counter() - started)
    wrong = int((found != first + second).sum())
    return wrong == 0, f"{wrong} of 4099 elements of a float32 sum are wrong" if wrong else ""
