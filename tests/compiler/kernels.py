"""Small Triton kernels, each for a part of the CPU compiler."""

# Triton takes annotations of arguments for code.

import triton
import triton.language as tl


@triton.jit
def unary(x_ptr, out_ptr, n, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if WHAT == "exp2":
        y = tl.exp2(x)
    elif WHAT == "exp":
        y = tl.exp(x)
    elif WHAT == "log2":
        y = tl.log2(x)
    elif WHAT == "log":
        y = tl.log(x)
    elif WHAT == "floor":
        y = tl.floor(x)
    elif WHAT == "sqrt":
        y = tl.sqrt(x)
    elif WHAT == "erf":
        y = tl.erf(x)
    elif WHAT == "abs":
        y = tl.abs(x)
    elif WHAT == "int":
        y = x.to(tl.int32)
    else:
        y = x
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def binary(a_ptr, b_ptr, out_ptr, n, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + at, mask=at < n)
    b = tl.load(b_ptr + at, mask=at < n)
    if WHAT == "max":
        y = tl.maximum(a, b)
    elif WHAT == "max_nan":
        y = tl.maximum(a, b, tl.PropagateNan.ALL)
    elif WHAT == "min":
        y = tl.minimum(a, b)
    elif WHAT == "min_nan":
        y = tl.minimum(a, b, tl.PropagateNan.ALL)
    elif WHAT == "quotient":
        y = a // b
    elif WHAT == "remainder":
        y = a % b
    elif WHAT == "high":
        y = tl.umulhi(a, b)
    elif WHAT == "add":
        y = a + b
    elif WHAT == "mul":
        y = a * b
    else:
        y = tl.where(a < b, a, b)
    tl.store(out_ptr + at, y, mask=at < n)


@triton.jit
def product(
    a_ptr,
    b_ptr,
    c_ptr,
    scale_ptr,
    out_ptr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    START: tl.constexpr,
):
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    if A_TURNED:
        a = tl.trans(tl.load(a_ptr + depth[:, None] * M + rows[None, :]))
    else:
        a = tl.load(a_ptr + rows[:, None] * K + depth[None, :])
    if B_TURNED:
        b = tl.trans(tl.load(b_ptr + columns[:, None] * K + depth[None, :]))
    else:
        b = tl.load(b_ptr + depth[:, None] * N + columns[None, :])
    place = rows[:, None] * N + columns[None, :]
    c = tl.load(c_ptr + place)
    if START == "zero":
        c = tl.zeros([M, N], tl.float32)
    elif START == "scale":
        c = c * tl.load(scale_ptr + rows)[:, None]
    elif START == "sum":
        c = c + tl.load(scale_ptr + rows)[:, None]
    out = tl.dot(a, b, c, input_precision="ieee")
    if START == "twice":
        out += c
    tl.store(out_ptr + place, out)


@triton.jit
def looked_up_product(
    a_ptr,
    b_ptr,
    places_ptr,
    out_ptr,
    n,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TURNED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A product of few rows whose right operand has rows at places of a table; MASKED: the first
    `n` of them."""
    rows, columns, depth = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + rows[:, None] * K + depth[None, :])
    if TURNED:
        at = tl.load(places_ptr + columns)
        b_ptrs = b_ptr + at[:, None] * K + depth[None, :]
        b = tl.load(b_ptrs, mask=columns[:, None] < n, other=0.0) if MASKED else tl.load(b_ptrs)
        b = tl.trans(b)
    else:
        at = tl.load(places_ptr + depth)
        b_ptrs = b_ptr + at[:, None] * N + columns[None, :]
        b = tl.load(b_ptrs, mask=depth[:, None] < n, other=0.0) if MASKED else tl.load(b_ptrs)
    out = tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * N + columns[None, :], out)


@triton.jit
def reduction(
    x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, WHAT: tl.constexpr
):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    if WHAT == "sum":
        y = tl.sum(x, AXIS)
    elif WHAT == "max":
        y = tl.max(x, AXIS)
    elif WHAT == "min":
        y = tl.min(x, AXIS)
    else:
        y = tl.xor_sum(x, AXIS)
    if AXIS == 0:
        tl.store(out_ptr + columns, y)
    else:
        tl.store(out_ptr + rows, y)


@triton.jit
def total(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """The sum of many blocks: a loop that carries a scalar."""
    so_far = 0.0
    for first in range(0, n, BLOCK):
        at = first + tl.arange(0, BLOCK)
        so_far += tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0))
    tl.store(out_ptr, so_far)


@triton.jit
def rotated_sum(x_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr):
    """Three tiles that a loop hands over in a circle."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    place = rows[:, None] * N + columns[None, :]
    a, b = tl.zeros([M, N], tl.float32), tl.full([M, N], 1.0, tl.float32)
    c = a + 2.0 * b
    for step in range(0, steps):
        x = tl.load(x_ptr + step * M * N + place)
        a, b, c = c + x, a, b
    tl.store(out_ptr + place, a - 2.0 * b + 3.0 * c)


@triton.jit
def branches(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Programs that stop early, and a branch that gives a tile."""
    i = tl.program_id(0)
    if i * BLOCK >= n:
        return
    at = i * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if i % 2 == 0:
        y = x * 2.0
    else:
        y = x - 1.0
    tl.store(out_ptr + at, y + x, mask=at < n)


@triton.jit
def gather(table_ptr, index_ptr, out_ptr, rows, M: tl.constexpr, N: tl.constexpr):
    """Rows by their numbers, under a mask of rows, and every third column of them."""
    i, columns = tl.arange(0, M), tl.arange(0, N)
    index = tl.load(index_ptr + i, mask=i < rows, other=1 << 27)  # far beyond the table
    x = tl.load(
        table_ptr + index[:, None] * 3 * N + 3 * columns[None, :],
        mask=(i < rows)[:, None] & (columns != 5)[None, :],
        other=-7.0,
    )
    tl.store(out_ptr + i[:, None] * N + columns[None, :], x)


@triton.jit
def ragged(x_ptr, out_ptr, n, M: tl.constexpr, N: tl.constexpr):
    """Whole rows under a mask, which no row beyond the end is read or written under."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    place = rows[:, None] * N + columns[None, :]
    exists = (rows < n)[:, None]
    x = tl.load(x_ptr + place, mask=exists, other=3.0).to(tl.float32)
    tl.store(out_ptr + place, x + tl.sum(x, 0)[None, :], mask=exists)


@triton.jit
def turned_round(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + (n - 1 - at), mask=at < n), mask=at < n)


@triton.jit
def softmax(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    """Reductions whose results the same tile reads."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    place = rows[:, None] * N + columns[None, :]
    x = tl.load(x_ptr + place)
    if AXIS == 0:
        y = tl.exp(x - tl.max(x, 0)[None, :])
        y = y / tl.sum(y, 0)[None, :]
    else:
        y = tl.exp(x - tl.max(x, 1)[:, None])
        y = y / tl.sum(y, 1)[:, None]
    tl.store(out_ptr + place, y)


@triton.jit
def scatter_add(value_ptr, index_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + at, mask=at < n, other=0)
    value = tl.load(value_ptr + at, mask=at < n, other=0.0)
    tl.atomic_add(out_ptr + index, value, mask=at < n)


@triton.jit
def reshaped(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    """A tile whose rows are cut in two, summed over the first of three axes."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    y = tl.sum(tl.reshape(x, [M // 2, 2, N]), 0)
    halves = tl.arange(0, 2)
    tl.store(out_ptr + halves[:, None] * N + columns[None, :], y)


@triton.jit
def update(x_ptr, n, BLOCK: tl.constexpr):
    """Every element becomes the one before it plus 1: all is read before any is written."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at - 1, mask=(at > 0) & (at < n), other=0.0)
    tl.store(x_ptr + at, x + 1.0, mask=at < n)


@triton.jit
def skipped_pack(a_ptr, b_ptr, out_ptr, first, second, N: tl.constexpr):
    """Products with the same operand in two loops, of which the first may not run."""
    i = tl.arange(0, N)
    place = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + place), tl.load(b_ptr + place)
    c = tl.zeros([N, N], tl.float32)
    for _ in range(0, first):
        c = tl.dot(a, b, c, input_precision="ieee")
    for _ in range(0, second):
        c = tl.dot(b, a, c, input_precision="ieee") + tl.dot(a, tl.trans(b), input_precision="ieee")
    tl.store(out_ptr + place, c)


@triton.jit
def packed_in_branch(a_ptr, b_ptr, out_ptr, taken, N: tl.constexpr):
    """Products with the same operands in a branch, which may not be taken, and after it."""
    i = tl.arange(0, N)
    place = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + place), tl.load(b_ptr + place)
    c = tl.zeros([N, N], tl.float32)
    if taken > 0:
        c = tl.dot(a, b, c, input_precision="ieee")
    c = tl.dot(a, b, c, input_precision="ieee")
    tl.store(out_ptr + place, c)


@triton.jit
def rescaled(a_ptr, b_ptr, scale_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr):
    """Products that are added to a sum whose rows are rescaled before, as flash attention does."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    place = rows[:, None] * N + columns[None, :]
    a = tl.load(a_ptr + place)
    b = tl.load(b_ptr + columns[:, None] * N + columns[None, :])
    total = tl.zeros([M, N], tl.float32)
    for step in range(0, steps):
        scale = tl.load(scale_ptr + step * M + rows)
        total = total * scale[:, None]
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + place, total)


@triton.jit
def streamed(a_ptr, b_ptr, scale_ptr, out_ptr, steps, M: tl.constexpr, N: tl.constexpr):
    """The same with another right operand in each step, as decoding does."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    place = rows[:, None] * N + columns[None, :]
    a = tl.load(a_ptr + place)
    total = tl.zeros([M, N], tl.float32)
    for step in range(0, steps):
        b = tl.load(b_ptr + step * N * N + columns[:, None] * N + columns[None, :])
        total = total * tl.load(scale_ptr + step * M + rows)[:, None]
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + place, total)


@triton.jit
def beyond(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Reads one element too many: a bound that is off by one."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at <= n, other=0.0)
    tl.store(out_ptr + at, x, mask=at < n)


@triton.jit
def sorted_tile(x_ptr, out_ptr, N: tl.constexpr):
    """Uses an operation that the compiler does not know."""
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.cumsum(tl.load(x_ptr + at), 0))


@triton.jit
def filled(like_ptr, out_ptr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    like = tl.load(like_ptr + i)
    value = tl.full((BLOCK,), VALUE, like_ptr.dtype.element_ty)
    tl.store(out_ptr + i, tl.where(like == 0, value, like).to(tl.float32))


@triton.jit
def places(out_ptr):
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at = x + tl.num_programs(0) * (y + tl.num_programs(1) * z)
    tl.store(out_ptr + at, 100 * x + 10 * y + z)


@triton.jit
def add_rows(x_ptr, out_ptr, rows_ptr, n, m, M: tl.constexpr, N: tl.constexpr):
    """Adds a tile to a matrix, row by row, and its sum to a number: programs meet in both."""
    rows, columns = tl.program_id(0) % 3 + tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + (tl.program_id(0) * M + tl.arange(0, M)[:, None]) * N + columns[None, :])
    keep = (rows[:, None] < m) & (columns[None, :] < n)
    tl.atomic_add(out_ptr + rows[:, None] * n + columns[None, :], x, mask=keep)
    tl.atomic_add(rows_ptr + rows, tl.sum(x, 1), mask=rows < m)


@triton.jit
def mixed_add(x_ptr, out_ptr, n, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    """Adds to a tensor that is also loaded or stored, or that a branch chooses."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    if WHAT == "load":
        x += 0 * tl.load(out_ptr + at, mask=at < n, other=0.0)
    elif WHAT == "store":
        tl.store(out_ptr + at, x, mask=at < n)
    tl.atomic_add(out_ptr + at, x, mask=at < n)


@triton.jit
def added_to_memory(a_ptr, b_ptr, out_ptr, n, HOW: tl.constexpr, SIZE: tl.constexpr):
    """Add a product to 32 columns of rows of 40, in memory; HOW says what comes between."""
    rows, columns = tl.arange(0, SIZE), tl.arange(0, 32)
    a = tl.load(a_ptr + rows[:, None] * SIZE + rows[None, :])
    b = tl.load(b_ptr + rows[:, None] * 32 + columns[None, :])
    at = out_ptr + rows[:, None] * 40 + columns[None, :]
    if HOW == "transposed":
        at = out_ptr + rows[:, None] + columns[None, :] * 40
    there = (rows < n)[:, None]
    if HOW == "part is loaded":
        c = tl.load(at, mask=there, other=0.0)
    else:
        c = tl.load(at)
    if HOW == "a store comes before":
        tl.store(at, c * 0.0)
    c = tl.dot(a, b, c, input_precision="ieee")
    if HOW == "read before the store":
        first_column = tl.load(out_ptr + rows * 40)
    if HOW == "part is stored":
        tl.store(at, c, mask=there)
    elif HOW == "stored elsewhere":
        tl.store(at + 8, c)
    else:
        tl.store(at, c)
    if HOW == "read before the store":
        tl.store(out_ptr + SIZE * 40 + rows, first_column)
    if HOW == "read later":
        tl.store(out_ptr + SIZE * 40 + rows, tl.sum(tl.load(at), 1))


@triton.jit
def numbered(count_ptr, out_ptr):
    """Numbers programs in the order in which one thread runs them."""
    number = tl.load(count_ptr)
    tl.store(out_ptr + tl.program_id(0), number)
    tl.store(count_ptr, number + 1)


@triton.jit
def edges(
    a_ptr, b_ptr, v_ptr, u_ptr, out_ptr, grad_ptr, back_ptr, left, right,
    m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, WHAT: tl.constexpr,
):  # fmt: skip
    """The products of attention on a tile that a mask of its rows and columns cuts."""
    rows, columns, depth = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    a = tl.load(a_ptr + rows[:, None] * k + depth)
    b = tl.load(b_ptr + columns[:, None] * k + depth)
    v = tl.load(v_ptr + columns[:, None] * k + depth)
    u = tl.load(u_ptr + rows[:, None] * k + depth)
    i, j = rows[:, None], columns[None, :]
    if WHAT == "less":
        keep = j < i + left
    elif WHAT == "at most":
        keep = j <= i + left
    elif WHAT == "more":
        keep = j > i - left
    elif WHAT == "at least":
        keep = i - j <= left
    elif WHAT == "turned":
        keep = (i - j > -left) & (i + right >= j)
    elif WHAT == "window":
        keep = (i - j <= left) & (j - i <= right)
    elif WHAT == "two sides":
        keep = (j < i - left) | (j >= i + right)
    elif WHAT == "rows":
        keep = (i < left) & (j >= 0)
    elif WHAT == "columns":
        keep = (j < left) & (i >= 0)
    elif WHAT == "sparse":
        keep = (j <= i) & ((i - j) % 3 == 0)
    elif WHAT == "exclusive":
        keep = (j <= i) ^ (j < left)
    elif WHAT == "falling":
        keep = i + j < left
    else:
        keep = (j < i) & (j > i)
    scores = tl.where(keep, tl.dot(a, tl.trans(b)), float("-inf"))
    weights = tl.exp2(scores)
    tl.store(out_ptr + rows[:, None] * k + depth, tl.dot(weights.to(v.dtype), v))
    grads = weights * (tl.dot(u, tl.trans(v)) - 1.0)
    tl.store(grad_ptr + rows[:, None] * n + columns, grads)
    tl.store(back_ptr + columns[:, None] * k + depth, tl.dot(tl.trans(grads.to(u.dtype)), u))


@triton.jit
def spread_product(
    a_ptr, b_ptr, out_ptr, stride, left, skipped,
    m: tl.constexpr, n: tl.constexpr, k: tl.constexpr, WHAT: tl.constexpr,
):  # fmt: skip
    """A product whose right operand has rows `stride` elements apart, of which `left` count."""
    rows, columns, depth = tl.arange(0, m), tl.arange(0, n), tl.arange(0, k)
    at = depth * stride
    if WHAT == "uneven":
        at += depth // 2 * skipped
    places = b_ptr + at[:, None] + columns
    if WHAT == "masked":
        b = tl.load(places, mask=depth[:, None] < left, other=0.0)
    else:
        b = tl.load(places)
    a = tl.load(a_ptr + rows[:, None] * k + depth)
    out = tl.dot(a, b, input_precision="ieee")
    tl.store(out_ptr + rows[:, None] * n + columns, out)
