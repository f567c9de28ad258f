"""Fixtures that the dry run does not judge rightly, with the reason; and those that no CPU-only machine can run."""

KNOWN: dict[str, str] = {}

ELSEWHERE: dict[str, str] = {
    "crash_cupy_scratch": "needs CuPy",
    "crash_unpadded_batch": "needs transformers",
    "crash_packed_attention": "varlen attention has no CPU kernel",
}
