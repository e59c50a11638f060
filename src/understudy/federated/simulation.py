"""All clients in one process: what Flower's grid does, without a network or other processes.

Flower's own simulation starts Ray and keeps no state between messages but what can be serialised;
here each client is an object with its own records, ledger and critic, as it is at its owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from flwr.supercore.task_identity import TaskIdentity

from understudy.federated.node import reply
from understudy.privacy.client import Client


class LocalGrid:
    """Deliver messages to clients by calling them, in the order of their numbers.

    Args:
        clients: by the number of their node. Whoever is taken out is gone, as if it were killed.
    """

    def __init__(self, clients: Mapping[int, Client]) -> None:
        self.clients = dict(clients)
        self._replies: dict[str, Any] = {}
        self._numbers = itertools.count()
        # Messages carry who runs this process; Flower tells it to the processes that it starts.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def get_node_ids(self) -> list[int]:
        """Return who is there."""
        return sorted(self.clients)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        """Deliver messages and keep the replies."""
        identities = []
        for message in messages:
            identity = f"local-{next(self._numbers)}"
            message.metadata.__dict__["_message_id"] = identity
            if (client := self.clients.get(message.metadata.dst_node_id)) is not None:
                self._replies[identity] = reply(client, message)
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids: Iterable[str]) -> list[Any]:
        """Return the replies that are there."""
        return [self._replies.pop(one) for one in message_ids if one in self._replies]
