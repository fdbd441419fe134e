"""SamplerEngine: one vLLM engine that holds one weight version and reports exactly what it drew from.

    start -> (version None) -> apply_weights(manifest) -> (version v) -> generate ...
                 | refused: damaged, or the engine could not load it and the old one was put back
                 |                                      -> version as before, still generates
                 | torn: not even that                  -> version None, generates no more
                 '-> the next apply_weights repairs both

vLLM is imported only here, in weight_engine and in plugin, after its environment was set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import redis

from leeway.config import RunConfig, SamplingConfig
from leeway.errors import LeewayError, UsageError
from leeway.telemetry.tracing import TRACES_ENDPOINT, traceparent, tracing
from leeway.weights import WeightManifest, WeightsError
from leeway_sampler import nccl
from leeway_sampler.generation import Generation, Head, build_generation
from leeway_sampler.plugin import BACKEND, OWNER_ENV, register
from leeway_sampler.store import WeightStore

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

log = logging.getLogger(__name__)

SHUTDOWN_S = 2.0
NO_TRACES = "OTEL_SDK_DISABLED"

# Fixed by Leeway: another value would make the reported distribution another than the one drawn from, or
# let a version end in another's tokens.
RESERVED_ARGS = (
    "logprobs_mode",
    "weight_transfer_config",
    "speculative_config",
    "model",
    "logits_processors",
)


class EngineError(LeewayError):
    """The engine cannot do what was asked; the message says what state it is in."""


class GenerationAborted(EngineError):
    """The request was aborted before it finished, by a weight update or abort_all; `tokens` were drawn."""

    def __init__(self, message: str, tokens: int = 0) -> None:
        super().__init__(message)
        self.tokens = tokens


class WeightsRefused(WeightsError):
    """A version could not be had or loaded: the engine serves the version before."""


class WeightsTorn(WeightsError):
    """Loading failed half-way, and the old weights could not be put back: the engine has no version."""


def engine_environment(config: RunConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment for vLLM; what the user has set stays. Must be in os.environ before torch is imported."""
    processes = config.sampler.replicas + config.trainer.ranks
    threads = config.sampler.cpu_threads or max(1, (os.cpu_count() or 1) // processes)
    wanted = {
        "VLLM_CPU_KVCACHE_SPACE": str(config.sampler.cpu_kv_cache_gib),
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "DEBUG" if config.telemetry.log_level == "DEBUG" else "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Samplers of one machine would all bind themselves to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
    }
    if not _has_accelerator() and config.sampler.enforce_eager is not False:
        # Two small functions of vLLM's sampler are compiled even in eager mode: 20 s for nothing.
        wanted["TORCH_COMPILE_DISABLE"] = "1"
    return {name: value for name, value in wanted.items() if name not in environ}


def _has_accelerator() -> bool:
    # Without torch, whose threads are set up from this very environment when it is imported.
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/accel"))


def engine_args(config: RunConfig, model: str, *, cpu: bool, head: int) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs. Raises UsageError for engine_args that Leeway has to fix."""
    taken = sorted(set(config.sampler.engine_args) & set(RESERVED_ARGS))
    if taken:
        raise UsageError(
            f"sampler.engine_args: {', '.join(taken)} cannot be set; Leeway depends on its own value"
        )
    eager = config.sampler.enforce_eager
    args: dict[str, Any] = {
        "model": model,
        "dtype": config.sampler.dtype,
        "seed": config.seed,
        "max_model_len": config.model.max_length,
        "max_num_seqs": config.sampler.max_num_seqs,
        "max_logprobs": max(head, 1),
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "enforce_eager": cpu if eager is None else eager,
        "tensor_parallel_size": config.sampler.tensor_parallel_size,
        "trust_remote_code": config.model.trust_remote_code,
        "disable_log_stats": True,
    }
    if tracing():
        # vLLM's spans are made of its statistics, so these must be on.
        args |= {"otlp_traces_endpoint": os.environ[TRACES_ENDPOINT], "disable_log_stats": False}
    # bfloat16 logits of size 16 are rounded to steps of 0.125, and their log-probs with them.
    overrides = {"head_dtype": "float32", **config.sampler.engine_args.get("hf_overrides", {})}
    if cpu:
        # A prompt that is split over two steps of a request with a seed kills vLLM on CPU: it rewinds the
        # request's generator, which CPU generators cannot do.
        args["enable_chunked_prefill"] = False
        args["max_num_batched_tokens"] = max(2048, config.model.max_length)
    else:
        args["gpu_memory_utilization"] = config.sampler.gpu_memory_utilization
    return args | config.sampler.engine_args | {"hf_overrides": overrides}


def sampling_arguments(
    sampling: SamplingConfig, head: Head, seed: int, max_new_tokens: int
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams; no min_tokens or ignore_eos, which would ban the EOS token."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": seed,
        "max_tokens": max_new_tokens,
        "logprobs": head.requested,
        "flat_logprobs": True,
        "detokenize": False,
    }


NEUTRAL: dict[str, Any] = {
    "min_tokens": 0,
    "ignore_eos": False,
    "bad_words": None,
    "allowed_token_ids": None,
    "logit_bias": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "structured_outputs": None,
}
"""Fields of SamplingParams that ban or bias tokens, and the values that do nothing."""


def banning(params: Any) -> list[str]:
    """Settings of vLLM's SamplingParams that change the distribution beyond what the trainer applies."""
    found = {name: getattr(params, name, neutral) for name, neutral in NEUTRAL.items()}
    return [f"{name}={v}" for name, v in found.items() if v != NEUTRAL[name] and v not in ([], {})]


class SamplerEngine:
    """See the module's docstring. All methods belong to one event loop."""

    def __init__(self, llm: AsyncLLM, config: RunConfig, head: Head, store: WeightStore) -> None:
        self._llm, self._config, self._head, self.store = llm, config, head, store
        self._requests: set[str] = set()
        self._updating = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self.name = ""
        """Name of this sampler, by which an NCCL group knows it."""
        self.version: int | None = None
        """Version of the weights in the engine; None before the first and after a torn update."""
        self.epoch = -1
        self.digest = ""
        self.staged_s = 0.0
        """Seconds that reading and verifying took during the last update."""
        self.paused_s = 0.0
        """Seconds that generation stood still during the last update."""
        self.bans: list[str] = []
        """Settings of the last request that ban or bias tokens; there should be none."""

    @classmethod
    async def start(cls, config: RunConfig, *, model: str, redis_url: str, run: str) -> SamplerEngine:
        """Start vLLM on the directory or hub id `model`, ready for weights of `run` from `redis_url`.

        Takes up to sampler.start_timeout_s. Raises UsageError for a model or setting that vLLM refuses, and
        EngineError when it does not start.
        """
        os.environ.update(engine_environment(config))
        os.environ[OWNER_ENV] = str(os.getpid())
        store = await asyncio.to_thread(WeightStore.connect, config, redis_url, run)
        llm = await _start_vllm(config, model)
        vocab_size = llm.model_config.get_vocab_size()
        sampling = config.sampling
        head = Head(sampling.head_tokens, sampling.head_eps, sampling.truncated, vocab_size)
        engine = cls(llm, config, head, store)
        try:
            await engine._connect()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    async def _connect(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        mode = self._llm.model_config.logprobs_mode
        if mode != "processed_logprobs":
            raise EngineError(f"vLLM runs with logprobs_mode={mode}; processed_logprobs is required")
        if self._config.weights.transport == "redis":  # by NCCL every version has a group of its own
            async with asyncio.timeout(self._config.sampler.start_timeout_s):
                await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    @property
    def logprobs_mode(self) -> str:
        """What vLLM's log-probabilities are of."""
        return str(self._llm.model_config.logprobs_mode)

    def healthy(self) -> bool:
        """Whether vLLM's processes live."""
        return not self._llm.errored

    @property
    def inflight(self) -> int:
        """Requests that have not finished."""
        return len(self._requests)

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], seed: int, max_new_tokens: int
    ) -> Generation:
        """Draw one response. It ends with EOS, or at max_new_tokens, or where model.max_length is reached.

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
        self.bans = banning(params)
        prompt: Any = {"prompt_token_ids": [int(token) for token in prompt_ids]}
        parent = traceparent()
        headers = {"traceparent": parent} if parent else None
        self._requests.add(request_id)
        self._idle.clear()
        try:
            output = None
            async for result in self._llm.generate(prompt, params, request_id, trace_headers=headers):
                output = result.outputs[0]
        except _vllm_errors() as exc:
            raise EngineError(f"request {request_id}: vLLM failed: {type(exc).__name__}: {exc}") from exc
        finally:
            self._requests.discard(request_id)
            if not self._requests:
                self._idle.set()
        if output is None or output.finish_reason not in ("stop", "length"):
            reason = output.finish_reason if output is not None else "nothing"
            tokens = len(output.token_ids) if output is not None else 0
            raise GenerationAborted(f"request {request_id} ended with {reason}", tokens)
        return build_generation(output, self._head)

    async def apply_weights(
        self,
        manifest: WeightManifest,
        *,
        inflight: Literal["abort", "wait"] = "abort",
        budget_s: float = 120.0,
    ) -> str:
        """Replace the weights by those of `manifest`; returns the digest of what was loaded.

        Everything is read and verified first, while the engine goes on. Then requests in flight are aborted
        or waited for, the weights are loaded, the prefix cache is emptied, and later requests draw from the
        new version. `staged_s` and `paused_s` tell afterwards how long each took.

        Raises WeightsRefused (version unchanged), WeightsTorn and TimeoutError (version None: only a later
        success gives one).
        """
        deadline = time.monotonic() + budget_s
        async with self._updating:
            started = time.monotonic()
            await self._stage(manifest, deadline)
            began = time.monotonic()
            self.staged_s = began - started
            async with asyncio.timeout(deadline - began):
                await self._llm.pause_generation(mode=inflight, clear_cache=True)
                try:
                    await self._swap(manifest)
                finally:
                    # Shielded: an engine that stays paused would look alive and never answer.
                    await asyncio.shield(self._llm.resume_generation())
                    self.paused_s = time.monotonic() - began
        return self.digest

    async def _stage(self, manifest: WeightManifest, deadline: float) -> None:
        try:
            if manifest.offer is not None:
                nccl.rank_in(manifest, self.name)
                return
            await asyncio.to_thread(self.store.stage, manifest, deadline)
        except (LeewayError, redis.RedisError, OSError, TimeoutError) as exc:
            raise WeightsRefused(f"{exc}; the weights before it are untouched") from exc

    async def _swap(self, manifest: WeightManifest) -> None:
        previous = (self.epoch, self.version, self.digest)
        self.epoch, self.version, self.digest = -1, None, ""
        try:
            await self._load(manifest)
        except Exception as exc:
            reason = _update_error(exc)
            await self._close_update()
            self.store.copy.undo()
            await self._put_back(previous, reason)
            raise WeightsRefused(f"{reason}; version {previous[1]} was put back") from exc
        self.store.copy.keep()
        self.epoch, self.version, self.digest = manifest.epoch, manifest.version, manifest.digest

    async def _load(self, manifest: WeightManifest) -> None:
        """Start, update, finish, empty the prefix cache; from what the store holds, or by NCCL."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if manifest.offer is not None:
            await nccl.receive(self._llm, manifest, self.name)
        else:
            await self._llm.start_weight_update()
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=self.store.update_info()))
            await self._llm.finish_weight_update(weight_version=str(manifest.version))
        if not await self._llm.reset_prefix_cache():
            raise EngineError("the prefix cache could not be emptied")

    async def _put_back(self, previous: tuple[int, int | None, str], reason: str) -> None:
        """Load the old weights again. Raises WeightsTorn when there are none, or when that fails too."""
        epoch, version, digest = previous
        held = self.store.copy.held
        if version is None or held is None or (held.key, held.digest) != ((epoch, version), digest):
            raise WeightsTorn(f"{reason}; there are no weights to put back")
        try:
            await self._load(held)
        except Exception as exc:
            await self._close_update()
            raise WeightsTorn(f"{reason}; putting version {version} back: {_update_error(exc)}") from exc
        self.epoch, self.version, self.digest = previous

    async def _close_update(self) -> None:
        # The worker that failed has closed its session already; others of a tensor-parallel group have not.
        try:
            await self._llm.finish_weight_update()
        except Exception as exc:  # noqa: BLE001 (vLLM raises a bare Exception)
            log.debug("closing the failed update: %s", exc)

    async def abort_all(self, budget_s: float = 10.0) -> None:
        """Abort what is in flight and wait until every generate call has returned. Raises TimeoutError."""
        async with asyncio.timeout(budget_s):
            await self._llm.abort(list(self._requests))
            await self._idle.wait()

    async def wait_idle(self, budget_s: float) -> bool:
        """Wait until nothing is in flight; False when it took longer than `budget_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(budget_s):
                await self._idle.wait()
        return self._idle.is_set()

    def shutdown(self) -> None:
        """Stop vLLM and its processes."""
        # All work was finished or handed back before: vLLM has nothing to wait for.
        self._llm.shutdown(timeout=SHUTDOWN_S)
        self.store.close()


async def _start_vllm(config: RunConfig, model: str) -> AsyncLLM:
    register()
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    transport = config.weights.transport
    if transport == "nccl":
        nccl.check_platform(current_platform.is_cuda(), current_platform.device_name)
    sampling = config.sampling
    # The vocabulary is known only to the engine; it accepts a larger limit than that.
    head = Head(sampling.head_tokens, sampling.head_eps, sampling.truncated, vocab_size=1 << 30)
    args = engine_args(config, model, cpu=current_platform.is_cpu(), head=head.requested)
    try:
        backend = BACKEND if transport == "redis" else transport
        vllm_args = AsyncEngineArgs(**args, weight_transfer_config=WeightTransferConfig(backend=backend))
        with _untraced_children():
            return AsyncLLM.from_engine_args(vllm_args)
    except (ValueError, TypeError, OSError) as exc:
        raise UsageError(f"vLLM refuses model {model}: {exc}") from exc
    except RuntimeError as exc:
        raise EngineError(f"vLLM did not start on model {model}: {exc}") from exc


@contextlib.contextmanager
def _untraced_children() -> Iterator[None]:
    """Processes that are started in the block send no spans. The engine's are of its start alone, and it ends
    without sending the last of them, so that others would miss their parents.
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


def _update_error(exc: Exception) -> str:
    """The reason in what vLLM reports as text."""
    from leeway_sampler.weight_engine import FAILED

    text = str(exc) or type(exc).__name__
    return text.split(FAILED, 1)[1].split("', please check")[0].strip() if FAILED in text else text
