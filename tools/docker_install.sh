#!/bin/sh
# The Dockerfile's two installation steps. Usage: DALI=nvidia-dali-cuda120 docker_install.sh dependencies|project
#
# On a bare Python image everything comes pinned from constraints.txt. On an image that brings its own torch (NVIDIA's),
# torch, torchvision and what they stand on are left exactly as they are: replacing them would throw away the reason
# for choosing that image, and mixing CUDA libraries of two builds in one process is the usual way to break it. The
# image's own versions of these become constraints, so that pip would rather fail than replace one.
set -eu

PIP="python3 -m pip --disable-pip-version-check --no-cache-dir"
# NVIDIA's images carry a constraint file that forbids other versions of DALI; the pinned one was the one tested.
export PIP_CONSTRAINT=

case "${1:-}" in
dependencies)
    dali_version=$(sed -n 's/^nvidia-dali-cuda120==\([^ ;]*\).*/\1/p' constraints.txt)
    if python3 -c "import torch, torchvision" 2>/dev/null; then
        constraints=$(mktemp)
        trap 'rm -f "$constraints"' EXIT
        # Not pinned here: what torch stands on (its own bounds may be older), and what is built against NumPy (our pins
        # may ask for a newer one than the image's).
        torch_stands_on='torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+|filelock|fsspec|jinja2|markupsafe'
        torch_stands_on="$torch_stands_on|mpmath|networkx|pillow|setuptools|sympy|typing-extensions"
        on_numpy='numpy|scipy|scikit-learn|matplotlib|contourpy'
        grep -Ev "^($torch_stands_on|$on_numpy)==" constraints.txt >"$constraints"
        grep '^nvidia-ml-py==' constraints.txt >>"$constraints" # plain Python, for joules: torch does not stand on it
        # From the packages' records, not from `pip freeze`: that names a file for what was built in the image, and pip
        # takes no such line as a constraint. A version like 2.10.0a0+b4e4ee8 is fine.
        python3 - >>"$constraints" <<'PYTHON'
from importlib import metadata

for package in ("torch", "torchvision", "numpy", "triton", "pytorch-triton"):
    try:
        print(f"{package}=={metadata.version(package)}")
    except metadata.PackageNotFoundError:
        pass
PYTHON
        # NVIDIA's DALI goes first: two builds of it would write into one Python package.
        $PIP uninstall -y nvidia-dali-cuda120 nvidia-dali-cuda130
        $PIP install -c "$constraints" timm pyyaml pydantic safetensors tqdm matplotlib scikit-learn nvidia-ml-py \
            "${DALI}==${dali_version}"
    else
        $PIP install -c constraints.txt torch torchvision timm pyyaml pydantic numpy safetensors pillow tqdm \
            matplotlib scikit-learn tensorboard nvidia-ml-py "${DALI}==${dali_version}"
    fi
    ;;
project)
    # With the setuptools that is there, the pinned one: no network, and not the newest of the day. One that an image
    # brings may be too old for our pyproject.toml; then pip fetches one for the build.
    if python3 -c "import setuptools as s; raise SystemExit(int(s.__version__.split('.')[0]) < 77)" 2>/dev/null; then
        isolation=--no-build-isolation
    fi
    $PIP install --no-deps ${isolation:-} .
    fastsuncet version
    ;;
*)
    echo "usage: docker_install.sh dependencies|project" >&2
    exit 2
    ;;
esac
