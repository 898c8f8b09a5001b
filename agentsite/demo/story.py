"""What the demo's scripted agent works through: order 1042 arrived broken."""

from __future__ import annotations

from typing import Any

from agentsite.demo import tools
from approvals import agent
from approvals.models import AgentRun
from streams.access import Caller
from streams.adapters import Message
from streams.models import Generation

TITLE = "Order 1042 arrived broken"
CONVERSATION = "order-1042"

SCRIPT: dict[str, Any] = {
    "tokenMs": 60,
    "turns": [
        {
            "steps": [
                {
                    "text": "Marta writes that the lamp of order 1042 arrived broken, and her photo shows it. "
                    "I would pay back 49.90 EUR and tell her so. Both need your word, each on its own."
                },
                {
                    "call": {
                        "id": "call_refund",
                        "name": "refund_order",
                        "arguments": '{"order":1042,"amount":49.90,"currency":"EUR","reason":"The lamp broke."}',
                    }
                },
                {
                    "call": {
                        "id": "call_message",
                        "name": "send_message",
                        "arguments": {
                            "order": 1042,
                            "text": "Dear Marta, we are sorry about the lamp. We have paid back 49.90 EUR. 💡",
                        },
                    }
                },
            ],
            "usage": {"promptTokens": 212, "completionTokens": 96, "totalTokens": 308},
        },
        {
            "steps": [
                {"text": "The refund is paid. ", "ifOk": "call_refund"},
                {"text": "The refund was not made, so I leave the money alone. ", "ifError": "call_refund"},
                {"text": "Marta has her message. ", "ifOk": "call_message"},
                {"text": "Marta was not written to. ", "ifError": "call_message"},
                {"text": "I would now close the order, and tidy up her second, empty account."},
                {
                    "call": {
                        "id": "call_order",
                        "name": "update_order",
                        "arguments": {"order": 1042, "status": "closed", "note": "Lamp broken on arrival."},
                    }
                },
                {
                    "call": {
                        "id": "call_delete",
                        "name": "delete_customer",
                        "arguments": {"customer": "marta.alves+old"},
                    }
                },
            ],
            "usage": {"promptTokens": 388, "completionTokens": 71, "totalTokens": 459},
        },
        {
            "steps": [
                {"text": "The order is closed. ", "ifOk": "call_order"},
                {"text": "The order stays as it is. ", "ifError": "call_order"},
                {"text": "Deleting the account is not allowed to me, and rightly so. "},
                {"text": "That is all for order 1042."},
            ],
            "usage": {"promptTokens": 502, "completionTokens": 34, "totalTokens": 536},
        },
    ],
}


def begin(*, caller: Caller) -> Generation:
    """Go on with the story that has not ended; else begin a new one."""
    going_on = AgentRun.objects.filter(
        generation__token=caller.token, generation__title=TITLE, generation__finish_reason=""
    ).select_related("generation")
    run = going_on.order_by("-generation__created_at").first()
    if run is not None:
        return run.generation
    return agent.start(
        caller=caller,
        adapter="scripted",
        config=SCRIPT,
        messages=[
            Message(role="system", content="You work in the support of a small shop."),
            Message(role="user", content="Please see to Marta's complaint about order 1042."),
        ],
        tool_names=tools.NAMES,
        title=TITLE,
        conversation=CONVERSATION,
        model="scripted",
    )
