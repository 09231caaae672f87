"""What vLLM's KV connectors are asked beyond what vLLM asks them.

Owns: how a request is handed over to a connector in the middle of its output, and what a target takes of it. Imports
vLLM's internals. A connector's own parameters stay opaque, but for the one that says that a request is handed over.

vLLM made connectors for prompts that one engine computes and another decodes. Such a request ends on the first engine with
its prompt and one token; a move hands over one that has more output, as if all of it were prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from cluster.engine.vllm.internals import RequestStatus

if TYPE_CHECKING:
    from cluster.engine.vllm.internals import CoreRequest, KVCacheBlocks, KvConnector, ModelRunnerOutput

Matched: TypeAlias = "Callable[[CoreRequest, int], tuple[int | None, bool]]"
"""`get_num_new_matched_tokens`: (request, tokens in the prefix cache) -> how many more the connector has, and whether it
brings them between steps."""


def handed_over(connector: KvConnector, request: CoreRequest, blocks: KVCacheBlocks) -> RequestStatus:
    """Prepare a request to end so that the connector keeps its blocks for another engine. Returns what it is to end with:
    ABORTED where they are not handed over, because the request is in the midst of its prompt or holds none.

    NIXL keeps the blocks of a request only if it was told when they were allocated that they are to be fetched. Were each
    request announced so, the blocks of each would be kept when it ends; so it is told now, of the same blocks.
    """
    if not 0 < request.num_tokens - 1 == request.num_computed_tokens:
        return RequestStatus.FINISHED_ABORTED  # the target would take all its tokens for computed
    request.kv_transfer_params = {"do_remote_decode": True}
    connector.update_state_after_alloc(request, blocks, 0)
    return RequestStatus.FINISHED_LENGTH_CAPPED


def all_but_the_last(matched: Matched) -> Matched:
    """A connector may take all tokens that a request came with to be what the source computed. The last one the source has
    only drawn: its keys and values are nowhere, and the block that begins with it may not even exist there."""

    def but_the_last(request: CoreRequest, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens, brings_later = matched(request, num_computed_tokens)
        if tokens is None:
            return None, brings_later
        known = request.num_prompt_tokens if request.kv_transfer_params else request.num_tokens
        tokens = min(tokens, known - 1 - num_computed_tokens)
        return (tokens, brings_later) if tokens > 0 else (0, False)

    return but_the_last


def lost_blocks(output: ModelRunnerOutput) -> bool:
    """Whether the connector failed to fill some blocks."""
    said = output.kv_connector_output
    return said is not None and bool(said.invalid_block_ids)
