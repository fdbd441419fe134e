"""From items of the data set to prompt ids: text is tokenised here, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from leeway.config import RunConfig
from leeway.errors import LeewayError
from leeway.models.base import CONFIG, ModelError, embedding_rows, model_directory, read_json
from leeway.models.tokenizer import load_tokenizer
from leeway.models.tokens import check_ids, check_tokens
from leeway.rewards import check_reward
from leeway.tasks import encode_prompt, load_task
from leeway_controller.plan import PromptError, check_prompt, plan_batch


def checked_tokenizer(config: RunConfig, model_dir: str) -> Any:
    """The model's tokenizer. Raises ModelError if it has token ids beyond the embedding."""
    directory = model_directory(model_dir)
    try:
        tokenizer = load_tokenizer(
            directory, trust_remote_code=config.model.trust_remote_code, local_files_only=True
        )
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"model {directory} has no usable tokenizer: {exc}") from exc
    check_tokens(directory, tokenizer)
    return tokenizer


def prompt_encoder(
    config: RunConfig, model_dir: str, tokenizer: Any = None
) -> tuple[Callable[[int], list[int]], int]:
    """(item -> checked prompt ids, number of items). Raises TaskError, PromptError, ModelError.

    `tokenizer`: that of `model_dir`, if it is loaded already.
    """
    if tokenizer is None:
        tokenizer = checked_tokenizer(config, model_dir)
    rows = embedding_rows(read_json(model_directory(model_dir) / CONFIG))
    task = load_task(config.task)
    check_reward(config.task, task)  # in a cluster nobody else checks it before the run starts

    @lru_cache(maxsize=4096)
    def encode(item: int) -> list[int]:
        try:
            ids = encode_prompt(tokenizer, task.item(item), config.task)
        except LeewayError:
            raise
        except Exception as exc:  # whatever a chat template or a tokenizer raises
            raise PromptError(
                f"item {item} of the data set: its prompt cannot be encoded: {type(exc).__name__}: {exc}"
            ) from exc
        check_ids(ids, rows, tokenizer, f"item {item} of the data set")
        check_prompt(ids, item, config.sampling.max_new_tokens, config.model.max_length)
        return ids

    return encode, len(task)


def check_prompts(config: RunConfig, encode: Callable[[int], list[int]], size: int) -> int:
    """Encode every item that the run will use, so that an unusable one ends it now and not hours later.

    Returns the number of distinct items. Raises TaskError, PromptError.
    """
    items: set[int] = set()
    for batch in range(config.trainer.steps):
        if len(items) == size:
            break
        items.update(plan_batch(size, config.order_seed, batch, config.batch.prompts))
    for item in sorted(items):
        encode(item)
    return len(items)
