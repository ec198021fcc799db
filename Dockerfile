# syntax=docker/dockerfile:1
# fastsuncet in a container: `docker run --gpus all ... fastsuncet train configs/in1k_10pct.yaml`.
#
#   docker build -t fastsuncet .                                    thin: Python, and the exact versions the tests ran with
#   docker build -t fastsuncet --build-arg BASE_IMAGE=<NVIDIA PyTorch image, by digest> .
#                                                                   NVIDIA's torch, cuDNN and apex stay; the rest is pinned
#
#   docker run --rm --gpus all --shm-size=1g --user "$(id -u):$(id -g)" \
#     -v /path/to/imagenet:/data/imagenet:ro -v "$PWD/runs:/runs" \
#     fastsuncet train configs/in1k_10pct.yaml data.root=/data/imagenet logging.folder=/runs
#
# Works under any --user, with --read-only (plus --tmpfs /tmp) and with --network none. No model and no data inside.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}

ARG DALI=nvidia-dali-cuda120
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="fastsuncet" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.revision="${COMMIT}"

WORKDIR /opt/fastsuncet
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY tools/docker_install.sh tools/docker_install.sh
# Dependencies first: editing our own source then rebuilds in seconds instead of fetching 6 GB again.
RUN DALI="${DALI}" sh tools/docker_install.sh dependencies

COPY fastsuncet fastsuncet
COPY pipelines pipelines
COPY configs configs
COPY tools tools
RUN sh tools/docker_install.sh project

# Any user may run it: what libraries want to write (kernel caches, plot caches) has a place that is not a home.
ENV HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# Nothing here needs root. A mounted /runs must be writable by whoever --user names.
USER 10001:10001
# Exec form: the trainer is process 1 and gets SIGTERM itself. A shell in between would swallow it, and the last save.
ENTRYPOINT ["fastsuncet"]
CMD ["--help"]
