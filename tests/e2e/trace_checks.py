"""What must hold of a run's traces: no orphan, no missing link, a way from each rollout to its weights."""

from __future__ import annotations

from collections import defaultdict

from otlp_receiver import Received, Receiver

OF_A_STEP = ("assemble", "score", "forward_backward", "optimizer", "report")
MESSAGE = {"messaging.system", "messaging.destination.name", "messaging.operation.type"}
ATTRIBUTES = {
    "plan batch": {"leeway.batch", "leeway.version"},
    "ticket": {*MESSAGE, "messaging.message.id", "leeway.batch", "leeway.version"},
    "generate": {
        "gen_ai.operation.name",
        "gen_ai.provider.name",
        "gen_ai.request.model",
        "gen_ai.request.max_tokens",
        "gen_ai.usage.input_tokens",
        "leeway.ticket",
        "leeway.version",
    },
    "reward": {"leeway.item"},
    "publish": {*MESSAGE, "messaging.message.id"},
    "step": {
        "leeway.step",
        "leeway.epoch",
        "leeway.version",
        "leeway.method",
        "leeway.ess_tok",
        "leeway.ess_seq",
    },
    "report": MESSAGE,
    "verdict": {*MESSAGE, "leeway.step"},
    "checkpoint": {"leeway.step"},
    "publish weights": {*MESSAGE, "leeway.version", "leeway.codec", "leeway.wire_bytes"},
    "apply weights": {"leeway.version", "leeway.epoch"},
}
"""What each kind of span has at least."""


def assert_whole(receiver: Receiver, steps: int, responses: int, killed: str | None = None) -> None:
    """`steps` steps of `responses` responses each are there in full; what the sampler `killed` did last may
    be missing.
    """
    by_id = {span.id: span for span in receiver.spans}  # an export that was repeated comes in twice
    spans = list(by_id.values())
    orphans = [span for span in spans if span.parent and span.parent not in by_id]
    assert not orphans, orphans[:5]
    lost = [(span.name, link) for span in spans for _, link in span.links if link not in by_id]
    assert not lost, lost[:5]
    for span in spans:
        assert not span.parent or by_id[span.parent].trace == span.trace, span
        assert span.start <= span.end
    assert {span.name for span in spans} >= set(ATTRIBUTES)
    for span in spans:
        assert set(span.attributes) >= ATTRIBUTES.get(span.name, set()), span
    runs = {span.run for span in spans}
    assert len(runs) == 1 and all(runs), runs
    below: dict[str, list[Received]] = defaultdict(list)
    for span in spans:
        below[span.parent].append(span)
    found = sorted((s for s in spans if s.name == "step"), key=lambda span: span.attributes["leeway.step"])
    assert [span.attributes["leeway.step"] for span in found] == list(range(steps))
    for step in found:
        parts = {span.name: span for span in below[step.id]}
        assert set(parts) >= set(OF_A_STEP), (step, sorted(parts))
        assert step.attributes["leeway.method"] == "dlc"
        tickets = [by_id[link] for _, link in parts["assemble"].links]
        assert len({span.id for span in tickets}) == responses
        for ticket in tickets:
            assert_drawn_for(ticket, step, by_id, below, killed)
        answers = [span for span in below[parts["report"].id] if span.name == "verdict"]
        if step is not found[-1]:  # nothing is asked after the last one
            assert len(answers) == 1, step
            assert (answers[0].trace, answers[0].id) in parts["await verdict"].links


def assert_drawn_for(
    ticket: Received,
    step: Received,
    by_id: dict[str, Received],
    below: dict[str, list[Received]],
    killed: str | None,
) -> None:
    """From the ticket of a rollout to its batch, which is the step's; what was done for it is below it."""
    batch = by_id[ticket.parent]
    assert (ticket.name, batch.name) == ("ticket", "plan batch")
    assert batch.attributes["leeway.batch"] == step.attributes["leeway.step"]
    assert ticket.attributes["leeway.version"] == step.attributes["leeway.version"]
    published = [span for span in below[ticket.id] if span.name == "publish"]
    assert published or killed, ticket
    for rollout in published:
        assert ticket.attributes["messaging.message.id"] == rollout.attributes["messaging.message.id"]
        done = [span for span in below[ticket.id] if span.instance == rollout.instance]
        if rollout.instance == killed:
            continue  # it may have begun the same ticket again after its restart
        assert {span.name for span in done} == {"generate", "reward", "publish"}
        for drawn in (span for span in done if span.name == "generate"):
            assert drawn.attributes["gen_ai.usage.output_tokens"] > 0
            assert [span.name for span in below[drawn.id]] == ["llm_request"]


def assert_broadcasts(receiver: Receiver, versions: int, samplers: int) -> None:
    """Each version was published once and applied by the samplers that lived (at least one, at most all)."""
    published = {span.attributes["leeway.version"]: span for span in receiver.named("publish weights")}
    assert sorted(published) == list(range(versions))
    for version, span in published.items():
        applied = [a for a in receiver.named("apply weights") if (span.trace, span.id) in a.links]
        assert 1 <= len({a.instance for a in applied}) <= samplers, version
