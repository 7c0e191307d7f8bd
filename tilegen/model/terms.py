"""The predicted time of a kernel, on one screen: tables of formulas for GPUs and for processors.

Tables are computed from top to bottom, for all configs of a kernel at once. Names that no formula
defines are facts of the problem, the device and the step of the loop: `time.py` and `cpu_time.py`
collect them. README.md lists every constant with its source.
"""

from __future__ import annotations

STEP = {
    "tensor": "2*executed/peak",
    "exp": "repeated*scores/exp_rate",
    "issue": "(repeated*(per_score + drawn)*scores + per_warps*threads + changing)/ISSUE_PER_CLK",
    "masking": "repeated*per_masked_score*scores/ISSUE_PER_CLK",  # besides, on a partial tile
    "smem": "operands*element_bytes/SMEM_BYTES_PER_CLK",
}
"""Clocks for which a step of a program keeps each unit of an SM busy."""

BUSY = {
    # Asynchronous products read their operands themselves. If all warps of an SM start the same
    # products together, they take the longer of reading and multiplying, and the softmax follows,
    # except for the part that the machine code issues beside products. Published times of
    # synchronous products do not support such a rule (benchmarks/results/published/README.md).
    "together_only": "asynchronous & alone",
    "products": "where(together_only, Max(tensor, smem), tensor)",
    "after": "where(together_only, exposed + lockstep*(1 - exposed), exposed)",
    "busy": "Max(products + after*softmax, softmax)",
}
"""Clocks for which products and softmax keep an SM busy, in a step."""

PROGRAM = {
    "latency": "latency_seconds*clock_hz/together",  # other programs work in the meantime
    "softmax": "Max(issue + masked*masking, exp)",
    "wait": "latency/Max(ahead, 1)",
    "alone": "(num_warps*together <= SCHEDULERS) | ((lockstep > 0) & (together == 1))",
    **BUSY,
    "waits": "where(ahead > 0, 0, wait) + where(loads > 1, 2*latency, 0)",
    "step": "norm(busy + step_clk/together + waits, smem, wait*loads) + local",
    "epilogue_clk": "epilogue*result_words/together",
    "exp_after": "scores_after/exp_rate",
    "issue_after": "(per_score*results + drawn)*scores_after/ISSUE_PER_CLK",
    "ends": "2*latency + epilogue_clk + Max(exp_after, issue_after) + local_once",
}
"""Clocks of a program that shares an SM with others: `together` programs in all."""

QUEUED = PROGRAM | {
    "step": "norm(queued(num_warps, together, (tensor, softmax, smem), step_clk) + waits, 0, "
    "wait*loads) + local"
}
"""The same where units work in parallel only as far as there are other warps."""

WAVES = {
    "per_launch": "programs/count",
    "slots": "num_sms*fits",
    "waves": "per_launch/slots",
    "last": "ceiling(per_launch % slots/num_sms)",  # programs of an SM in the last wave
}
"""Programs run in waves of as many as are resident."""

MEMORY = {
    # An SM has no more than its share of the bandwidth, even if others are idle.
    "l2": "moved_bytes/(Min(1, per_launch/num_sms)*l2_rate)",
    # Arriving bytes evict data that other kernels wrote to L2, until as many have arrived as L2
    # holds: the state after any large kernel, and in every measurement, where L2 is cleared by
    # writing zeros. A latency passes before the first bytes and after the last.
    "dram": "2*latency_seconds + (dram_bytes + pushed_out*Min(dram_bytes, l2_bytes))/dram_rate",
}
"""Seconds in which bytes move between SMs and L2, and between L2 and DRAM."""

TAIL = {
    # Long programs start first, so short ones fill the last wave. The end takes half a program:
    # half a mean program or, if heavy tiles start first, half of one of the lightest in flight.
    "shortest": "Max(0, 2*steps/programs - longest)",
    "light": "shortest + Min(1, slots*sections/programs)/2*(longest - shortest)",
    "tail": "(where(heavy_first, light, steps/programs)*full_step + full_ends)/2*(waves > 1)",
}
"""Clocks at the end of an unbalanced launch in which some SMs are idle. The lengths of programs are
assumed to rise evenly to the longest."""

KERNEL = {
    "mean": "full_step*steps/programs + full_ends",
    "equal": "count*(floor(waves)*fits*mean + last*(alone_step*longest + alone_ends))",
    **TAIL,
    "unequal": "Max(full_step*longest + full_ends, mean*programs/num_sms + tail)",
    "on_sms": "where(longest*programs == steps, equal, unequal)/clock_hz",
    **MEMORY,
    "seconds": "Max(on_sms, l2, dram) + launching",
    # Results that the next kernel reads, and SMs without a program, in kernels with splits.
    "left": "parts*write_bytes/l2_rate",
    "idle": "parts*Max(0, 1 - per_launch/num_sms)",
    "cost": "(1 + IDLE*idle)*seconds + left",
}
"""Seconds of a kernel; configs are ranked by `cost`."""

UNITS = {
    "tensor": "tensor*per_step",
    "exp": "exp*per_step + exp_after*per_program",
    "issue": "(issue + masked*masking)*per_step + issue_after*per_program",
    "smem": "(smem + local)*per_step + local_once*per_program",
    "latency": "wait*loads*per_step + 2*latency*per_program",
}
"""Seconds that each unit of the SMs would need by itself."""

PROCESSOR = {
    "products": ("2*multiply_adds*(steps - stopped*partial)/rate", "matrix products"),
    "narrow": (
        "packed*Max(0, microkernel/Max(columns, 1) - 1)*to_scores*steps/rate",
        "products of less than a microkernel's columns",
    ),
    "packing": (
        "packed*columns*width*packings*steps/elements",
        "packing operands into panels",
    ),
    "scores": ("tile_scores*steps/exp2_rate", "exponentials and sums of scores"),
    "masks": ("tile_scores*partial/elements", "mask code of tiles on an edge"),
    "sums": ("added*steps/elements", "rescaling and adding up results"),
    "moved": ("packed*moving", "reading what streams past"),
    "l1": (
        "Max(0, state - l1_bytes)*steps/l2_bandwidth",
        "what a step works on beyond L1",
    ),
    "l2": (
        "Max(0, state - l2_bytes)*steps/l3_bandwidth",
        "what a step works on beyond L2",
    ),
    "program": ("programs*result_words/elements", "beginning and end of programs"),
    "inputs": ("first + (1 - packed)*moving", "reading inputs where they lie"),
}
"""Seconds of a kernel on one core of a processor, each with the term in words. A prediction is
their sum with the weights of cpu_weights.toml. Where nothing is packed, products wait for memory.
"""
