"""Membership by plan: whatever arrives in which order, a batch is its slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leeway.messages import Rollout, RolloutHeader, Slot
from leeway_trainer.assemble import Admission, AssemblyError, BatchAssembler, describe_slots

GROUPS, SIZE = 3, 2


def rollout(batch=0, group=0, index=0, epoch=1, version=4, reward=0.0) -> Rollout:
    return Rollout(
        header=RolloutHeader(
            ticket_id=f"{batch}/{group}/{index}@{epoch}.{version}",
            epoch=epoch,
            version=version,
            batch=batch,
            group=group,
            index=index,
            item=0,
            sampler="s",
            finish_reason="stop",
            reward=reward,
            spans=[(0, 1, version)],
        ),
        prompt_ids=np.array([1], np.int32),
        response_ids=np.array([2], np.int32),
        logp=np.array([-1.0], np.float32),
        head_offsets=np.array([0, 0], np.int32),
        head_ids=np.array([], np.int32),
        head_logp=np.array([], np.float32),
    )


def plan(batch: int) -> list[Slot]:
    return [Slot(batch, g, i) for g in range(GROUPS) for i in range(SIZE)]


@given(st.data())
def test_any_arrival_order_gives_the_batches_of_the_plan(data):
    wanted = [rollout(s.batch, s.group, s.index) for b in range(3) for s in plan(b)]
    stale = [rollout(0, 0, 0, epoch=0), rollout(0, 0, 0, version=3), rollout(1, 1, 1, version=5)]
    extra = data.draw(st.lists(st.sampled_from(wanted + stale), max_size=20))
    arrivals = data.draw(st.permutations(wanted + extra))
    assembler = BatchAssembler(GROUPS, SIZE, epoch=1, version=4)
    taken, admitted = [], []
    for item in arrivals:
        admission = assembler.add(item)
        admitted.append(admission)
        is_stale = (item.header.epoch, item.header.version) != (1, 4)
        assert (admission is Admission.VOID) == is_stale
        while assembler.complete():
            taken.append([r.header.slot for r in assembler.take()])
    assert taken == [plan(0), plan(1), plan(2)]
    assert admitted.count(Admission.ACCEPTED) + admitted.count(Admission.FUTURE) == len(wanted)


def test_first_of_two_answers_stays():
    assembler = BatchAssembler(1, 1, epoch=1, version=4)
    assert assembler.add(rollout(reward=1.0)) is Admission.ACCEPTED
    assert assembler.add(rollout(reward=2.0)) is Admission.DUPLICATE
    assert assembler.take()[0].header.reward == 1.0
    assert assembler.add(rollout(reward=3.0)) is Admission.DUPLICATE, "its batch was taken"


def test_resync_voids_what_is_held_and_only_raises_the_version():
    assembler = BatchAssembler(GROUPS, SIZE, epoch=1, version=4)
    assembler.add(rollout(1, 2, 1))
    assembler.add(rollout(0, 0, 1))
    void = assembler.renew(5)
    assert [r.header.slot for r in void] == [Slot(0, 0, 1), Slot(1, 2, 1)]
    assert len(assembler.awaited()) == GROUPS * SIZE
    assert assembler.add(rollout(version=4)) is Admission.VOID
    assert assembler.add(rollout(version=5)) is Admission.ACCEPTED
    with pytest.raises(AssemblyError, match="versions only rise"):
        assembler.renew(5)


def test_incomplete_batch_names_what_is_awaited():
    assembler = BatchAssembler(GROUPS, SIZE, epoch=1, version=4, batch=7)
    for slot in plan(7)[:-2]:
        assembler.add(rollout(slot.batch, slot.group, slot.index))
    assert not assembler.complete()
    with pytest.raises(AssemblyError, match=r"2 of batch 7: 2/0, 2/1 \(group/index\)"):
        assembler.take()


def test_slot_outside_the_plan_is_an_error():
    with pytest.raises(AssemblyError, match="outside a batch of"):
        BatchAssembler(1, 1, epoch=1, version=4).add(rollout(group=1))


def test_long_lists_are_cut():
    assert describe_slots([]) == "nothing"
    assert describe_slots([Slot(0, g, 0) for g in range(20)]).endswith("7/0 and 12 more (group/index)")
