# A server of models on a CPU:
#
#     docker build -t umbel .
#     docker run -p 127.0.0.1:30000:30000 -v umbel-models:/models umbel --model default
#
# The first stage compiles the kernels for all processors into a wheel, the second has the wheel and no compiler.

ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN make wheels PYTHON=python3

FROM python:${PYTHON}-slim-bookworm
# Torch's build without CUDA, from PyTorch's index; the versions are those that all tests were last green with.
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=server,default-model
RUN --mount=type=bind,from=wheel,source=/source,target=/source \
    pip install --no-cache-dir --no-compile --extra-index-url "${TORCH_INDEX}" --constraint /source/tests/lock.txt \
        "${TORCH}" "$(echo /source/dist/umbel-*-manylinux_*.whl)[${EXTRAS}]" \
    && useradd --create-home --uid 10001 umbel \
    && install --directory --owner umbel --mode 700 /models /models/umbel /models/hub
USER 10001
WORKDIR /home/umbel
# Models that are downloaded, and what umbel makes of them.
ENV HF_HOME=/models/hub UMBEL_CACHE=/models/umbel UMBEL_KERNELS=prebuilt
VOLUME /models
EXPOSE 30000
# /health answers 503 while a model is loaded, which may take the minutes of a download.
HEALTHCHECK --interval=15s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=4)"]
ENTRYPOINT ["umbel", "serve", "--host", "0.0.0.0", "--port", "30000"]
CMD ["--model", "default"]
