"""GET /v1/cluster: the nodes, their work, and what waits. For operators."""

from typing import cast

from fastapi import APIRouter
from starlette.responses import Response

from coserve.cluster.front.link import ClusterLink
from coserve.server.context import EnginePart, IsOperator, ModelsPart
from coserve.server.errors import ApiError
from coserve.server.http.responses import json_response

router = APIRouter()


@router.get("/v1/cluster")
async def cluster(engine: EnginePart, models: ModelsPart, is_operator: IsOperator) -> Response:
    """Return the state of the cluster: of all tenants, and so for operators alone."""
    if not is_operator:
        raise ApiError("Only operators may see the cluster: ask with the key of one.", status=403)
    link = cast(ClusterLink, engine)
    return json_response({"model": models.name, "nodes": link.describe(), "waiting": link.waiting})
