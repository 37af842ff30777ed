# vLLM with AgentSpec. The wheel is built in a stage of its own, against the Python of the vLLM image:
#   docker build -f deploy/docker/vllm.Dockerfile -t REGISTRY/agentspec-vllm:TAG .
# For a release, name the base by digest: --build-arg VLLM_IMAGE=vllm/vllm-openai:v0.32.0@sha256:...
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM ${VLLM_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${VLLM_IMAGE}
# vLLM's own packages stay as the image has them: only what is missing is added.
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --find-links /wheels 'agentspec-serving[vllm]'
ENV HOME=/cache PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
ENTRYPOINT ["agentspec-vllm"]
CMD ["--help"]
