# The sidecar: a gRPC draft service, no vLLM, no compiler. Build from the repository's root:
#   docker build -f deploy/docker/sidecar.Dockerfile -t REGISTRY/agentspec-sidecar:TAG .
# For a release, name the base by digest: --build-arg BASE_IMAGE=python:3.12-slim-bookworm@sha256:...
ARG BASE_IMAGE=python:3.12-slim-bookworm

FROM ${BASE_IMAGE} AS build
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN python -m venv /opt/agentspec && /opt/agentspec/bin/pip install --no-cache-dir '.[sidecar]'

FROM ${BASE_IMAGE}
COPY --from=build /opt/agentspec /opt/agentspec
ENV PATH=/opt/agentspec/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# Its own group, so that an engine under another uid reaches the socket (fsGroup in Kubernetes).
RUN install -d -m 2770 -o 65532 -g 65532 /run/agentspec
USER 65532:65532
ENTRYPOINT ["agentspec-sidecar"]
CMD ["serve"]
