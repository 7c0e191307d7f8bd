"""What users write in masks and scores, as productions with weights.

`<name>` in a text stands for another symbol, `<2..9>` for a number; `<name leaf>` takes the place
of `<name>` where a text is deep enough.
"""

from __future__ import annotations

Productions = list[tuple[int, str]]

GRAMMAR: dict[str, Productions] = {
    # Integers: arithmetic with every sign and parenthesisation, choices, bits, products past 32
    # bits, rounded floats, look-ups.
    "int": [
        (6, "<int leaf>"),
        (3, "(<int> + <int>)"),
        (4, "(<int> - <int>)"),
        (3, "(<int> // <divisor>)"),
        (3, "(<int> % <divisor>)"),
        (2, "<2..5> * <int>"),
        (1, "<-9..-1> * <int>"),
        (1, "-<int>"),
        (2, "(<int> // <2..9>) * (<int> // <2..9>)"),
        (3, "<2..4> * (<int> // <2..50>)"),
        (1, "(<int leaf> * <int leaf>)"),
        (1, "(<int leaf> - <int leaf>) ** 2"),
        (2, "(<int>).abs()"),
        (1, "abs(<int>)"),
        (1, "torch.minimum(<int>, <int>)"),
        (1, "torch.maximum(<int>, <int>)"),
        (1, "(<int>).clamp(min=<-9..3>, max=<4..40>)"),
        (1, "torch.clamp(<int>, max=<4..40>)"),
        (2, "torch.where(<cond>, <int>, <int>)"),
        (1, "(<int> & <1..31>)"),
        (1, "(<int> ^ <int leaf>)"),
        (1, "(<int> | <1..15>)"),
        (2, "(<int> >> <1..4>)"),
        (1, "(<int leaf> << <1..3>)"),
        (1, "(q * 73856093 + k * 19349663) % <999983..1000003>"),
        (1, "torch.div(<int>, <2..9>, rounding_mode='<rounding>')"),
        (1, "torch.remainder(<int>, <2..9>)"),
        (1, "torch.floor(<decimal> * <int leaf>).to(torch.int64)"),
        (1, "(<cond>).to(torch.int32)"),
        (1, "((<cond>) + (<cond>)).to(torch.int32)"),
        (1, "(<int>).to(torch.<width>)"),
    ],
    "int leaf": [
        (5, "q"),
        (5, "k"),
        (2, "(q - k)"),
        (1, "(k - q)"),
        (1, "h"),
        (1, "b"),
        (1, "<-3..9>"),
        (1, "<int scalar>"),
        (2, "<int look-up>"),
    ],
    "divisor": [
        (6, "<2..9>"),
        (3, "<10..70>"),
        (1, "(h + <1..3>)"),
        (1, "-<2..5>"),
        (1, "<scalar divisor>"),
    ],
    "rounding": [(1, "floor"), (1, "trunc")],
    "decimal": [(1, one) for one in ("0.5", "0.25", "1.5", "0.3", "0.1", "2.0", "3.7", "0.05")],
    # Floats: rationals, elementary functions, tables.
    "float": [
        (4, "<float leaf>"),
        (3, "<int> / <divisor>"),
        (1, "<decimal> * <int>"),
        (2, "<decimal> * <float>"),
        (2, "(<float> + <float>)"),
        (2, "(<float> - <float>)"),
        (1, "(<float> * <float leaf>)"),
        (1, "torch.sqrt((<int>).abs() + <0..2>)"),
        (1, "torch.exp(-(<float>).abs())"),
        (1, "torch.exp2(-(<int leaf> + <1..3>) / <4..9>)"),
        (1, "torch.log1p((<float>).abs())"),
        (1, "torch.log((<int>).abs() + <1..3>)"),
        (1, "torch.sigmoid(<float>)"),
        (1, "torch.tanh(<float>)"),
        (1, "torch.sin(<float>)"),
        (1, "torch.cos(<float>)"),
        (1, "torch.erf(<float>)"),
        (1, "torch.sign(<int>)"),
        (1, "torch.floor(<decimal> * <int>)"),
        (1, "(<float>).abs()"),
        (1, "torch.maximum(<float>, <float>)"),
        (1, "(<float>).clamp(-<1..3>, <4..9>)"),
        (1, "torch.where(<cond>, <float>, <float>)"),
        (1, "torch.nn.functional.<activation>(<float>)"),
        (1, "(<float>) ** 2"),
        (1, "1.0 / (1.0 + (<int>).abs())"),
        (1, "<decimal> ** (<int leaf>).abs()"),
    ],
    "float leaf": [
        (3, "<decimal> * <int leaf>"),
        (3, "<float look-up>"),
        (1, "<float scalar>"),
    ],
    "activation": [
        (1, one)
        for one in (
            "gelu",
            "silu",
            "relu",
            "logsigmoid",
            "softplus",
            "leaky_relu",
            "elu",
            "sigmoid",
            "tanh",
        )
    ],
    # Conditions.
    "cond": [
        (6, "<int> <order> <int>"),
        (3, "<int> <order> <-5..40>"),
        (2, "<int> % <2..7> == <0..2>"),
        (2, "<int> // <2..40> == <int> // <2..40>"),
        (1, "<int> <equal> <int>"),
        (2, "<float> <order> <float>"),
        (1, "<float> <order> <decimal>"),
        (1, "q / <2..7> >= k / <2..9>"),
        (1, "q * 1000000 * k <= <1..6>000000000"),
        (1, "(q - k) ** 2 <= <1..400>"),
        (1, "(q % <4..9> - k % <4..9>) ** 2 + (q // <4..9> - k // <4..9>) ** 2 <= <2..30>"),
        (1, "(q & <1..7>) == 0"),
        (1, "((q >> <1..4>) ^ (k >> <1..4>)) & 1 == 0"),
        (3, "<same>"),
        (2, "<bool look-up>"),
        (3, "(<cond>) & (<cond>)"),
        (3, "(<cond>) | (<cond>)"),
        (1, "~(<cond>)"),
        (1, "torch.logical_and(<cond>, <cond>)"),
        (1, "torch.logical_xor(<cond>, <cond>)"),
        (1, "torch.where(<cond>, <cond>, <cond>)"),
        (1, "(<cond>) == (<cond>)"),
    ],
    "cond leaf": [
        (5, "q >= k"),
        (2, "k >= q"),
        (2, "(q - k).abs() <= <1..30>"),
        (1, "k < <1..40>"),
        (1, "h % 2 == 0"),
        (1, "<bool look-up>"),
    ],
    "order": [(4, ">="), (3, "<="), (1, "<"), (1, ">")],
    "equal": [(3, "=="), (1, "!=")],
    # Scores: what is done to s.
    "score": [
        (3, "s + <float>"),
        (2, "s - <float>"),
        (2, "s * <float>"),
        (2, "s + <int>"),
        (2, "torch.where(<cond>, s, float('-inf'))"),
        (2, "torch.where(<cond>, <score>, s)"),
        (1, "torch.where(s > <decimal>, <score>, <decimal> * s)"),
        (1, "<-3..4> * <score>"),
        (1, "<score> / <divisor>"),
        (1, "<decimal> * torch.tanh(<score>)"),
        (1, "torch.nn.functional.<activation>(<score>)"),
        (1, "torch.maximum(<score>, <float>)"),
        (1, "(<score>).clamp(-<1..3>, <2..9>)"),
        (1, "torch.log1p((<score>) ** 2)"),
        (1, "torch.sin(<score>) + <float>"),
        (1, "torch.exp(-(<score>).abs())"),
        (1, "(<score>) + 0 * s + <float>"),
        (1, "<score> * torch.sigmoid(<score>)"),
        (2, "s + <float look-up> * (k - q)"),
        (2, "s + <float look-up> - <float look-up>"),
        (1, "s * torch.exp2(-((h + 1) * 8.0 / <2..8>))"),
    ],
    "score leaf": [(6, "s"), (2, "s + <float leaf>"), (1, "0 * s + <float leaf>")],
    # Masks and scores that come ready-made.
    "mask": [
        (6, "predicate(lambda b, h, q, k: <cond>)"),
        (5, "<mask leaf>"),
        (2, "(<mask> & <mask>)"),
        (2, "(<mask> | <mask>)"),
        (1, "~<mask leaf>"),
    ],
    "mask leaf": [
        (4, "causal()"),
        (2, "causal('bottom_right')"),
        (2, "sliding_window(<0..30>, <0..9>)"),
        (1, "sliding_window(<0..30>, 0, 'bottom_right')"),
        (1, "sliding_window(None, <0..30>)"),
        (1, "sliding_window(values(<heads ints>, 'h'), <0..5>)"),
        (1, "prefix_lm(<0..40>)"),
        (1, "prefix_lm(values(<batch ints>, 'b'))"),
        (1, "global_tokens(<0..9>)"),
        (1, "streaming(<0..5>, <0..20>)"),
        (1, "kv_lengths(<batch ints>)"),
        (2, "dilated(<2..5>)"),
        (3, "documents(<ids>)"),
        (1, "documents(cu_seqlens=<cuts>)"),
        (1, "tree(<drafts>)"),
        (1, "tree(<parents>)"),
        (1, "tree(<parents>, <batch ints>)"),
        (1, "neighborhood(rows, <odd>)"),
        (2, "block_sparse(<layout 4>, 4)"),
        (1, "block_sparse(<layout 16>, 16)"),
        (1, "block_sparse(<layout 20>, 20)"),
        (1, "from_bool(<pairs>)"),
    ],
    "odd": [(1, "3"), (1, "5"), (1, "7")],
    "scores": [
        (6, "score(lambda s, b, h, q, k: <score>)"),
        (4, "<scores leaf>"),
        (2, "<plain scores>.then(<scores leaf>)"),
        (1, "score(lambda s, b, h, q, k: <score>).then(<scores leaf>)"),
    ],
    "scores leaf": [(6, "<plain scores>"), (1, "sinks(<heads floats>)")],
    "plain scores": [
        (2, "softcap(<1..9>.5)"),
        (2, "alibi(<heads floats>)"),
        (2, "relative_bias(<distances>)"),
        (2, "bias(<bias>)"),
        (1, "temperature(<heads positive>)"),
        (1, "score(lambda s, b, h, q, k: s + <float leaf>)"),
    ],
}

