# A server image with its own Python environment, and nothing that only builds it. Two variants:
#
#   docker build --tag tokenpod:cuda .
#   docker build --tag tokenpod:cpu --build-arg VARIANT=cpu --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#
# pip's own variables are build arguments: PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_NO_INDEX. The second
# variant needs the index of torch's CPU builds, which is not the default one. docs/image.md tells more.

# Debian 12: its Python is the one that requirements/ is locked for.
ARG BASE=docker.io/library/debian:bookworm-slim
# cuda or cpu
ARG VARIANT=cuda


# Debian replaces a package's version when it mends it, so that a pinned one would soon be gone.
# hadolint global ignore=DL3008
FROM ${BASE} AS python
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*


# -- what is built -------------------------------------------------------------------------------
FROM python AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3-venv \
    && rm -rf /var/lib/apt/lists/*

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore

WORKDIR /src
# Dependencies first: they change seldom, and are nearly all of the image.
ARG VARIANT
COPY requirements/runtime-${VARIANT}.txt requirements/build.txt requirements/sbom.txt requirements/
# The server's environment has no pip; the tools' pip installs into it. What torch and CUDA's libraries bring for tests and
# for C++ goes again, some 200 MB. torch looks for torch_shm_manager when it is imported.
RUN python3 -m venv --without-pip /opt/tokenpod \
    && python3 -m venv /opt/tools \
    && /opt/tools/bin/pip --python /opt/tokenpod/bin/python install --require-hashes --no-deps \
        --only-binary :all: --requirement "requirements/runtime-${VARIANT}.txt" \
    && rm -rf /opt/tokenpod/lib/python3*/site-packages/torch/include \
        /opt/tokenpod/lib/python3*/site-packages/torch/test \
    && find /opt/tokenpod/lib/python3*/site-packages/torch/bin -mindepth 1 \
        ! -name torch_shm_manager -delete \
    && find /opt/tokenpod -name '*.a' -delete
RUN /opt/tools/bin/pip install --require-hashes --no-deps --only-binary :all: \
        --requirement requirements/build.txt --requirement requirements/sbom.txt

COPY . .
RUN /opt/tools/bin/pip wheel --no-build-isolation --no-deps --no-index --wheel-dir dist ./client . \
    && /opt/tools/bin/pip --python /opt/tokenpod/bin/python install --no-deps --no-index dist/*.whl \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
        --output-file /opt/tokenpod/sbom.cdx.json /opt/tokenpod/bin/python


# -- what is shipped -----------------------------------------------------------------------------
FROM python AS runtime-cpu

FROM python AS runtime-cuda
# Triton compiles what launches kernels with a C compiler, unless its cache has it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

# hadolint ignore=DL3006
FROM runtime-${VARIANT} AS server
# Compiled kernels; group 0 may write there as well, for platforms that choose the user themselves.
RUN mkdir -p /var/cache/tokenpod/triton /var/cache/tokenpod/numba \
    && chown -R 65532:0 /var/cache/tokenpod \
    && chmod -R g=u /var/cache/tokenpod
COPY --from=build /opt/tokenpod /opt/tokenpod

ENV PATH=/opt/tokenpod/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HOME=/var/cache/huggingface \
    HF_HUB_OFFLINE=1 \
    NUMBA_CACHE_DIR=/var/cache/tokenpod/numba \
    TRITON_CACHE_DIR=/var/cache/tokenpod/triton

ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Tokenpod" \
    org.opencontainers.image.description="A gRPC-only text-generation server" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" \
    org.opencontainers.image.revision="${REVISION}"

USER 65532:65532
WORKDIR /tmp
# gRPC, and health for probes.
EXPOSE 50051 50052
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["sh", "-c", "exec tokenpod health --service readiness --address 127.0.0.1:${TOKENPOD_HEALTH_PORT:-50052}"]
ENTRYPOINT ["tokenpod"]
CMD ["serve"]
