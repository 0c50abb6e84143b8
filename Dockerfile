# Builds three images with the same pinned packages:
#
#   docker build --target cpu  -t spectrain:cpu  --build-arg PIP_ARGS="--index-url URL" .
#   docker build --target cuda -t spectrain:cuda --build-arg PIP_ARGS="--index-url URL" .
#   docker build --target transformer-engine -t spectrain:te .
#
# PIP_ARGS selects the package index for torch. On x86-64, the default index serves torch built for
# the newest CUDA, which makes the cpu image large and may require a newer driver for the cuda image.
# To avoid this, use an index of CPU builds or of builds for an older CUDA. The third image requires
# the default index, because Transformer Engine is compiled against torch and its CUDA 13.

# Python 3.12 installs the newest tested megatron-core, 3.11 (--build-arg PYTHON=3.11.14) the oldest.
ARG PYTHON=3.12.12
FROM python:${PYTHON}-slim-bookworm AS base
# torch.compile and Triton's launcher need a C++ and a C compiler; Python.h is in the base image.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home spectrain \
    && install --directory --owner=spectrain /spectrain /spectrain/data /spectrain/runs
WORKDIR /spectrain
COPY requirements/torch.txt requirements/cpu.txt requirements/constraints.txt requirements/
# `docker run --user` may pass an id that has no account in this image, so set HOME and USER for all
# users. A stopped container has five minutes to save; see docs/running.md.
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
ARG PIP_ARGS=""
RUN pip install --no-cache-dir ${PIP_ARGS} -r requirements/torch.txt \
    && pip install --no-cache-dir -r requirements/cpu.txt
COPY --chown=spectrain . .
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
CMD ["python", "pretrain.py", "--help"]

FROM cuda AS transformer-engine
# nvcc and the headers come from pip packages that match torch's CUDA version, so no other base image
# is needed. The kernels are precompiled; only their torch bindings (33 files) are compiled here, JOBS
# files at a time.
USER 0
ARG JOBS=4
RUN pip install --no-cache-dir "cuda-toolkit[nvcc,cccl]==13.0.3" ninja==1.13.2 \
    && nvidia="$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/nvidia" \
    && CUDA_HOME="$nvidia/cu13" CPATH="$nvidia/nccl/include:$nvidia/cudnn/include" MAX_JOBS="$JOBS" \
       pip install --no-cache-dir --no-build-isolation "transformer-engine[pytorch,core-cu13]==2.20.2"
USER 1000
CMD ["python", "pretrain.py", "--help"]
