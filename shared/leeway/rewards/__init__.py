"""Rewards: how a response is scored. Each built-in reward is a module in `leeway.rewards.functions`.

check_reward(config.task)                # before a run: tries it on one response
score = load_reward(config.task, task)   # a name, or module:function; checked against the task's items
pool = RewardPool(config.task)           # scoring in subprocesses that can be killed
result = await pool.score(17, "the answer is 12")
"""

from leeway.rewards.base import Reward
from leeway.rewards.load import REWARDS, load_reward
from leeway.rewards.pool import RewardPool, RewardResult
from leeway.rewards.trial import check_reward

__all__ = ["REWARDS", "Reward", "RewardPool", "RewardResult", "check_reward", "load_reward"]
