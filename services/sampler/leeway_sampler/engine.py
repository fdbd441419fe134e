"""SamplerEngine: one vLLM engine that draws from one weight version and reports what it drew from.

    start -> weights.apply(manifest) -> generate ... -> shutdown

arguments.py says what vLLM is started with, weight_update.py how versions replace each other. vLLM is
imported inside functions, after its environment has been set.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from leeway.config import RunConfig
from leeway.errors import LeewayError, UsageError
from leeway.telemetry.tracing import traceparent
from leeway_sampler.arguments import (
    banning_settings,
    engine_args,
    engine_environment,
    sampling_arguments,
)
from leeway_sampler.generation import Generation, Head, build_generation
from leeway_sampler.plugin import OWNER_ENV, TRANSPORT_ENV, register
from leeway_sampler.transports import TRANSPORTS
from leeway_sampler.transports.base import Endpoint
from leeway_sampler.weight_update import EngineWeights

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SHUTDOWN_S = 2.0
NO_TRACES = "OTEL_SDK_DISABLED"
ANY_VOCABULARY = 1 << 30
"""Stands for the vocabulary size until the engine has started, which alone knows it."""


class EngineError(LeewayError):
    """The engine cannot do what was asked; the message says what state it is in."""


class EngineHung(EngineError):
    """The engine has requests and draws nothing."""


class GenerationAborted(EngineError):
    """A weight update or `abort_all` aborted the request after `tokens` tokens."""

    def __init__(self, message: str, tokens: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens


class SamplerEngine:
    """See the module's docstring. All methods belong to one event loop."""

    def __init__(self, llm: AsyncLLM, config: RunConfig, head: Head, weights: EngineWeights) -> None:
        self._llm, self._config, self._head, self.weights = llm, config, head, weights
        self._requests: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._finished_tokens = 0
        self.bans: list[str] = []
        """Settings of the last request that ban or bias tokens; there should be none."""

    @classmethod
    async def start(
        cls, config: RunConfig, *, model: str, redis_url: str, run: str, name: str
    ) -> SamplerEngine:
        """Start vLLM with the directory or hub id `model`, to receive weights of `run` as sampler `name`.

        Takes up to sampler.start_timeout_s. Raises UsageError for a model or setting that vLLM rejects, and
        EngineError when vLLM does not start.
        """
        os.environ.update(engine_environment(config))
        os.environ[OWNER_ENV] = str(os.getpid())
        transport = config.weights.transport
        endpoint = Endpoint(config, redis_url, run, name)
        receiver = await asyncio.to_thread(TRANSPORTS[transport].open, endpoint)
        try:
            llm = await _start_vllm(config, model)
        except BaseException:
            receiver.close()
            raise
        head = required_head(config, llm.model_config.get_vocab_size())
        engine = cls(llm, config, head, EngineWeights(llm, transport, receiver))
        try:
            if engine.logprobs_mode != "processed_logprobs":
                raise EngineError(
                    f"vLLM runs with logprobs_mode={engine.logprobs_mode}; processed_logprobs is required"
                )
            async with asyncio.timeout(config.sampler.start_timeout_s):
                await receiver.init_engine(llm)
        except BaseException:
            engine.shutdown()
            raise
        return engine

    @property
    def version(self) -> int | None:
        """Version of the weights in the engine; None when there is no complete one."""
        return self.weights.loaded.version

    @property
    def logprobs_mode(self) -> str:
        """Which log-probabilities vLLM reports."""
        return str(self._llm.model_config.logprobs_mode)

    def healthy(self) -> bool:
        """Whether vLLM's processes are alive."""
        return not self._llm.errored

    @property
    def inflight(self) -> int:
        """Number of requests that have not finished."""
        return len(self._requests)

    @property
    def drawn(self) -> int:
        """Tokens that the engine has drawn since its start."""
        states = self._llm.output_processor.request_states.values()
        drawn: int = sum(
            state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None
        )
        return self._finished_tokens + drawn

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], seed: int, max_new_tokens: int
    ) -> Generation:
        """Draw one response. It ends with EOS, after max_new_tokens, or at model.max_length.

        Raises EngineError (no version, prompt too long, engine died), GenerationAborted and LogProbError.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self._config.model.max_length - len(prompt_ids)
        if self.version is None:
            raise EngineError(f"request {request_id}: the engine holds no complete weight version")
        if room < 1:
            raise EngineError(
                f"request {request_id}: a prompt of {len(prompt_ids)} tokens leaves no room in "
                f"model.max_length={self._config.model.max_length}"
            )
        arguments = sampling_arguments(self._config.sampling, self._head, seed, min(max_new_tokens, room))
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        self.bans = banning_settings(params)
        output = await self._request(request_id, prompt_ids, params)
        if output is None or output.finish_reason not in ("stop", "length"):
            reason = output.finish_reason if output is not None else "nothing"
            tokens = len(output.token_ids) if output is not None else 0
            raise GenerationAborted(f"request {request_id} ended with {reason}", tokens)
        return build_generation(output, self._head)

    async def _request(self, request_id: str, prompt_ids: Sequence[int], params: Any) -> Any:
        """vLLM's CompletionOutput for one request, None if it ended without one."""
        prompt: Any = {"prompt_token_ids": [int(token) for token in prompt_ids]}
        parent = traceparent()
        headers = {"traceparent": parent} if parent else None
        self._requests.add(request_id)
        self._idle.clear()
        output = None
        try:
            async for result in self._llm.generate(prompt, params, request_id, trace_headers=headers):
                output = result.outputs[0]
        except _vllm_errors() as exc:
            raise EngineError(f"request {request_id}: vLLM failed: {type(exc).__name__}: {exc}") from exc
        finally:
            self._finished_tokens += len(output.token_ids) if output is not None else 0
            self._requests.discard(request_id)
            if not self._requests:
                self._idle.set()
        return output

    async def abort_all(self, budget_s: float = 10.0) -> None:
        """Abort requests in flight and wait until every `generate` has returned. Raises TimeoutError."""
        async with asyncio.timeout(budget_s):
            await self._llm.abort(list(self._requests))
            await self._idle.wait()

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        # All work has been finished or handed back: there is nothing vLLM would have to wait for.
        self._llm.shutdown(timeout=SHUTDOWN_S)
        self.weights.receiver.close()


