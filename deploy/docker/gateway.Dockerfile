# The gateway: the base install, no NumPy, no kernels.
# docker build -f deploy/docker/gateway.Dockerfile -t kvalet-gateway .
FROM python:3.12-slim AS build
WORKDIR /src
COPY requirements/build.lock requirements/gateway.lock requirements/
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.lock
RUN python -m venv /opt/kvalet && /opt/kvalet/bin/pip install --no-cache-dir --require-hashes -r requirements/gateway.lock
COPY pyproject.toml README.md LICENSE ./
COPY gateway gateway
COPY workers workers
COPY gpu gpu
COPY snapshot_store snapshot_store
COPY deploy deploy
RUN /opt/build/bin/python -m hatchling build -t wheel -d /opt/dist
RUN /opt/kvalet/bin/pip install --no-cache-dir --no-deps --no-index /opt/dist/kvalet-*.whl

FROM python:3.12-slim
COPY --from=build /opt/kvalet /opt/kvalet
ENV PATH=/opt/kvalet/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 KVALET_GATEWAY_HOST=0.0.0.0 KVALET_GATEWAY_PORT=8000
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=2)"]
ENTRYPOINT ["kvalet", "gateway"]
