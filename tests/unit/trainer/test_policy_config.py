"""Schedule and DeepSpeed configuration are pure functions of ours."""

import pytest

from leeway.config import TrainerConfig
from leeway_trainer.policy import deepspeed_config, learning_rate, merged


def test_warm_up_then_constant():
    config = TrainerConfig(learning_rate=1.0, warmup_steps=4, steps=10)
    assert [learning_rate(k, config) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_then_linear_to_zero():
    config = TrainerConfig(learning_rate=1.0, warmup_steps=2, steps=6, lr_schedule="linear")
    rates = [learning_rate(k, config) for k in range(8)]
    assert rates == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


@pytest.mark.parametrize(
    ("stage", "dtype", "runs_as"), [(0, "float32", 0), (0, "bfloat16", 1), (3, "bfloat16", 3)]
)
def test_stage_zero_in_bfloat16_runs_as_stage_one(stage, dtype, runs_as):
    built = deepspeed_config(TrainerConfig(zero_stage=stage, dtype=dtype), world_size=2)
    assert built["zero_optimization"]["stage"] == runs_as
    assert built["train_batch_size"] == 2
    assert built["data_types"] == {"grad_accum_dtype": "fp32"}


def test_the_users_deepspeed_configuration_is_merged():
    extra = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "prescale_gradients": True}
    built = deepspeed_config(TrainerConfig(zero_stage=2, deepspeed=extra), world_size=1)
    assert built["zero_optimization"]["stage"] == 2
    assert built["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert built["prescale_gradients"] is True
    assert "optimizer" not in deepspeed_config(TrainerConfig(), world_size=1, optimizer=False)


def test_buckets_are_no_larger_than_the_model():
    def bucket(parameters, **extra):
        config = TrainerConfig(deepspeed={"zero_optimization": extra})
        return deepspeed_config(config, 1, parameters=parameters)["zero_optimization"]["reduce_bucket_size"]

    assert bucket(1_000) == 1_000
    assert bucket(7 * 10**9) == 5 * 10**8
    assert bucket(1_000, reduce_bucket_size=50) == 50


def test_merging_changes_neither():
    base, over = {"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}
    assert merged(base, over) == {"a": {"b": 1, "d": 3}, "c": 2}
    assert (base, over) == ({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}})