NARROW = ("int8", "uint8", "int16")
TABLES: dict[str, Productions] = {
    "int scalar": [(1, "<2..20>"), (1, "ints(<seed>, 1, 20)")],
    "scalar divisor": [(1, "<2..20>")],
    "float scalar": [(1, "<decimal>"), (1, "floats(<seed>)")],
    "labels": [
        (2, "ints(<seed>, 0, <1..4>, longest, dtype=<ints>)"),
        (2, "runs(<seed>, <1..4>, longest, dtype=<ints>)"),
        (1, "floats(<seed>, longest, dtype=<floats>)"),
    ],
    "heads ints": [(1, "ints(<seed>, 0, 30, heads)")],
    "batch ints": [(1, "ints(<seed>, 0, columns, batch, dtype=<ints>)")],
    "heads floats": [(1, "floats(<seed>, heads, dtype=<floats>)")],
    "heads positive": [(1, "positive(<seed>, heads)")],
    "ids": [
        (1, "runs(<seed>, <1..5>, longest, dtype=<ints>)"),
        (1, "ints(<seed>, 0, <1..5>, longest, dtype=<ints>)"),
        (1, "ints(<seed>, 0, <1..5>, batch, longest, dtype=<ints>)"),
    ],
    "cuts": [(1, "cuts(<seed>, <1..5>, longest)")],
    "pairs": [(1, "bools(<seed>, <20..80>, <lead>rows, columns)")],
    "drafts": [(1, "bools(<seed>, <20..80>, rows + 3, rows + 3)")],
    "parents": [
        (2, "parents(<seed>, rows + <0..9>, dtype=<ints>)"),
        (1, "parents(<seed>, batch, rows + <0..9>, dtype=<ints>)"),
    ],
    "distances": [
        (1, "floats(<seed>, <0..30> * 2 + 1, dtype=<floats>)"),
        (1, "floats(<seed>, heads, <0..30> * 2 + 1, dtype=<floats>)"),
    ],
    "bias": [
        (1, f"floats(<seed>, {sizes}, dtype=<floats>)")
        for sizes in (
            "rows, columns",
            "columns",
            "rows, 1",
            "heads, 1, columns",
            "batch, heads, rows, columns",
            "batch, 1, 1, columns",
        )
    ],
    **{
        f"layout {block}": [
            (1, f"bools(<seed>, 50, <lead>rows // {block} + 1, columns // {block} + 1)")
        ]
        for block in (4, 16, 20)
    },
}
"""Texts of what masks and scores capture; each becomes a name."""
PARTS: dict[str, Productions] = {
    "seed": [(1, "<0..999>")],
    "ints": [(2, "'int64'"), (1, "'int32'")],
    "widths": [(4, "'int64'"), (2, "'int32'"), *((1, f"'{one}'") for one in NARROW)],
    "width": [(1, one) for one in NARROW],
    "floats": [(3, "'float32'"), (1, "'float64'"), (1, "'float16'"), (1, "'bfloat16'")],
    "lead": [(2, ""), (1, "heads, "), (1, "batch, heads, "), (1, "batch, 1, ")],
}
SAME: Productions = [
    (4, "({0}[q] == {0}[k])"),
    (1, "({0}[q] != {0}[k])"),
    (2, "({0}[k] <= {0}[q])"),
]
"""Two look-ups of one table."""
INDICES: tuple[tuple[str, str], ...] = (
    ("q", "rows"),
    ("k", "columns"),
    ("q", "longest"),
    ("k", "longest"),
    ("h", "heads"),
    ("b", "batch"),
    ("q // 8", "rows"),
    ("k // 5", "columns"),
    ("(q - k) % 9", "9"),
    ("(k - q).clamp(-4, 4) + 4", "9"),
    ("q - rows", "rows"),
    ("-1 - k", "columns"),
)
"""Indices that users write, and the sizes they stay inside of."""
PAIRS = (
    (("h", "heads"), ("q", "rows")),
    (("h", "heads"), ("k", "columns")),
    (("b", "batch"), ("k", "columns")),
    (("b", "batch"), ("q", "rows")),
    (("q", "rows"), ("k", "columns")),
    (("q // 8", "rows"), ("k // 8", "columns")),
    (("h", "heads"), ("(q - k) % 11", "11")),
)
