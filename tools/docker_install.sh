#!/bin/sh
# The Dockerfile's two installation steps. Usage: DALI=nvidia-dali-cuda120 docker_install.sh dependencies|project
#
# On a bare Python image everything comes pinned from constraints.txt. On an image that brings its own torch (NVIDIA's),
# torch, torchvision and what they stand on are left exactly as they are: replacing them would throw away the reason
# for choosing that image, and mixing CUDA libraries of two builds in one process is the usual way to break it.
set -eu

PIP="python3 -m pip --disable-pip-version-check --no-cache-dir"
# NVIDIA's images carry a constraint file that forbids other versions of DALI; the pinned one was the one tested.
export PIP_CONSTRAINT=

case "${1:-}" in
dependencies)
    dali_version=$(sed -n 's/^nvidia-dali-cuda120==\([^ ;]*\).*/\1/p' constraints.txt)
    if python3 -c "import torch, torchvision" 2>/dev/null; then
        # Everything of the constraint set that the image lacks, without anybody's dependencies.
        $PIP install --no-deps -c constraints.txt timm pyyaml pydantic pydantic-core annotated-types \
            typing-inspection typing-extensions safetensors huggingface-hub tqdm matplotlib contourpy cycler \
            fonttools kiwisolver pyparsing python-dateutil six packaging scikit-learn joblib threadpoolctl scipy
        python3 -c "import nvidia.dali" 2>/dev/null && $PIP uninstall -y nvidia-dali-cuda120 nvidia-dali-cuda130
        $PIP install "${DALI}==${dali_version}"
    else
        $PIP install -c constraints.txt torch torchvision timm pyyaml pydantic numpy safetensors pillow tqdm \
            matplotlib scikit-learn tensorboard "${DALI}==${dali_version}"
    fi
    ;;
project)
    $PIP install --no-deps .
    fastsuncet version
    ;;
*)
    echo "usage: docker_install.sh dependencies|project" >&2
    exit 2
    ;;
esac
