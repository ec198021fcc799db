"""What `fastsuncet doctor` looks at around the GPU: the cards, NCCL, NVRTC, and DALI's decoders on it and off it."""

import ctypes
import importlib.util
import io
from collections.abc import Iterable
from pathlib import Path

from fastsuncet.commands.doctor.finding import Finding


def cards() -> Finding:
    """The GPUs torch can use, or why it can use none."""
    import torch

    driver = Path("/proc/driver/nvidia/version")
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        kinds = {(card.name, card.total_memory, card.major, card.minor) for card in found}
        described = [f"{name}, {memory / 1e9:.0f} GB, {a}.{b}" for name, memory, a, b in sorted(kinds)]
        text = f"{len(found)} x {'; '.join(described)} (CUDA {torch.version.cuda})"
        if min(card.major for card in found) < 8:
            return Finding("ok", text, "no bfloat16 in hardware: set meta.precision=fp16")
        return Finding("ok", text)
    if torch.version.cuda is None:
        return Finding("absent", "this torch is built without CUDA", "training runs on the CPU")
    if driver.exists():
        line = driver.read_text().splitlines()[0]
        return Finding(
            "problem",
            f"there is a driver, but torch (CUDA {torch.version.cuda}) cannot use it: {line}",
            "update the driver; in a container start it with --gpus all",
        )
    return Finding(
        "absent",
        f"no NVIDIA driver (torch is built for CUDA {torch.version.cuda})",
        "training runs on the CPU",
    )


def nccl() -> Finding:
    """The library that GPUs talk through."""
    import torch

    if torch.version.cuda is None or not torch.distributed.is_nccl_available():
        return Finding(
            "absent", "this torch has none", "needed only for several GPUs; processes on CPUs use gloo"
        )
    return Finding("ok", ".".join(map(str, torch.cuda.nccl.version())))


def nvrtc() -> Finding:
    """The run-time compiler of CUDA sources, by compiling one."""
    import torch

    if torch.version.cuda is None:
        return Finding("absent", "this torch is built without CUDA", "needed only on a GPU")
    library = next((lib for name in _nvrtc_names(torch.version.cuda) if (lib := _load(name))), None)
    if library is None:
        return Finding(
            "absent", "libnvrtc is not found", "kernels of our own stay off; PyTorch's stand in for them"
        )
    program, source = ctypes.c_void_p(), b'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 2.0f; }'
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"f.cu", 0, None, None)
    code = library.nvrtcCompileProgram(program, 0, None)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    text = f"{major.value}.{minor.value}"
    if code:
        return Finding(
            "absent", f"{text} compiles nothing (code {code})", "PyTorch's kernels stand in for ours"
        )
    return Finding("ok", f"{text}, compiled a kernel")


def _nvrtc_names(cuda: str) -> Iterable[str]:
    yield f"libnvrtc.so.{cuda.split('.')[0]}"
    nvidia = importlib.util.find_spec("nvidia")  # where the wheels of CUDA's libraries lie
    for folder in (nvidia.submodule_search_locations or []) if nvidia else []:
        yield from sorted(map(str, Path(folder).glob(f"*/lib/libnvrtc.so.{cuda.split('.')[0]}")))


def _load(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def dali() -> Finding:
    """DALI, by decoding a JPEG of our own with it: on the CPU, and on the GPU where there is one."""
    from pipelines.backend import dali_problem, install_command

    problem = dali_problem()
    if problem is not None:
        return Finding(
            "absent", problem, f"{install_command()}; until then torchvision reads the images, much slower"
        )
    import torch
    from nvidia import dali

    places = ["cpu", "gpu"] if torch.cuda.is_available() else ["cpu"]
    for place in places:
        _decode(place)
    return Finding(
        "ok", f"{dali.__version__}, decoded an image on the {' and the '.join(map(str.upper, places))}"
    )


def _decode(place: str) -> None:
    import numpy as np
    from nvidia.dali import fn, pipeline_def
    from PIL import Image

    jpeg = io.BytesIO()
    Image.new("RGB", (24, 16), (200, 30, 30)).save(jpeg, "JPEG")
    data = np.frombuffer(jpeg.getvalue(), np.uint8)
    device = {"cpu": "cpu", "gpu": "mixed"}[place]

    @pipeline_def(batch_size=1, num_threads=1, device_id=0 if place == "gpu" else None)
    def graph():
        return fn.decoders.image(fn.external_source(lambda: [data]), device=device)

    pipeline = graph()
    pipeline.build()
    shape = tuple(pipeline.run()[0].shape()[0])
    if shape != (16, 24, 3):
        raise RuntimeError(f"decoded an image of 16 x 24 pixels to the shape {shape}")
