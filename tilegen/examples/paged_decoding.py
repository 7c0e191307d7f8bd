"""Decode over the pages of a cache: prompts and single tokens of several requests in one call."""

import torch

import tilegen

HEADS, SHARED, DIM, PAGE = 8, 2, 64, 16
torch.manual_seed(0)
prompts = [37, 5, 80]  # tokens of each request

# A pool of pages, and for each request the pages that hold its keys, in any order.
k_pages, v_pages = torch.zeros(2, 32, PAGE, SHARED, DIM)
table = torch.randperm(30).view(3, 10).int()
lengths = torch.zeros(3, dtype=torch.int32)


def step(new: list[int]) -> torch.Tensor:
    """Append `new` tokens to each request, and attend from them to all that it has."""
    global lengths
    total = sum(new)
    starts = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    q = torch.randn(total, HEADS, DIM)
    k, v = torch.randn(2, total, SHARED, DIM)
    lengths = lengths + torch.tensor(new, dtype=torch.int32)
    tilegen.append_paged(k, v, k_pages, v_pages, table, lengths, q_starts=starts)
    return tilegen.attention_paged(
        q,
        k_pages,
        v_pages,
        table,
        lengths,
        q_starts=starts,
        max_q_length=max(new),
        mask=tilegen.causal("bottom_right"),
    )


print("prompts ", tuple(step(prompts).shape))
step([1, 1, 1])
step([1, 1, 1])
print("a token ", tuple(step([1, 1, 1]).shape), "of requests with", lengths.tolist(), "keys")
