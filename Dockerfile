# text-generation-inference with this shard: its launcher, both of its routers, and tpu-tgi-server on Python 3.11.
# How to build and run it: docs/operating.md.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm
ARG RUST_IMAGE=rust:1.85.1-bookworm

# --- the launcher and the routers, from TGI's public sources ---------------------------------------------------------
FROM ${RUST_IMAGE} AS tgi
ARG TGI_VERSION=v3.3.7

# both embed a Python 3.11, the one of Debian bookworm here and the one of the last stage there
RUN apt-get update \
    && apt-get install -y --no-install-recommends libssl-dev pkg-config protobuf-compiler python3-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /tgi
ADD https://github.com/huggingface/text-generation-inference/archive/refs/tags/${TGI_VERSION}.tar.gz /tgi.tar.gz
RUN tar -xzf /tgi.tar.gz --strip-components=1 \
    && cargo build --locked --profile release-opt \
        --package text-generation-launcher --package text-generation-router-v2 --package text-generation-router-v3 \
    && mkdir -p /opt/tgi/v2 /opt/tgi/v3 \
    && cp target/release-opt/text-generation-launcher /opt/tgi/ \
    && cp target/release-opt/text-generation-router-v2 /opt/tgi/v2/text-generation-router \
    && cp target/release-opt/text-generation-router /opt/tgi/v3/text-generation-router \
    && rm -rf target

# --- our wheel -------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE ./
COPY proto proto
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

# --- what runs -------------------------------------------------------------------------------------------------------
FROM ${PYTHON_IMAGE}

# Where pip also looks for torch. PyTorch's index of CPU builds saves the CUDA libraries, several GB.
ARG EXTRA_INDEX_URL=""

COPY constraints.txt /tmp/
RUN --mount=type=bind,from=wheel,source=/wheel,target=/wheel \
    wheel="$(echo /wheel/tpu_tgi_server-*.whl)" \
    && PIP_EXTRA_INDEX_URL="${EXTRA_INDEX_URL}" pip install --no-cache-dir -c /tmp/constraints.txt "${wheel}[tpu]" \
    && rm /tmp/constraints.txt

COPY --from=tgi /opt/tgi /opt/tgi
COPY docker/entrypoint.sh docker/healthcheck.py /opt/tgi/

# the router writes the tokenizer into its working directory; models are kept in /data
RUN useradd --create-home --uid 1000 tgi \
    && install --directory --owner=tgi --group=tgi /data
USER 1000
WORKDIR /home/tgi

ENV HUGGINGFACE_HUB_CACHE=/data \
    NUM_SHARD=1 \
    PJRT_DEVICE=TPU \
    PORT=8080 \
    TGI_ROUTER=v3

EXPOSE 8080
VOLUME /data

# a large model takes its time to load and to compile
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m CMD ["python", "/opt/tgi/healthcheck.py"]
ENTRYPOINT ["/opt/tgi/entrypoint.sh"]
