# Two images of the same pinned packages:
#
#   docker build --target cpu  -t spectrain:cpu  --build-arg PIP_ARGS="--index-url URL" .
#   docker build --target cuda -t spectrain:cuda .
#
# On x86-64 the default package index has torch with the CUDA libraries, which the cuda image needs.
# For a small cpu image, PIP_ARGS names an index with torch's CPU builds; without it the image is
# large, but works too.

# Python 3.12 takes the newest tested megatron-core, 3.11 (--build-arg PYTHON=3.11.14) the oldest.
ARG PYTHON=3.12.12
FROM python:${PYTHON}-slim-bookworm AS base
# torch.compile and Triton need the C++ compiler.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home spectrain \
    && install --directory --owner=spectrain /spectrain /spectrain/data /spectrain/runs
WORKDIR /spectrain
COPY requirements/torch.txt requirements/cpu.txt requirements/constraints.txt requirements/
# `docker run --user` may name a user that this image does not know, so every user gets a writable
# home and a name. A stopped container has five minutes to save; see docs/running.md.
ENV PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=spectrain \
    TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300

FROM base AS cpu
ARG PIP_ARGS=""
RUN pip install --no-cache-dir ${PIP_ARGS} -r requirements/torch.txt \
    && pip install --no-cache-dir -r requirements/cpu.txt
COPY --chown=spectrain . .
ENV OMP_NUM_THREADS=1
USER 1000
CMD ["python", "pretrain.py", "--help"]

FROM base AS cuda
RUN pip install --no-cache-dir -r requirements/torch.txt \
    && pip install --no-cache-dir -r requirements/cpu.txt
COPY --chown=spectrain . .
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
CMD ["python", "pretrain.py", "--help"]
