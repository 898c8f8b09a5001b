"""Write a log under a socket test, by the verb that writes it in earnest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from streams import log
from streams.models import AgentToken, Generation
from streams.protocol import CLOCK, Chunk, Done, Text
from tests.support import factories
from tests.support.processes import Server


@dataclass
class Story:
    """A generation, the token that writes it and where its writer stands."""

    generation: Generation
    token: AgentToken
    secret: str
    seq: int = 0

    @property
    def path(self) -> str:
        return f"/ws/generations/{self.generation.pk}/"

    def write(self, *chunks: Chunk | str) -> int:
        """Append; return the next offset."""
        made = [Text(content=chunk) if isinstance(chunk, str) else chunk for chunk in chunks]
        appended = log.append(
            generation_id=self.generation.pk,
            attempt=1,
            seq=self.seq,
            chunks=made,
            writer="test",
            actor=CLOCK,
        )
        self.seq += len(made)
        return appended.next_offset

    def post(self, server: Server, *texts: str) -> None:
        """Append through this server's own door."""
        chunks = [{"type": "text", "content": text} for text in texts]
        answer = httpx.post(
            f"{server.url}/api/v1/generations/{self.generation.pk}/chunks",
            json={"attempt": 1, "seq": self.seq, "chunks": chunks, "writer": "test"},
            headers=factories.bearer(self.secret),
            timeout=20,
        )
        assert answer.status_code == 201, answer.text
        self.seq += len(texts)

    def end(self) -> int:
        return self.write(Done(reason="stop"))


def story(*texts: str, **fields: Any) -> Story:
    token, secret = factories.agent_token()
    made = Story(factories.generation(token=token, **fields), token, secret)
    if texts:
        made.write(*texts)
    return made