def required_head(config: RunConfig, vocab_size: int) -> Head:
    """What the sampler reports per token under `config`."""
    sampling = config.sampling
    return Head(sampling.head_tokens, sampling.head_eps, sampling.truncated, vocab_size)


async def _start_vllm(config: RunConfig, model: str) -> AsyncLLM:
    transport = TRANSPORTS[config.weights.transport]
    os.environ[TRANSPORT_ENV] = config.weights.transport
    register()
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    transport.check_platform(current_platform.is_cuda(), current_platform.device_name)
    # vLLM accepts a limit of log-probabilities above its vocabulary.
    head = required_head(config, ANY_VOCABULARY)
    args = engine_args(config, model, cpu=current_platform.is_cpu(), head=head.requested)
    try:
        weight_transfer = WeightTransferConfig(backend=transport.backend)
        vllm_args = AsyncEngineArgs(**args, weight_transfer_config=weight_transfer)
        with _untraced_children():
            return AsyncLLM.from_engine_args(vllm_args)
    except (ValueError, TypeError, OSError) as exc:
        raise UsageError(f"vLLM rejects model {model}: {exc}") from exc
    except RuntimeError as exc:
        raise EngineError(f"vLLM did not start with model {model}: {exc}") from exc


@contextlib.contextmanager
def _untraced_children() -> Iterator[None]:
    """Processes started in the block send no spans.

    vLLM's processes would only trace their own start, and end without sending the last spans, which leaves
    others without their parents.
    """
    before = os.environ.get(NO_TRACES)
    os.environ[NO_TRACES] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_TRACES]
        else:
            os.environ[NO_TRACES] = before


def _vllm_errors() -> tuple[type[Exception], ...]:
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    return (EngineDeadError, EngineGenerateError, ValueError)
