"""Parts of `tilegen.tune`: what to try, what was tried, the machine, what is said."""
