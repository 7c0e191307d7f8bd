"""Compilation of emitted kernels to binaries (`compiler`), in other processes (`workers`), with
stored results (`verdicts`), and the rule for usable kernels (`acceptable`)."""
