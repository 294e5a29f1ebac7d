"""What a response follows, and where it is kept: a conversation, or the responses before it."""

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
    """What was said before. items: what is new; ApiError if that is not so, or there is nothing to
    follow.
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
    """Writes a response down as it is when it is called; one that has come to a good end goes into
    its conversation.
    """

    async def keep_it(response: dict[str, Any]) -> None:
        if body.store is not False:
            await keep(context, tenant, items, response)
        if body.conversation_id is not None and response["status"] in USABLE:
            await extend_conversation(
                context, tenant, body.conversation_id, [*items, *response["output"]]
            )

    return keep_it
