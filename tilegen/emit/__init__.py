"""From a problem and a config to a kernel: its text (`render`) and its file (`kernel_files`)."""
