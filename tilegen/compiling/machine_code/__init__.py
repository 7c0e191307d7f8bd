"""Machine code of compiled kernels, read: loops, what they issue, and how long each unit is busy.

    disassembly -> instructions -> loops of the control-flow graph -> counts -> clocks

Reading needs no GPU. Counts say what a kernel asks of each unit, which bounds its time from below;
they do not say how long memory takes to answer, or how the hardware interleaves warps.
"""
