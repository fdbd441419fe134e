"""From a ticket and its generation to a rollout, and the attributes of the spans on the way."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from leeway.config import RunConfig
from leeway.messages import Rollout, RolloutHeader, Ticket
from leeway.rewards import RewardResult
from leeway.telemetry.tracing import span
from leeway_sampler.generation import Generation


def generate_span(config: RunConfig, ticket: Ticket) -> AbstractContextManager[Any]:
    """The span around the generation of a response; vLLM's own spans are its children."""
    header = ticket.header
    attributes = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": config.model.name,
        "gen_ai.request.temperature": config.sampling.temperature,
        "gen_ai.request.max_tokens": header.max_new_tokens,
        "gen_ai.request.seed": header.seed,
        "gen_ai.usage.input_tokens": int(ticket.prompt_ids.size),
        "leeway.ticket": header.ticket_id,
        "leeway.batch": header.batch,
        "leeway.version": header.version,
    }
    return span("generate", attributes, kind="consumer", parent=header.traceparent)


def generation_attributes(generation: Generation) -> dict[str, Any]:
    """What the span learns once the response has been drawn."""
    return {
        "gen_ai.usage.output_tokens": int(generation.token_ids.size),
        "gen_ai.response.finish_reasons": [generation.finish_reason],
    }


def build_rollout(
    ticket: Ticket,
    generation: Generation,
    reward: RewardResult,
    *,
    sampler: str,
    generate_s: float,
    redraws: int = 0,
) -> Rollout:
    """The rollout that answers `ticket`. `sampler`: name of this sampler; `generate_s`: seconds it took.

    `redraws`: processes that had the ticket before.
    """
    header = ticket.header
    return Rollout(
        header=RolloutHeader(
            ticket_id=header.ticket_id,
            epoch=header.epoch,
            version=header.version,
            batch=header.batch,
            group=header.group,
            index=header.index,
            item=header.item,
            config=header.config,
            traceparent=header.traceparent,
            sampler=sampler,
            finish_reason=generation.finish_reason,
            reward=reward.value,
            reward_error=reward.error,
            spans=list(generation.spans),
            support_complete=generation.support_complete,
            digest=generation.digest,
            redraws=redraws,
            generate_s=round(generate_s, 4),
        ),
        prompt_ids=ticket.prompt_ids,
        response_ids=generation.token_ids,
        logp=generation.logp,
        head_offsets=generation.head_offsets,
        head_ids=generation.head_ids,
        head_logp=generation.head_logp,
    )
