"""A trainer with the permissions of its own user on the server trains, resyncs and saves."""

from __future__ import annotations

import redis
from other_side import OtherSide
from trainer_support import run_config

from leeway.streams import connect
from leeway_host.acl import setuser_arguments
from leeway_trainer.epochs import TrainerSetup
from leeway_trainer.train import Trainer


def test_a_trainer_of_its_own_user(tiny_dir, ranks, client: redis.Redis, redis_server, keys, tmp_path):
    client.execute_command(
        "ACL", "SETUSER", "own", "reset", *setuser_arguments("trainer", "pw", run=keys.run)
    )
    own = connect(f"redis://own:pw@127.0.0.1:{redis_server.port}/0")
    config = run_config(
        tiny_dir, trainer={"steps": 3, "checkpoint_every": 1}, sync={"max_age": 1, "stall_timeout_s": 20.0}
    )
    try:
        with OtherSide(client, keys, config) as other:
            Trainer(config, ranks, TrainerSetup(str(tiny_dir), tmp_path / "run", keys, own)).run()
            other.wait_for(lambda: other.reports[-1].event == "finished")
        refused = [entry for entry in client.acl_log() if entry["username"] == "own"]
        assert refused == [] and len(other.manifests) >= 2
    finally:
        own.close()
        client.acl_deluser("own")
