"""The products of a library's kernels for attention, read from their calls."""

import re

from jaxtrain.plan.hlo import Instruction

CALLS = "__cudnn$fmha"
# Products of a pair of places: scores and values, and in the backward pass the scores again, and
# the gradients of values, weights, queries and keys (Dao et al., 2022).
FORWARD, BACKWARD = 2, 5


def is_call(target: str) -> bool:
    return target.startswith(CALLS)


def flops(i: Instruction) -> float:
    """Return the FLOP of one execution of cuDNN's attention, or 0 for another instruction.

    A call states the largest number of a row's documents and not their lengths. Documents of equal
    length have the fewest pairs, and are counted.
    """
    target = re.search(r'custom_call_target="([^"]+)"', i.line)
    shape = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', i.line)
    if not (target and shape and is_call(target[1])):
        return 0.0
    rows, heads, queries, keys = (int(n) for n in re.findall(r"\d+", shape[1]))
    documents = min(max(_number(i, "max_seg_per_batch"), 1), keys)
    n_pairs = queries * keys / documents
    if 'CAUSAL"' in i.line and queries == keys:
        n_pairs = causal_pairs(keys, documents, _number(i, "sliding_window_length"))
    n_products = BACKWARD if "Backward" in target[1] else FORWARD
    _, result = i.shapes[0]
    return 2.0 * n_products * rows * heads * n_pairs * result[-1]


def _number(i: Instruction, name: str) -> int:
    match = re.search(rf'"{name}":\s*"?(\d+)', i.line)
    return int(match[1]) if match else 0


def causal_pairs(tokens: int, documents: int, window: int) -> float:
    """Count the pairs of a query and a key at or before it, in documents of equal length.

    Args:
      window: keys of a query, itself and those to its left; 0 = all.
    """
    length = tokens / documents
    most = min(window or length, length)
    return tokens * most - documents * most * (most - 1) / 2
