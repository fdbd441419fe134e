"""Encoder and decoder need little beside the weights, also where every value changed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

MIB = 1 << 20
TENSORS, TENSOR_BYTES = 10, 8 * MIB

PROCESS = """
import json, sys, torch
from leeway_host.bench.reader import PeakMemory
from leeway.streams import Keys, connect
from leeway.weights import ChunkSource, HostCopy, publish_weights
client, keys, share = connect(sys.argv[1]), Keys(sys.argv[2]), float(sys.argv[3])
generator = torch.Generator().manual_seed(0)
def weights():
    made = {}
    for number in range(%d):
        words = torch.randint(0, 1 << 14, (%d,), generator=generator, dtype=torch.int16)
        made[f"w{number}"] = words.view(torch.bfloat16)
    return made
old = weights()
new = {}
for name, tensor in old.items():
    hit = torch.rand(tensor.shape, generator=generator) < share
    new[name] = torch.where(hit, (tensor.view(torch.int16) ^ 0x155).view(torch.bfloat16), tensor)
del hit
first = publish_weights(client, keys, epoch=0, version=1, step=0, tensors=old.items())
copy, source, memory = HostCopy(), ChunkSource(client), PeakMemory()
copy.advance(source, keys, [first])
memory.begin()
pairs = ((name, new[name], old[name]) for name in old)
second = publish_weights(client, keys, epoch=0, version=2, step=0, tensors=pairs, base=first)
encoder = memory.extra_bytes()
memory.begin()
copy.advance(source, keys, [second])
decoder = memory.extra_bytes()
memory.begin()
third = publish_weights(client, keys, epoch=0, version=3, step=0, tensors=old.items())
copy.keep()
copy.advance(source, keys, [third])
print(json.dumps({"encoder": encoder, "decoder": decoder, "keyframe": memory.extra_bytes()}))
"""


@pytest.mark.parametrize("share", [pytest.param(0.01, marks=pytest.mark.slow), 1.0])
def test_extra_memory_is_bounded(redis_server, client, keys, share):
    code = PROCESS % (TENSORS, TENSOR_BYTES // 2)
    run = subprocess.run(
        [sys.executable, "-c", code, redis_server.url, keys.run, str(share)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    extra = json.loads(run.stdout)
    assert all(value < 64 * MIB + TENSOR_BYTES for value in extra.values()), extra
