# A worker on NVIDIA GPUs of compute capability 7.5 and later: kernels are compiled at run time by the NVRTC of the locked
# wheel, without a CUDA toolkit; the driver (580 or later) comes from the host through the container runtime.
# For sm_70 or a driver from 525 on, lock with requirements/worker-cuda12.lock instead.
# docker build -f deploy/docker/worker-cuda.Dockerfile -t kvalet-worker-cuda .
FROM python:3.12-slim AS build
WORKDIR /src
COPY requirements/build.lock requirements/worker-cuda.lock requirements/
RUN python -m venv /opt/build && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.lock
RUN python -m venv /opt/kvalet && /opt/kvalet/bin/pip install --no-cache-dir --require-hashes -r requirements/worker-cuda.lock
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
# Compiled kernels and fetched models are kept below /var/cache/kvalet: mount a volume that user 10001 may write.
ENV PATH=/opt/kvalet/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/var/cache \
    NUMBA_CACHE_DIR=/var/cache/kvalet/kernels KVALET_BACKEND=cuda NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
VOLUME /var/cache/kvalet
# Celery drains on SIGTERM: stop with a timeout above KVALET_DRAIN_GRACE_S.
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvalet", "worker"]
