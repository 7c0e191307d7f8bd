"""Example programs, each a file of its own: `tilegen examples` lists them, and prints one."""
