"""History of a response, and where it is stored: a conversation, or previous responses."""

from typing import Any

from coserve.server.errors import ApiError
from coserve.server.responses.context import ResponsesContext
from coserve.server.responses.conversations import check_new, extend_conversation, items_of
from coserve.server.responses.schemas import ResponseBody
from coserve.server.responses.store import USABLE, items_up_to, keep
from coserve.server.responses.writer import Keep

Items = list[dict[str, Any]]


async def items_before(
    context: ResponsesContext, tenant: str, body: ResponseBody, items: Items
) -> Items:
    """Return the items that precede a response.

    Args:
        context: Store of responses and conversations.
        tenant: Tenant that asks.
        body: The body.
        items: New items.

    Raises:
        ApiError: There is nothing to continue, or an item is not new.
    """
    if body.conversation_id is None:
        return await items_up_to(context, tenant, body.previous_response_id)
    if body.previous_response_id is not None:
        raise ApiError(
            "only one of conversation and previous_response_id can be given", param="conversation"
        )
    before = await items_of(context, tenant, body.conversation_id, param="conversation")
    check_new(items, before, param="input")
    return before


def keeper(context: ResponsesContext, tenant: str, body: ResponseBody, items: Items) -> Keep:
    """Return a function that stores a response as it is when called.

    A response that ended well is added to its conversation, too.
    """

    async def keep_it(response: dict[str, Any]) -> None:
        if body.store is not False:
            await keep(context, tenant, items, response)
        if body.conversation_id is not None and response["status"] in USABLE:
            await extend_conversation(
                context, tenant, body.conversation_id, [*items, *response["output"]]
            )

    return keep_it
