"""The kernel that rewrites pointers in an uploaded graph, built on the user's machine from wheels alone.

NVRTC compiles it, nvJitLink links it with libcudadevrt.a of the CUDA runtime wheel: there is no nvcc.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch

from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.nodes import checked, driver

__all__ = ["SLOT", "TABLE", "find_device_runtime", "updater_kernel"]

TABLE = 400
"""Addresses that travel by value with one launch: a kernel's parameters may take 4096 bytes."""

SLOT = [("node", "<u8"), ("offset", "<u8"), ("row", "<u4"), ("origin", "<u4"), ("delta", "<u8")]
"""The device's `Slot` as NumPy fields."""

# An address of 0 stands for an input that stays where it is. `error` is pinned host memory.
_SOURCE = f"""
struct Slot {{
    cudaGraphDeviceNode_t node;
    unsigned long long offset;
    unsigned int row;
    unsigned int origin;
    unsigned long long delta;
}};
struct Table {{ unsigned long long address[{TABLE}]; }};

extern "C" __global__ void retarget(
    const Slot* slots, int count, const __grid_constant__ Table table, volatile int* error)
{{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    Slot slot = slots[i];
    unsigned long long address = table.address[slot.row];
    if (address == 0) return;
    unsigned long long value = address + slot.delta;
    cudaError_t status = cudaGraphKernelNodeSetParam(slot.node, slot.offset, &value, sizeof(value));
    if (status != cudaSuccess) {{
        error[1] = (int)slot.origin;
        __threadfence_system();
        error[0] = (int)status;
    }}
}}
""".encode()

_cubins: dict[str, bytes] = {}
_kernels: dict[int, Any] = {}
_modules: list[Any] = []  # a kernel lives as long as its module


def updater_kernel(device: torch.device) -> Any:
    """The kernel, loaded in the device's primary context; built once a process and architecture.

    Raises:
        IndirectionUnavailable: a library that compiles or links it is missing, or the build failed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    if index not in _kernels:
        d = driver()
        major, minor = torch.cuda.get_device_capability(index)
        architecture = f"sm_{major}{minor}"
        if architecture not in _cubins:
            _cubins[architecture] = _build(architecture)
        with torch.cuda.device(index):
            torch.cuda.synchronize()  # makes the context current in this thread
            try:
                module = checked(d.cuModuleLoadData(_cubins[architecture]), "loading the pointer updater")
                kernel = checked(d.cuModuleGetFunction(module, b"retarget"), "finding the pointer updater")
            except RuntimeError as error:
                raise IndirectionUnavailable(f"pointers cannot be patched on the device: {error}") from error
        _modules.append(module)
        _kernels[index] = kernel
    return _kernels[index]


def find_device_runtime() -> Path | None:
    """`libcudadevrt.a` of the CUDA runtime wheel, of conda or of an installed toolkit."""
    packages = [*sys.path, *site.getsitepackages(), sysconfig.get_paths()["purelib"]]
    folders = [Path(p) / wheel for p in packages for wheel in ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib")]
    toolkits = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")]
    for toolkit in (*filter(None, toolkits), "/usr/local/cuda"):
        folders += [Path(toolkit) / lib for lib in ("lib64", "lib")]
    return next((f / "libcudadevrt.a" for f in folders if (f / "libcudadevrt.a").is_file()), None)


def _build(architecture: str) -> bytes:
    library = find_device_runtime()
    if library is None:
        raise IndirectionUnavailable(
            "pointers cannot be patched on the device: libcudadevrt.a was not found (it is in the package "
            "nvidia-cuda-runtime)"
        )
    try:
        return _link(_compile(architecture), library, architecture)
    except Exception as error:  # each of the libraries has its own kinds
        raise IndirectionUnavailable(
            f"pointers cannot be patched on the device: building the updater failed: {error}"
        ) from error


def _compile(architecture: str) -> bytes:
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(_SOURCE, b"retarget.cu", 0, None, None), "NVRTC")
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"-rdc=true"]
        status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(status) != 0:
            log = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program), "NVRTC"))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(log.rstrip(b"\0").decode(errors="replace"))
        cubin = bytes(checked(nvrtc.nvrtcGetCUBINSize(program), "NVRTC"))
        checked(nvrtc.nvrtcGetCUBIN(program, cubin), "NVRTC")  # fills the very object
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _link(relocatable: bytes, library: Path, architecture: str) -> bytes:
    from cuda.bindings import nvjitlink

    linker = nvjitlink.create(1, [f"-arch={architecture}"])
    try:
        kind = nvjitlink.InputType
        nvjitlink.add_data(linker, kind.CUBIN, relocatable, len(relocatable), "retarget")
        nvjitlink.add_file(linker, kind.LIBRARY, str(library))
        nvjitlink.complete(linker)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, cubin)
        return bytes(cubin)
    finally:
        nvjitlink.destroy(linker)
