# syntax=docker/dockerfile:1
# fastsuncet in a container: `docker run --gpus all ... fastsuncet train configs/in1k_10pct.yaml`.
#
#   docker build -t fastsuncet --build-arg COMMIT="$(git rev-parse HEAD)" .
#                                                                   small: Python and the exact versions of the tests
#   docker build -t fastsuncet --build-arg BASE_IMAGE=python:3.12 .
#                                                                   the same with a C++ compiler: meta.compile=true
#   docker build -t fastsuncet --build-arg BASE_IMAGE=<NVIDIA PyTorch image, by digest> .
#                                                                   keeps NVIDIA's torch, cuDNN and apex; pins the rest
#
#   mkdir -p runs cache
#   docker run --rm --gpus all --shm-size=1g --stop-timeout=180 --user "$(id -u):$(id -g)" \
#     -v /path/to/imagenet:/data/imagenet:ro -v "$PWD/runs:/runs" -v "$PWD/cache:/tmp/cache" \
#     fastsuncet train configs/in1k_10pct.yaml data.root=/data/imagenet
#
# What was compiled and proved for this machine is kept in the cache; without that volume each container starts without it.
# Without --stop-timeout `docker stop` kills after 10 seconds, and a step and a save can take longer. Any --user works, and
# so do --read-only (with --tmpfs /tmp) and --network none. The image holds no model and no data.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE} AS dependencies

WORKDIR /opt/fastsuncet
# Dependencies first, from files that do not change with our source: a build after an edit or of another commit then takes
# seconds and does not download 4 GB again.
ARG DALI=nvidia-dali-cuda120
COPY constraints.txt ./
COPY tools/docker_install.sh tools/docker_requirements.txt tools/
RUN DALI="${DALI}" sh tools/docker_install.sh dependencies

# The view operator is compiled where there is a C++ compiler, and only its library is copied. It is kept only if it makes
# the values of DALI's own operators to the bit; a failed build fails the image.
FROM dependencies AS operator
RUN command -v g++ || { apt-get update && apt-get install -y --no-install-recommends g++; }
COPY pipelines pipelines
RUN python3 -m pipelines.dali.view_operator --prebuilt

FROM dependencies
COPY pyproject.toml README.md LICENSE ./
COPY fastsuncet fastsuncet
COPY pipelines pipelines
COPY configs configs
COPY tools tools
COPY --from=operator /opt/fastsuncet/pipelines/dali/view_operator/prebuilt prebuilt
# Only what users name on the command line stays here. The code is in site-packages, and a second copy in the working
# directory would be the one that `python -m fastsuncet` imports. chmod: files have the modes of the checkout, and with a
# strict umask other users could not read them. runs/, the configs' default, is the mounted /runs; without a mount it is
# not writable and a run reports that, instead of losing its results with the container.
RUN sh tools/docker_install.sh project \
    && rm -rf fastsuncet pipelines prebuilt build *.egg-info /root/.cache/pip \
    && chmod -R a+rX . \
    && mkdir /runs \
    && ln -s /runs runs

# Any user can run it: libraries write their caches (kernels, plots) outside of a home folder, and Inductor's and Triton's,
# which take minutes to fill, are in the volume of the others. `video` is the part of the
# driver for the GPU's JPEG decoder: nvJPEG loads libnvcuvid, which Docker does not mount by default.
ENV HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor \
    CUDA_CACHE_PATH=/tmp/cache/cuda \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="fastsuncet" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.revision="${COMMIT}"
# Nothing here needs root. A mounted /runs must be writable by the user of --user.
USER 10001:10001
# Exec form: the trainer is process 1 and gets SIGTERM. A shell in between would not pass it on, and the last save would be
# lost.
ENTRYPOINT ["fastsuncet"]
CMD ["--help"]
