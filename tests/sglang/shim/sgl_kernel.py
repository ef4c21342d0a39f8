"""Stands in for SGLang's kernel package on a CPU, of which no wheel exists. For tests only.

On x86 without AMX all of SGLang's operators fall back to torch by themselves; one function alone is really called.
"""

__version__ = "0.4.10"


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Write where each request's new tokens lie in the cache: row of the request, columns `[start, end)`."""
    place = 0
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    for row, start, end in zip(rows, starts, ends, strict=True):
        req_to_token[row, start:end] = out_cache_loc[place : place + end - start].to(req_to_token.dtype)
        place += end - start


def __getattr__(name):
    """Let any name be imported; calling it says what is missing."""
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not in the stand-in for a CPU")

    return missing
