# syntax=docker/dockerfile:1
# fastsuncet in a container: `docker run --gpus all ... fastsuncet train configs/in1k_10pct.yaml`.
#
#   docker build -t fastsuncet --build-arg COMMIT="$(git rev-parse HEAD)" .
#                                                                   thin: Python, and the exact versions the tests ran with
#   docker build -t fastsuncet --build-arg BASE_IMAGE=python:3.12 .
#                                                                   the same, and a C compiler: meta.compile=true needs one
#   docker build -t fastsuncet --build-arg BASE_IMAGE=<NVIDIA PyTorch image, by digest> .
#                                                                   NVIDIA's torch, cuDNN and apex stay; the rest is pinned
#
#   mkdir -p runs
#   docker run --rm --gpus all --shm-size=1g --stop-timeout=180 --user "$(id -u):$(id -g)" \
#     -v /path/to/imagenet:/data/imagenet:ro -v "$PWD/runs:/runs" \
#     fastsuncet train configs/in1k_10pct.yaml data.root=/data/imagenet
#
# Without --stop-timeout `docker stop` kills after 10 seconds, which a step and a save may outlast. Works under any --user,
# with --read-only (plus --tmpfs /tmp) and with --network none. No model and no data inside.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}

WORKDIR /opt/fastsuncet
# Dependencies first, and before them nothing that changes with our own source: editing that, README.md, or building
# another commit then rebuilds in seconds instead of fetching 4 GB again.
ARG DALI=nvidia-dali-cuda120
COPY constraints.txt ./
COPY tools/docker_install.sh tools/docker_install.sh
RUN DALI="${DALI}" sh tools/docker_install.sh dependencies

COPY pyproject.toml README.md LICENSE ./
COPY fastsuncet fastsuncet
COPY pipelines pipelines
COPY configs configs
COPY tools tools
# What stays here is what a person names on the command line. The code is in site-packages: a second copy in the working
# directory would be the one that `python -m fastsuncet` imports. Modes are those of the checkout, and
# a careful umask would keep other users out. runs/, the configs' default, is the mounted /runs; without a mount nobody
# can write there and a run says so, instead of losing everything with the container.
RUN sh tools/docker_install.sh project \
    && rm -rf fastsuncet pipelines build *.egg-info /root/.cache/pip \
    && chmod -R a+rX . \
    && mkdir /runs \
    && ln -s /runs runs

# Any user may run it: what libraries want to write (kernel caches, plot caches) has a place that is not a home.
# Of the driver's parts `video` is for the GPU's JPEG decoder: nvJPEG loads libnvcuvid, which Docker leaves out unasked.
ENV HOME=/tmp \
    XDG_CACHE_HOME=/tmp/cache \
    MPLCONFIGDIR=/tmp/matplotlib \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility,video
ARG COMMIT=unknown
LABEL org.opencontainers.image.title="fastsuncet" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.revision="${COMMIT}"
# Nothing here needs root. A mounted /runs must be writable by whoever --user names.
USER 10001:10001
# Exec form: the trainer is process 1 and gets SIGTERM itself. A shell in between would swallow it, and the last save.
ENTRYPOINT ["fastsuncet"]
CMD ["--help"]
