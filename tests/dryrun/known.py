"""Fixtures that the dry run does not judge rightly, with the reason; and those that no CPU-only machine can run."""

KNOWN: dict[str, str] = {
    "silent_probe_after_eager": "an eager call between replays rebinds what the graph left on a module",
    "crash_workspace_cleared": "workspaces of cuBLAS are not played",
}

ELSEWHERE: dict[str, str] = {
    "crash_cupy_scratch": "needs CuPy",
    "crash_unpadded_batch": "needs transformers",
    "crash_packed_attention": "varlen attention has no CPU kernel",
}
