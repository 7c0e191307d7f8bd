"""Machine code of compiled kernels, read: loops, what they issue, and how long each unit is busy.

    disassembly -> instructions -> loops of the control-flow graph -> counts -> clocks

A reading needs no GPU. It says what a kernel asks of each unit, which bounds its time from below;
it does not say how long memory takes to answer, or how the hardware interleaves warps.
"""
