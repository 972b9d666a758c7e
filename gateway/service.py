"""Models, workers, health, readiness, metrics, and the answer for everything that is not served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.errors import NotFound
from gateway.fleet import Reason
from gateway.http import Gateway, admin_of, gateway_of, principal_of
from workers.registry import ModelRecord

router = APIRouter()
fallback = APIRouter()

STOPPING = Reason("stopping", "this gateway stops")
_ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """Models that a request may name."""
    principal_of(request)
    gateway = gateway_of(request)
    return JSONResponse({"object": "list", "data": [_model_object(gateway, m) for m in gateway.fleet.models]})


@router.get("/v1/models/{model:path}")
async def get_model(request: Request) -> Response:
    """One model."""
    principal_of(request)
    name = request.path_params["model"]
    gateway = gateway_of(request)
    model = gateway.fleet.model(name)
    if model is None:
        raise NotFound(f"the model '{name[:80]}' does not exist", code="model_not_found", param="model")
    return JSONResponse(_model_object(gateway, model))


@router.get("/v1/workers")
async def list_workers(request: Request) -> Response:
    """Workers with a heartbeat, for admin keys."""
    admin_of(request)
    return JSONResponse({"object": "list", "data": gateway_of(request).fleet.shown_workers()})


@router.api_route("/health", methods=["GET", "HEAD"])
async def health() -> Response:
    """200 as long as the process serves requests."""
    return JSONResponse({"status": "ok"})


@router.api_route("/ready", methods=["GET", "HEAD"])
async def ready(request: Request) -> Response:
    """200 when an accepted turn would run now, else 503 with the reason."""
    gateway = gateway_of(request)
    reason = STOPPING if gateway.stopping.has_begun else gateway.fleet.unready_reason()
    if reason is None:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "unready", "reason": reason.code, "message": reason.message}, status_code=503)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus text exposition."""
    return Response(gateway_of(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


@fallback.api_route("/v1/{path:path}", methods=_ALL_METHODS)
async def not_served(request: Request) -> Response:
    """Refuse the rest of the API by name."""
    where = f"{request.method} {request.url.path[:120]}"
    raise NotFound(f"{where} is not served", code="endpoint_not_served")


def _model_object(gateway: Gateway, model: ModelRecord) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": "kvalet",
        "max_model_len": model.context_length,
        "kvalet": {"live_workers": gateway.fleet.num_workers(model.name), "tokenizer": model.bundle_digest},
    }
