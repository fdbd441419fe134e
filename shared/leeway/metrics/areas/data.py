"""What a step was trained on, measured on the arrays themselves; the infrastructure checks compare it."""

from __future__ import annotations

from leeway.metrics.metric import Metric

DATA_RESPONSES = Metric("data/responses", unit="responses", help="Responses in the trained batch.")
DATA_MISSING = Metric("data/missing", unit="responses", help="Requested responses that were not trained.")
DATA_MISSING_SLOTS = Metric(
    "data/missing_slots",
    unit="",
    help="Slots (group/index) of missing responses; absent if none.",
)
DATA_FOREIGN = Metric("data/foreign", unit="responses", help="Responses that belong to other batches.")
DATA_DUPLICATES = Metric("data/duplicates", unit="responses", help="Responses whose slot is duplicated.")
DATA_LENGTHS = Metric(
    "data/lengths", unit="responses", help="Number of responses of 1, 2, 3-4, 5-8, ... tokens, as text."
)
DATA_TOKENS = Metric("data/tokens", unit="tokens", help="Response tokens in the trained batch.")
DATA_DIGEST = Metric("data/digest", unit="", help="Digest over the slots and what was drawn for them.")
DATA_ALTERED = Metric(
    "data/altered", unit="responses", help="Responses that differ from the digest made by their sampler."
)
DATA_ALTERED_EXAMPLE = Metric(
    "data/altered_example", unit="", help="Ticket of an altered response; absent when there is none."
)
DATA_VERSION_MIN = Metric(
    "data/version_min", unit="version", help="Lowest weight version that drew a trained token."
)
DATA_VERSION_MAX = Metric(
    "data/version_max", unit="version", help="Highest weight version that drew a trained token."
)
DATA_DENOMINATOR_SEQUENCES = Metric(
    "data/denominator_sequences", unit="responses", help="Number of responses that the loss is divided by."
)
DATA_DENOMINATOR_TOKENS = Metric(
    "data/denominator_tokens", unit="tokens", help="Number of tokens that the loss is divided by."
)
BATCH_DIGEST = Metric("batch/digest", unit="", help="Digest of the batch's prompts.")
BATCH_TICKETS = Metric("batch/tickets", unit="", help="Digest of the batch's ticket ids.")

METRICS = (
    DATA_RESPONSES,
    DATA_MISSING,
    DATA_MISSING_SLOTS,
    DATA_FOREIGN,
    DATA_DUPLICATES,
    DATA_LENGTHS,
    DATA_TOKENS,
    DATA_DIGEST,
    DATA_ALTERED,
    DATA_ALTERED_EXAMPLE,
    DATA_VERSION_MIN,
    DATA_VERSION_MAX,
    DATA_DENOMINATOR_SEQUENCES,
    DATA_DENOMINATOR_TOKENS,
    BATCH_DIGEST,
    BATCH_TICKETS,
)
