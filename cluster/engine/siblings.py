"""Choices of one client request that share a prompt: who computes it for the others.

Owns: the groups of live choices, and the `leader` of each waiting one. Imports cluster.engine. Invariants: a leader is
live, can be shared from or will be before its followers must wait for long, and has no leader itself; choices with
other prompts are never in one group.
"""

from __future__ import annotations

from typing import TypeAlias

from cluster.engine.live import Live

Group: TypeAlias = tuple[str, str]
"""(tenant, group id)."""


class Siblings:
    """Live choices by group, in the order in which they came."""

    def __init__(self) -> None:
        self._groups: dict[Group, list[Live]] = {}

    def join(self, live: Live) -> None:
        """One more is live. The first of a group computes the prompt; a choice with another prompt goes alone."""
        if not live.request.group_id:
            return
        members = self._groups.setdefault(_group(live), [])
        if not members or members[0].request.prompt_ids == live.request.prompt_ids:
            members.append(live)
            self._elect(members)

    def leave(self, live: Live) -> None:
        """It is not live any more, or is being moved elsewhere: nobody waits for it."""
        members = self._groups.get(_group(live), [])
        if live not in members:
            return
        members.remove(live)
        live.state.leader = None
        if members:
            self._elect(members)
        else:
            del self._groups[_group(live)]

    def lost_blocks(self, live: Live) -> None:
        """It has no blocks any more to share: another may be nearer to the prompt's end."""
        if live.request.group_id and live in (members := self._groups.get(_group(live), [])):
            self._elect(members)

    @staticmethod
    def _elect(members: list[Live]) -> None:
        """The leader is the first that has computed the prompt and holds it, else the first that runs, else the first
        that is not swapped out. Whoever has begun needs none, nor whoever must run its prompt for its scores."""
        able = [m for m in members if not m.state.host_blocks]
        leader = min(able, key=lambda m: (not _can_be_shared(m), not m.state.running), default=None)
        for member in members:
            state = member.state
            begun = state.blocks or state.host_blocks
            alone = leader is None or member is leader or begun or member.must_score or state.prompt_tokens < 2
            state.leader = None if alone or leader is None else leader.state


def _group(live: Live) -> Group:
    return live.request.tenant, live.request.group_id


def _can_be_shared(live: Live) -> bool:
    return bool(live.state.blocks) and live.state.computed >= live.state.prompt_tokens - 1
