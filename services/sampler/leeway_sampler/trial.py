"""`python -m leeway_sampler.trial`: start vLLM as a sampler does, and draw one response.

The weights are those of the model's directory; no server is needed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

from leeway.config import RunConfig
from leeway.errors import UsageError
from leeway.findings import Finding, run_trial
from leeway.models.tokenizer import load_tokenizer
from leeway.tasks import encode_prompt, load_task
from leeway_sampler.arguments import engine_args, engine_environment, sampling_arguments

CHECK = "engine"


def try_engine(config: RunConfig, model: str) -> Iterator[Finding | str]:
    """Start the engine, draw one response to the first prompt, stop it."""
    yield "encoding the first prompt"
    tokenizer = load_tokenizer(model, trust_remote_code=config.model.trust_remote_code)
    ids = encode_prompt(tokenizer, load_task(config.task).item(0), config.task)
    yield "starting vLLM and drawing one response"
    os.environ.update(engine_environment(config))
    yield asyncio.run(draw_one(config, model, ids))


async def draw_one(config: RunConfig, model: str, ids: list[int]) -> Finding:
    """One response with the settings of the run. Raises UsageError when vLLM rejects model or settings."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from leeway_sampler.engine import ANY_VOCABULARY, required_head
    from leeway_sampler.generation import read_logprobs, trim_heads

    head = required_head(config, ANY_VOCABULARY)
    args = engine_args(config, model, cpu=current_platform.is_cpu(), head=head.requested)
    try:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))
    except (ValueError, TypeError, OSError, RuntimeError) as exc:
        raise UsageError(f"vLLM does not start with model {model}: {type(exc).__name__}: {exc}") from exc
    try:
        head = required_head(config, llm.model_config.get_vocab_size())
        tokens = config.sampling.max_new_tokens
        arguments = sampling_arguments(config.sampling, head, config.seed, tokens)
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        output = None
        async for result in llm.generate({"prompt_token_ids": ids}, params, "preflight"):
            output = result.outputs[0]
        if output is None:
            return Finding("error", CHECK, "vLLM ended the request without a response", "see its log")
        _, top_ids, top_logp = read_logprobs(output.logprobs, list(output.token_ids), head)
        trim_heads(top_ids, top_logp, head)
    finally:
        llm.shutdown()
    text = f"vLLM drew {len(output.token_ids)} tokens to the first prompt ({output.finish_reason})"
    return Finding("ok", CHECK, text)


if __name__ == "__main__":
    run_trial(CHECK, try_engine)
