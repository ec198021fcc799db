#!/bin/sh
# The Dockerfile's two installation steps. Usage: DALI=nvidia-dali-cuda120 docker_install.sh dependencies|project
#
# On a plain Python image everything is installed from docker_requirements.txt, which has the hash of every file: pip
# refuses a file that the package index has exchanged. With another DALI than its own, constraints.txt pins the versions
# without hashes. On an image with its own torch (NVIDIA's),
# torch, torchvision and their dependencies stay exactly as they are: they are the reason for choosing that image, and
# CUDA libraries of two builds in one process often break. The image's versions become constraints, so that pip fails
# rather than replaces one.
set -eu

PIP="python3 -m pip --disable-pip-version-check --no-cache-dir"
# NVIDIA's images have a constraint file that forbids other versions of DALI; the pinned version is the tested one.
export PIP_CONSTRAINT=

case "${1:-}" in
dependencies)
    dali_version=$(sed -n 's/^nvidia-dali-cuda120==\([^ ;]*\).*/\1/p' constraints.txt)
    if python3 -c "import torch, torchvision" 2>/dev/null; then
        constraints=$(mktemp)
        trap 'rm -f "$constraints"' EXIT
        # Not pinned here: the dependencies of torch (its bounds can be older), and what is built against NumPy (our pins
        # can need a newer NumPy than the image's).
        of_torch='torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+|filelock|fsspec|jinja2|markupsafe'
        of_torch="$of_torch|mpmath|networkx|pillow|setuptools|sympy|typing-extensions"
        on_numpy='numpy|scipy|scikit-learn|matplotlib|contourpy'
        grep -Ev "^($of_torch|$on_numpy)==" constraints.txt >"$constraints"
        grep '^nvidia-ml-py==' constraints.txt >>"$constraints" # for energy; torch does not depend on it
        # From the packages' metadata, not from `pip freeze`, which names a file for what was built in the image: pip
        # does not accept such a line as a constraint. A version like 2.10.0a0+b4e4ee8 is fine.
        python3 - >>"$constraints" <<'PYTHON'
from importlib import metadata

for package in ("torch", "torchvision", "numpy", "triton", "pytorch-triton"):
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        continue
    if package == "torch" and tuple(map(int, version.split(".")[:2])) < (2, 10):
        raise SystemExit(f"this image has torch {version}; fastsuncet needs torch 2.10 or newer")
    print(f"{package}=={version}")
PYTHON
        # Remove NVIDIA's DALI first: two builds of it would write into one Python package.
        $PIP uninstall -y nvidia-dali-cuda120 nvidia-dali-cuda130
        $PIP install -c "$constraints" timm pyyaml pydantic safetensors tqdm matplotlib scikit-learn nvidia-ml-py \
            "${DALI}==${dali_version}"
    elif [ "$DALI" = nvidia-dali-cuda120 ]; then
        # --no-deps: the file is complete, and pip has nothing to resolve.
        $PIP install --require-hashes --no-deps -r tools/docker_requirements.txt
    else
        $PIP install -c constraints.txt torch torchvision timm pyyaml pydantic numpy safetensors pillow tqdm \
            matplotlib scikit-learn tensorboard nvidia-ml-py "${DALI}==${dali_version}"
    fi
    ;;
project)
    # Use the installed, pinned setuptools: no network, and the same version every day. An image's own can be too old for
    # our pyproject.toml; then pip downloads one for the build.
    if python3 -c "import setuptools as s; raise SystemExit(int(s.__version__.split('.')[0]) < 77)" 2>/dev/null; then
        isolation=--no-build-isolation
    fi
    $PIP install --no-deps ${isolation:-} .
    # The view operator of the Dockerfile's stage with a compiler. Not the sources in this folder: the library belongs
    # beside the installed ones. The second line fails unless they accept it.
    installed=$(cd / && python3 -c 'from pipelines.dali.view_operator.build import PREBUILT; print(PREBUILT)')
    mkdir -p "$installed" && cp prebuilt/*.so "$installed"
    (cd / && CXX=false python3 -m pipelines.dali.view_operator --prebuilt)
    fastsuncet version
    ;;
*)
    echo "usage: docker_install.sh dependencies|project" >&2
    exit 2
    ;;
esac
