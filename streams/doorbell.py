"""Wake whoever waits for a topic. A ring carries no data and may be lost: readers poll under it.

Topics: `g:<generation id>` its log has something new, `a:<action id>` it changed, `inbox` any action changed,
`work` something may be claimed, `runs` an agent run may go on.
"""

from __future__ import annotations


def ring(*topics: str) -> None:
    """Wake listeners of these topics, in this process and in the others. Call it after the commit; never raises."""
